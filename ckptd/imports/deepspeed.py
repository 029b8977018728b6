"""What DeepSpeed's own checkpoints and universal ones have in common: the model states of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ckptd.core.errors import CkptdError
from ckptd.imports import flat, torch_file
from ckptd.imports.stored import Place, Stored, joined

CONVERT = "DeepSpeed's ds_to_universal joins them: import its output with --from universal"
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_ITS_OWN = frozenset(  # of the engine, which a training with ckptd has no use for
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
        "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "ds_version", "sparse_tensor_module_names", "universal_checkpoint_info",
        "autotp_universal_checkpoint_info", "ds_autoep_layers", "autoep_layers",
    }
)  # fmt: skip


class ModelStates:
    """By rank; of stages up to 2 all have one file."""

    def __init__(self, folder: Path, foreign: set[str]) -> None:
        found = {file: match for file in sorted(folder.iterdir()) if (match := _MODEL.fullmatch(file.name))}
        if not found:
            raise CkptdError("no *model_states.pt here", where=str(folder), hint="name the directory of one tag, as global_step100")
        if {int(match[2]) for match in found.values()} != {0} or any(folder.glob("layer_*")):
            raise CkptdError("tensor, pipeline or expert parallel ranks have files of their own", where=str(folder), hint=CONVERT)
        ordered = sorted(found, key=lambda file: int(found[file][1] or 0))
        self.ranks: list[dict[str, Any]] = [torch_file.load(str(file), foreign) for file in ordered]
        self.first, self.where = self.ranks[0], str(ordered[0])
        if not isinstance(self.first.get("param_shapes"), list):
            raise CkptdError("it does not tell the shapes of its parameters", where=self.where, hint="only what ZeRO wrote is read")
        self.groups: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in self.first["param_shapes"]
        ]
        self.shapes = {name: shape for group in self.groups for name, shape in group.items()}

    def others(self) -> dict[str, Stored]:
        """What is in no optimizer: buffers, and frozen parameters, of stage 3 from all ranks."""
        module, fragments = self.first["module"] or {}, self.first.get("frozen_param_fragments") or {}
        names = {*(self.first.get("buffer_names") or ()), *(name for name in module if name not in self.shapes)}
        kept = {
            name: value for name, value in module.items()
            if name in names and name not in self.shapes and name not in fragments and isinstance(value, Stored)
        }  # fmt: skip
        frozen = self.first.get("frozen_param_shapes") or {}
        return kept | {name: self._joined(name, tuple(frozen[name])) for name in fragments if name in frozen}

    def _joined(self, name: str, shape: tuple[int, ...]) -> Stored:
        parts = [rank["frozen_param_fragments"][name] for rank in self.ranks]
        if parts[0].shape == shape:  # up to stage 2
            return cast(Stored, parts[0])
        return partitioned(shape, [(part, 0) for part in parts])

    def more(self) -> dict[str, Any]:
        """What the program gave, and its scheduler's state."""
        return {key: value for key, value in self.first.items() if key not in _ITS_OWN and value is not None}

    def step(self) -> int:
        found = self.first.get("global_steps")
        return found if isinstance(found, int) and found >= 0 else 0


def partitioned(shape: tuple[int, ...], parts: list[tuple[Stored, int]]) -> Stored:
    """As stage 3 cuts: each rank has an equal range of the flattened elements, the last ones less. parts: by rank, the buffer and
    where in it the rank's range begins."""
    count = math.prod(shape)
    each = -(-count // len(parts))
    found: list[Place] = []
    for rank, (stored, at) in enumerate(parts):
        start = min(rank * each, count)
        found += flat.places(shape, start, min(each, count - start), stored, at)
    return joined(parts[0][0].dtype, shape, found)


def by_group(where: str, groups: list[Any], shapes: list[dict[str, tuple[int, ...]]]) -> list[dict[str, Any]]:
    """Hyperparameters with the names of their parameters. Raises CkptdError: which has which cannot be told."""
    hyper = [{name: value for name, value in group.items() if name not in ("params", "param_names")} for group in groups]
    if len(hyper) != len(shapes) and any(one != hyper[0] for one in hyper):
        text = f"{len(hyper)} groups of hyperparameters for {len(shapes)} groups of parameters"
        raise CkptdError(text, where=where, hint="load it with DeepSpeed, and save it in stage 1")
    if len(hyper) != len(shapes):
        hyper = hyper[:1] * len(shapes)
    return [{**one, "params": list(names)} for one, names in zip(hyper, shapes, strict=True)]


def tree(states: ModelStates, weights: Mapping[str, Stored], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {**states.more(), "model": {**states.others(), **weights}, "optimizer": optimizer}
