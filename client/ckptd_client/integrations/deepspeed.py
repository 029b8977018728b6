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

STEP = "step"
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
    """Elements [start, start + len(tensor)) of a parameter, with the flat tensor that has them, at ``at``."""

    tensor: Tensor
    start: int
    flat: Tensor
    at: int

    def of(self, state: Tensor) -> Tensor:
        return state.narrow(0, self.at, len(self.tensor))


class Zero:
    """What this rank has of the engine's parameters and their states."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.inner: torch.optim.Optimizer = engine.optimizer.optimizer
        self._coming: dict[Tensor, dict[str, Any]] = {}  # states that a restore fills, and the optimizer has not

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
        self.inner.state.update(self._coming)
        self._coming = {}
        self.refresh()

    def provide(self, loading: bool) -> Iterator[Box | Blob]:
        self._coming = {}
        if loading and not any(self.inner.state.get(flat) for flat in self.flats()):
            self._coming = self._born()
        module = self.engine.module
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield from self._trained(f"model.{name}", parameter)
            else:
                yield from self.frozen(f"model.{name}", parameter)
        kept = _persistent(module)
        if loading or self.engine.global_rank == 0:  # as DeepSpeed saves them
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield Box(f"model.{name}", buffer, buffer.shape, (0,) * buffer.dim(), role="buffer")

    def _trained(self, key: str, parameter: Any) -> Iterator[Box]:
        shape, found = self.shape(parameter), self.range_of(parameter)
        if found is None or not len(found.tensor):
            return
        flat = (found.start, found.start + len(found.tensor))
        yield Box(key, found.tensor.detach(), shape, (0,) * len(shape), shape, flat)
        for state, value in (self._coming or self.inner.state).get(found.flat, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == found.flat.shape:
                yield Box("", found.of(value), shape, (0,) * len(shape), shape, flat, of=(key, state))
            elif value.ndim == 0:
                yield Box("", value, (), (), of=(key, state))
            else:
                raise CkptdError(f"optimizer state {state!r} of shape {list(value.shape)} is not supported", where=key)

    def _born(self) -> dict[Tensor, dict[str, Any]]:
        """As a step of zeros at a rate of zero bears them, which torch.distributed.checkpoint makes, too. The optimizer is as it
        was: a start that finds nothing to restore trains as if nobody had asked."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.inner.param_groups]
        gradients = [flat.grad for flat in self.flats()]
        for group in self.inner.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for flat in self.flats():
            flat.grad = torch.zeros_like(flat)
        self.step()
        for flat, gradient in zip(self.flats(), gradients, strict=True):
            flat.grad = gradient
        for group, before in zip(self.inner.param_groups, groups, strict=True):
            for name in set(group) - set(before) - {"params"}:
                del group[name]
            group.update(before)
        born = {flat: self.inner.state.pop(flat) for flat in self.flats() if flat in self.inner.state}
        for state in born.values():
            state |= {STEP: torch.zeros_like(state[STEP]) if isinstance(state[STEP], Tensor) else 0} if STEP in state else {}
        return born


class Mapped(Zero):
    """ZeRO-1 and 2, and bf16 without ZeRO: a rank has one range of all parameters of a group laid end to end."""

    def range_of(self, parameter: Any) -> Range | None:
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self.flats()[mapping.param_group_index]
        return Range(mapping.hp_fragment, mapping.lp_fragment_address.start, flat, mapping.hp_fragment_address.start)

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
        flat = zero.fp32_partitioned_groups_flat[group]
        start, count = self._owned(parameter, length)
        return Range(flat.narrow(0, at, count), start, flat, at)

    def frozen(self, name: str, parameter: Any) -> Iterable[Box]:
        part = parameter.ds_tensor
        start, count = self._owned(parameter, part.numel())
        if count:
            shape = self.shape(parameter)
            yield Box(name, part.detach()[:count], shape, (0,) * len(shape), shape, (start, start + count))

    def flats(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def step(self) -> None:
        for number in range(len(self.flats())):
            self.optimizer._optimizer_step(number)

    def refresh(self) -> None:
        zero = self.optimizer
        for flat, half, parts in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups, strict=True
        ):
            half.data.copy_(flat.data)
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
        engine, zero = self._engine, self._zero
        found: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS}
        if zero is not None:
            scaler = getattr(engine.optimizer, "loss_scaler", None)
            found["scaler"] = {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
            found["groups"] = [
                {name: value for name, value in group.items() if name != "params"} for group in zero.inner.param_groups
            ]
            states = [zero.inner.state.get(flat, {}) for flat in zero.flats()]
            found["numbers"] = [
                {name: value for name, value in state.items() if not isinstance(value, Tensor)} for state in states
            ][:1]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine, zero = self._engine, self._zero
        for name in COUNTERS:
            setattr(engine, name, state[name])
        if zero is None or "groups" not in state:
            return
        groups = zero.inner.param_groups
        if len(groups) != len(state["groups"]):
            text = f"{len(state['groups'])} groups of parameters were saved, and this optimizer has {len(groups)}"
            raise CkptdError(text, where="engine", hint="restore into the same groups")
        for group, saved in zip(groups, state["groups"], strict=True):
            group.update(saved)
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        for name, value in state["scaler"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
        for flat in zero.flats():
            for numbers in state["numbers"]:
                zero.inner.state[flat].update(numbers)


def _persistent(module: torch.nn.Module) -> set[str]:
    """Names of buffers that a state dict has."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._buffers
        if name not in part._non_persistent_buffers_set
    }


__all__ = ["attach"]
