"""DeepSpeed over ckptd: ``attach(engine, client)`` after ``deepspeed.initialize()``, then ``client.restore()``, and
``client.snapshot(engine.global_steps)`` after ``engine.step()`` where that made a step.

Each rank hands over what ZeRO gave it, as ranges of the parameters that they are of: nothing is gathered, and a step comes
back into any stage and any number of ranks, or into the plain model. Of weights trained in half precision the masters are saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client
from ckptd_client.integrations import flat

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def attach(engine: Any, client: Client, **objects: Any) -> None:
    """``objects``: more for ``client.register``. Names: model, optimizer, scheduler, engine. Raises CkptdError for what is not
    supported: pipelines, experts, tensor parallelism, ZeRO-3 on NVMe or with secondary partitions, fp16 without ZeRO."""
    check_supported(engine)
    if engine.lr_scheduler is not None:
        objects["scheduler"] = engine.lr_scheduler
    zero = _zero_of(engine)
    if zero is None:
        client.register(model=engine.module, optimizer=engine.optimizer, engine=Engine(engine, None), **objects)
        return
    client.register(engine=Engine(engine, zero), **objects)
    client.register_boxes("zero", zero.provide, lambda blobs: zero.restored())


def check_supported(engine: Any) -> None:
    """Raises CkptdError."""
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


def _zero_of(engine: Any) -> Zero | None:
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return Partitioned(engine)
    return Mapped(engine) if any(hasattr(p, "_hp_mapping") for p in engine.module.parameters()) else None


class Range(NamedTuple):
    """Elements of a parameter from ``start`` on; the inner optimizer has them in ``under``, at ``within``."""

    tensor: Tensor
    start: int
    under: Tensor
    within: slice


class Zero:
    """What this rank has of the engine's parameters and their states."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.inner: torch.optim.Optimizer = engine.optimizer.optimizer
        self.coming: flat.States = {}  # states that a restore fills, and the optimizer has not

    def shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def range_of(self, parameter: Any) -> Range | None:
        raise NotImplementedError

    def frozen(self, name: str, parameter: Any) -> Iterable[Box]:
        raise NotImplementedError

    def flats(self) -> list[Tensor]:
        """What the inner optimizer steps."""
        raise NotImplementedError

    def step(self) -> None:
        """Of the inner optimizer alone."""
        raise NotImplementedError

    def refresh(self) -> None:
        """The model's own parameters are what the masters are now. All ranks."""
        raise NotImplementedError

    def restored(self) -> None:
        self.inner.state.update(self.coming)
        self.coming = {}
        self.refresh()

    def provide(self, loading: bool) -> Iterator[Box | Blob]:
        self.coming = {}
        if loading and not any(self.inner.state.get(one) for one in self.flats()):
            self.coming = flat.born(self.inner, self.flats(), self.step)
        states, module = self.coming or self.inner.state, self.engine.module
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                yield from self.frozen(f"model.{name}", parameter)
            elif (found := self.range_of(parameter)) is not None:
                shape, state = self.shape(parameter), states.get(found.under, {})
                yield from flat.ranges(f"model.{name}", shape, found.start, found.tensor, state, found.within)
        if loading or self.engine.global_rank == 0:  # as DeepSpeed saves them
            yield from flat.buffers(module)


class Mapped(Zero):
    """ZeRO-1 and 2, and bf16 without ZeRO: a rank has one range of all parameters of a group laid end to end."""

    def range_of(self, parameter: Any) -> Range | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        at = mapping.hp_fragment_address
        within = slice(at.start, at.start + at.numel)
        return Range(mapping.hp_fragment, mapping.lp_fragment_address.start, self.flats()[mapping.param_group_index], within)

    def frozen(self, name: str, parameter: Any) -> Iterable[Box]:
        yield Box(name, parameter.detach(), parameter.shape, (0,) * parameter.dim(), copy=self.engine.global_rank)

    def flats(self) -> list[Tensor]:
        zero = self.optimizer
        found: list[Tensor] = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
        return found

    def step(self) -> None:
        self.inner.step()

    def refresh(self) -> None:
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()
        self.optimizer.update_lp_params()


class Partitioned(Zero):
    """ZeRO-3: a rank has a range of each parameter, of equal length on all; behind the parameter's end lies padding."""

    def shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.ds_shape)

    def _owned(self, parameter: Any, length: int) -> tuple[int, int]:
        """(start, number of elements) of it that this rank has."""
        start = torch.distributed.get_rank(self.optimizer._get_param_partition_group(parameter)) * length
        return start, max(0, min(length, parameter.ds_numel - start))

    def range_of(self, parameter: Any) -> Range | None:
        zero = self.optimizer
        group, at, length = zero.grad_position[zero.get_param_id(parameter)]
        under = zero.fp32_partitioned_groups_flat[group]
        start, count = self._owned(parameter, length)
        within = slice(at, at + count)
        return Range(under[within], start, under, within)

    def frozen(self, name: str, parameter: Any) -> Iterable[Box]:
        part = parameter.ds_tensor.detach()
        start, count = self._owned(parameter, part.numel())
        yield from flat.ranges(name, self.shape(parameter), start, part[:count], {})

    def flats(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def step(self) -> None:
        for number in range(len(self.flats())):
            self.optimizer._optimizer_step(number)

    def refresh(self) -> None:
        zero = self.optimizer
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
    """What else the engine counts: plain values, the same on all ranks."""

    def __init__(self, engine: Any, zero: Zero | None) -> None:
        self._engine, self._zero = engine, zero

    def state_dict(self) -> dict[str, Any]:
        """Raises CkptdError amid an accumulation: what DeepSpeed has summed up so far is in buffers that no snapshot has."""
        engine, zero = self._engine, self._zero
        batches = engine.gradient_accumulation_steps()
        if engine.micro_steps % batches:
            hint = "client.snapshot() where engine.is_gradient_accumulation_boundary() was true before engine.step()"
            raise CkptdError(f"amid the accumulation of {batches} batches", where="engine", hint=hint)
        found: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS} | {"batches": batches}
        if zero is not None:
            scaler = getattr(engine.optimizer, "loss_scaler", None)
            found["scaler"] = {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
            found["groups"] = flat.settings(zero.inner)
            found["numbers"] = flat.numbers(zero.inner.state.get(one, {}) for one in zero.flats())
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine, zero = self._engine, self._zero
        for name in COUNTERS:
            setattr(engine, name, state[name])
        engine.micro_steps = state["micro_steps"] // state["batches"] * engine.gradient_accumulation_steps()
        if zero is None or "groups" not in state:
            return
        flat.set_again(zero.inner, state["groups"])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        for name, value in state["scaler"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
        for of_one in (zero.coming or zero.inner.state).values():
            of_one.update(state["numbers"])


__all__ = ["attach"]
