"""DeepSpeed over ckptd: ``attach(engine, client)`` after ``deepspeed.initialize()``, then ``client.restore()``, and
``client.snapshot(engine.global_steps)`` after ``engine.step()`` where that made a step.

Each rank hands over what ZeRO gave it, as ranges of the parameters that they are of: nothing is gathered, and a step comes
back into any stage and any number of ranks, or into the plain model. Of weights trained in half precision the masters are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.integrations.flat import Flat, Part

KNOWN = "0.19."  # of DeepSpeed: how its optimizers lay out what they have is no interface of it
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def attach(engine: Any, client: Client, **objects: Any) -> None:
    """``objects``: more for ``client.register``. Names: model, optimizer, groups, scheduler, engine. Raises CkptdError for what is
    not supported: pipelines, experts, tensor parallelism, NVMe, secondary partitions, half precision without ZeRO."""
    check_supported(engine)
    if engine.lr_scheduler is not None:
        objects["scheduler"] = engine.lr_scheduler
    objects["engine"] = Engine(engine)
    zero = _zero_of(engine)
    if zero is None:
        client.register(model=engine.module, optimizer=engine.optimizer, **objects)
    else:
        zero.attach(client, **objects)


def check_supported(engine: Any) -> None:
    """Raises CkptdError."""
    if not deepspeed.__version__.startswith(KNOWN):
        raise CkptdError(f"DeepSpeed {deepspeed.__version__} is not supported by this adapter", hint=f"tested with {KNOWN}8")
    if not hasattr(engine, "global_steps"):
        hint = "what deepspeed.initialize() returns first"
        raise CkptdError(f"a {type(engine).__name__}, not an engine", where="attach()", hint=hint)
    optimizer, config = engine.optimizer, engine._config.zero_config
    nvme = [part for part in ("offload_optimizer", "offload_param") if str(getattr(getattr(config, part), "device", "")) == "nvme"]
    refused = {
        "pipeline parallelism": hasattr(engine, "pipeline_parallelism") and engine.pipeline_parallelism,
        "experts (MoE)": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1,
        f"{' and '.join(nvme)} on NVMe": bool(nvme),
        "secondary partitions (zero_hpz_partition_size)": getattr(config, "zero_hpz_partition_size", 1) > 1,
        "MiCS": getattr(config, "mics_shard_size", -1) > 0,
        f"{type(optimizer).__name__} without ZeRO": _zero_of(engine) is None and not isinstance(optimizer, torch.optim.Optimizer),
    }
    for what, applies in refused.items():
        if applies:
            raise CkptdError(f"{what} is not supported by this adapter", where="deepspeed")


def _zero_of(engine: Any) -> Flat | None:
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return Partitioned(engine.module, zero.optimizer, zero)
    mapped = any(hasattr(parameter, "_hp_mapping") for parameter in engine.module.parameters())
    return Mapped(engine.module, zero.optimizer, zero) if mapped else None


class Zero(Flat):
    """``optimizer`` is the inner one, which steps what ``zero`` gave this rank."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, zero: Any) -> None:
        super().__init__(module, optimizer)
        self.zero = zero


class Mapped(Zero):
    """ZeRO-1 and 2, and bf16 without ZeRO: a rank has one range of all parameters of a group laid end to end."""

    def parts(self) -> Iterator[Part]:
        flats = self.stepped()
        for name, parameter in self.module.named_parameters():
            shape, mapping = tuple(parameter.shape), getattr(parameter, "_hp_mapping", None)
            if not parameter.requires_grad:
                yield Part(name, shape, 0, parameter.detach().flatten())
            elif mapping is not None:
                at, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
                within = slice(at.start, at.start + at.numel)
                yield Part(name, shape, start, mapping.hp_fragment.detach(), flats[mapping.param_group_index], within)

    def stepped(self) -> list[Tensor]:
        flats = getattr(self.zero, "single_partition_of_fp32_groups", None)
        return list(flats or self.zero.fp32_groups_flat_partition)

    def refresh(self) -> None:
        self.zero._hp_optimizer_states_linked = False
        self.zero._lazy_init_hp_params_optimizer_state()
        self.zero.update_lp_params()


class Partitioned(Zero):
    """ZeRO-3: a rank has a range of each parameter, of equal length on all; behind the parameter's end lies padding."""

    def parts(self) -> Iterator[Part]:
        parameter: Any
        for name, parameter in self.module.named_parameters():
            shape = tuple(parameter.ds_shape)
            if parameter.requires_grad:
                group, at, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
                under = self.zero.fp32_partitioned_groups_flat[group]
                start, count = self._owned(parameter, length)
                within = slice(at, at + count)
                yield Part(name, shape, start, under.detach()[within], under, within)
            else:
                frozen = parameter.ds_tensor.detach()
                start, count = self._owned(parameter, frozen.numel())
                yield Part(name, shape, start, frozen[:count])

    def _owned(self, parameter: Any, length: int) -> tuple[int, int]:
        """(start, number of elements) of it that this rank has."""
        start = torch.distributed.get_rank(self.zero._get_param_partition_group(parameter)) * length
        return start, max(0, min(length, parameter.ds_numel - start))

    def stepped(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def step(self) -> None:
        for number in range(len(self.stepped())):
            self.zero._optimizer_step(number)

    def refresh(self) -> None:
        zero = self.zero
        for whole, half, parts in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups, strict=True
        ):
            half.data.copy_(whole.data)
            for part, values in zip(parts, zero.unflatten(half, parts), strict=True):
                part.data = values.data
        gathered = zero.persistent_parameters
        if gathered:
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)


class Engine:
    """What the engine counts, and its loss scale: plain values, the same on all ranks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Raises CkptdError amid an accumulation: what DeepSpeed has summed up so far is in buffers that no snapshot has."""
        engine, batches = self._engine, self._engine.gradient_accumulation_steps()
        if engine.micro_steps % batches:
            hint = "client.snapshot() where engine.is_gradient_accumulation_boundary() was true before engine.step()"
            raise CkptdError(f"amid the accumulation of {batches} batches", where="engine", hint=hint)
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        found: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS} | {"batches": batches}
        return found | {"scaler": {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine, scaler = self._engine, getattr(self._engine.optimizer, "loss_scaler", None)
        for name in COUNTERS:
            setattr(engine, name, state[name])
        engine.micro_steps = state["micro_steps"] // state["batches"] * engine.gradient_accumulation_steps()
        for name, value in state["scaler"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


__all__ = ["attach"]
