"""FSDP version 1 over ckptd: ``attach(model, optimizer, client)`` where others write ``client.register(model=, optimizer=)``.

``FullyShardedDataParallel`` lays parameters end to end and gives each rank a range of that. Each range is handed over as the part
of the parameter that it is, nothing is gathered; a step comes back into any other sharding, number of ranks, or the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from ckptd.core.errors import CkptdError
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client
from ckptd_client.integrations import flat


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, client: Client, **objects: Any) -> None:
    """``objects``: more for ``client.register``. Names are those of ``register(model=, optimizer=)`` of the plain model. Raises
    CkptdError: nothing in the model is sharded by FSDP1, or a parameter is neither that nor the same on all ranks."""
    sharded = Sharded(model, optimizer)
    if not sharded.units():
        hint = "client.register(model=, optimizer=) knows all else"
        raise CkptdError("no FullyShardedDataParallel in it", where="model", hint=hint)
    client.register(groups=Groups(optimizer, sharded), **objects)
    client.register_boxes("fsdp1", sharded.provide, lambda blobs: sharded.restored())


class Part(NamedTuple):
    """``tensor``: elements from ``start`` on of the parameter ``key``, whose state the optimizer has under ``under``; ``within``:
    where they lie in that one's flat memory, None: it has them alone."""

    key: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    under: Tensor
    within: slice | None


class Sharded:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.coming: flat.States = {}  # states that a restore fills, and the optimizer has not

    def units(self) -> list[tuple[str, Any]]:
        """(name of the module, its handle)."""
        found = [(name, part) for name, part in self._model.named_modules() if isinstance(part, FullyShardedDataParallel)]
        return [(name, part._handle) for name, part in found if part._handle is not None]

    def parts(self) -> Iterator[Part]:
        """Of the sharded parameters what this rank has."""
        for prefix, handle in self.units():
            whole = handle.flat_param
            memory = getattr(whole, "_local_shard", whole).detach()
            originals = whole._params or [None] * len(whole._fqns)
            for name, shape, place, original in zip(whole._fqns, whole._shapes, whole._shard_param_infos, originals, strict=True):
                if place.in_shard and place.numel_in_shard:
                    within = slice(place.offset_in_shard, place.offset_in_shard + place.numel_in_shard)
                    key = "model." + clean_tensor_name(f"{prefix}.{name}" if prefix else name)
                    under, at = (whole, within) if original is None else (original, None)
                    yield Part(key, tuple(shape), place.intra_param_start_idx, memory[within], under, at)

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that FSDP was told to ignore."""
        managed = {id(p) for _, handle in self.units() for p in (handle.flat_param, *(handle.flat_param._params or ()))}
        yield from ((clean_tensor_name(name), p) for name, p in self._model.named_parameters() if id(p) not in managed)

    def provide(self, loading: bool) -> Iterator[Box | Blob]:
        parts = list(self.parts())
        self.coming = {}
        if loading and not self._optimizer.state:
            stepped = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
            self.coming = flat.born(self._optimizer, stepped, self._optimizer.step)
        states = self.coming or self._optimizer.state
        for key, shape, start, tensor, under, within in parts:
            yield from flat.ranges(key, shape, start, tensor, states.get(under, {}), within)
        for name, parameter in self.others():
            yield from flat.ranges(f"model.{name}", parameter.shape, 0, parameter.detach().flatten(), states.get(parameter, {}))
        if loading or dist.get_rank() == 0:  # as FSDP1's own full state dict has them
            yield from flat.buffers(self._model, clean_tensor_name)

    def restored(self) -> None:
        self._optimizer.state.update(self.coming)
        self.coming = {}
        for _, handle in self.units():
            if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):  # there was a forward pass
                handle.reshard(True)  # what was gathered for it is of before


class Groups:
    """The settings of the optimizer's groups, and what it counts for each parameter alike: plain values."""

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: Sharded) -> None:
        self._optimizer, self._sharded = optimizer, sharded

    def state_dict(self) -> dict[str, Any]:
        return {"groups": flat.settings(self._optimizer), "numbers": flat.numbers(self._optimizer.state.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        flat.set_again(self._optimizer, state["groups"])
        for of_one in (self._sharded.coming or self._optimizer.state).values():
            of_one.update(state["numbers"])


__all__ = ["attach"]
