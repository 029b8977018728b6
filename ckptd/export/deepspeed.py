"""DeepSpeed's universal checkpoint: a folder per parameter, read by an engine of any world with load_universal. What its loader
would take for something else is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from ckptd_client.same import differing

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import FLOATS
from ckptd.export.contents import Contents, leaves
from ckptd.export.optimizer import OptimizerState, state_of
from ckptd.export.staging import Staging
from ckptd.export.stored import Stored
from ckptd.export.torch_file import put

MASTER, MOMENTS, COUNT = "fp32", ("exp_avg", "exp_avg_sq"), "step"
WRITTEN_FOR = "0.19.8"  # the loader wants a version of DeepSpeed; this one's was read and tried
LATEST = "latest_universal"
Group = tuple[dict[str, Any], list[str]]


class UniversalTree:
    """What is to be written, before anything is read but the steps. zero: the stage that is to load it, None: any."""

    def __init__(self, contents: Contents, zero: int | None) -> None:
        if zero not in (None, 1, 2, 3):
            raise CkptdError(f"no stage of ZeRO: {zero}", where="--zero", hint="1, 2 or 3; leave it out for all of them")
        self._checkpoint = contents.checkpoint
        owner, entries = contents.model()
        optimizer = _optimizer(contents)
        self._names = {key: name for key, name in optimizer.names.items() if optimizer.state.get(key)}
        groups = [(settings, [key for key in keys if key in self._names]) for settings, keys in optimizer.groups]
        self._groups: list[Group] = [group for group in groups if group[1]]
        self._states = {key: self._state(key, optimizer.state[key]) for key in self._names}
        self._steps = [self._step(keys) for _, keys in self._groups]
        _check_groups(self._groups, zero)
        self._stages = (1, 3) if zero is None else (zero,)
        trained = set(self._names.values())
        tied = {contents.tensors[key] for key in self._names if key in contents.tensors}
        self._params = {key: self._master(entries, key, owner) for key in self._names}
        taken = {name for name, value in entries.items() if name in trained or (isinstance(value, Stored) and value in tied)}
        rest = {name: value for name, value in entries.items() if name not in taken}
        if rest:
            few = ", ".join(sorted(rest)[:5])
            contents.notes.append(f"not loaded by DeepSpeed, and in the file's module alone (frozen, buffers): {few}")
        self._model = self._model_states(contents, rest)
        every = [*self._params.values(), *leaves(self._states), *(leaf for _ in self._stages for leaf in leaves(self._model))]
        counts = (len(self._names) + 1) * torch.tensor(self._steps[0]).nbytes
        self.tensors, self.nbytes = len(every), sum(stored.nbytes for stored in every) + counts

    def write(self, staging: Staging) -> None:
        tag = f"global_step{self._checkpoint.step}_universal"
        for number, (_, keys) in enumerate(self._groups):
            for key in keys:
                folder = f"{tag}/zero/{self._names[key]}"
                put(staging, f"{folder}/{MASTER}.pt", {"param": self._params[key]}, self._checkpoint)
                for name in MOMENTS:
                    put(staging, f"{folder}/{name}.pt", {"param": self._states[key][name]}, self._checkpoint)
                put(staging, f"{folder}/{COUNT}.pt", torch.tensor(self._steps[number]), self._checkpoint)
        put(staging, f"{tag}/zero/optimizer_state.pt", self._optimizer_state(), self._checkpoint)
        for stage in self._stages:
            name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            put(staging, f"{tag}/{name}", self._model, self._checkpoint)
        (staging.content / LATEST).write_text(tag, encoding="utf-8")

    def _master(self, entries: dict[str, Any], key: str, owner: str) -> Stored:
        stored = entries.get(self._names[key])
        if not isinstance(stored, Stored) or stored.dtype not in FLOATS:
            hint = f"--only '{owner}.*' and the optimizer's keys of these"
            raise CkptdError("its optimizer has state for it, and it is no float of the model", where=key, hint=hint)
        return dataclasses.replace(stored, to="F32")

    def _state(self, key: str, found: dict[str, Any]) -> dict[str, Any]:
        """Its loader knows Adam's states alone."""
        if set(found) != {*MOMENTS, COUNT} or not all(isinstance(found[name], Stored) for name in MOMENTS):
            what = f"no state of Adam: {', '.join(sorted(found))}"
            raise CkptdError(what, where=key, hint=f"load_universal knows {', '.join((*MOMENTS, COUNT))}; --to dcp holds any")
        return {name: dataclasses.replace(found[name], to="F32") for name in MOMENTS} | {COUNT: found[COUNT]}

    def _step(self, keys: list[str]) -> float:
        steps = {self._number(self._states[key].pop(COUNT)): key for key in keys}
        if len(steps) > 1:
            what = ", ".join(f"{key} has made {number:g}" for number, key in sorted(steps.items()))
            hint = "load_universal wants one number of steps in a group; --to dcp holds each"
            raise CkptdError(f"unequal steps within a group: {what}", where="--to deepspeed", hint=hint)
        return next(iter(steps))

    def _number(self, value: Any) -> float:
        return float(value.read(self._checkpoint, Box.whole(value.shape)) if isinstance(value, Stored) else value)

    def _optimizer_state(self) -> dict[str, Any]:
        """Stage 3 reads the second half, and takes group 0 for all."""
        groups = [{**settings, "params": [number]} for number, (settings, _) in enumerate(self._groups)]
        first = {"state": {0: {COUNT: torch.tensor(self._steps[0])}}, "param_groups": groups[:1]}
        return {"ds_version": WRITTEN_FOR, "param_groups": groups, "optimizer_state_dict": first}

    def _model_states(self, contents: Contents, rest: dict[str, Any]) -> dict[str, Any]:
        extras = contents.extras()
        scheduler: Any = next((value for name, value in extras.items() if name.endswith("scheduler")), {})
        step = contents.checkpoint.step
        numbers = {"skipped_steps": 0, "global_steps": step, "dp_world_size": 1, "mp_world_size": 1}
        shapes = [{self._names[key]: self._params[key].shape for key in keys} for _, keys in self._groups]
        return {"module": rest, "lr_scheduler": scheduler, **numbers, "param_shapes": shapes, "extra": extras}


def _optimizer(contents: Contents) -> OptimizerState:
    """Raises CkptdError where there is not one, or where nobody knows its groups."""
    found = contents.optimizers
    if len(found) != 1:
        hint = "choose one with --only" if found else "--only leaves it out, or it was not registered"
        raise CkptdError(f"{len(found) or 'no'} optimizers: {', '.join(found)}", where="--to deepspeed", hint=hint)
    state = state_of(contents, found[0])
    if not any(keys for _, keys in state.groups) or not any(state.state.values()):
        raise CkptdError("nothing saved says which group a parameter is in", where=found[0], hint="--to dcp holds it by name")
    return state


def _check_groups(groups: list[Group], zero: int | None) -> None:
    first, *others = (settings for settings, _ in groups)
    for number, settings in enumerate(others, 1):
        names = sorted({*differing(first, settings), *(settings.keys() - first.keys())})
        if names and zero in (None, 3):
            what = f"groups 0 and {number} differ in {', '.join(names)}, and ZeRO-3 takes those of group 0 for all"
            raise CkptdError(what, where="--to deepspeed", hint="--zero 1 or --zero 2, where no stage 3 is to load it")
