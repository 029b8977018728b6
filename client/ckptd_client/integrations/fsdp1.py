"""FSDP version 1 over ckptd: ``attach(model, optimizer, client)`` where others write ``client.register(model=, optimizer=)``.

``FullyShardedDataParallel`` lays parameters end to end and gives each rank a range of that. Each range is handed over as the part
of the parameter that it is, nothing is gathered; a step comes back into any other sharding, number of ranks, or the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.integrations.flat import Flat, Part


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, client: Client, **objects: Any) -> None:
    """``objects``: more for ``client.register``; the settings of the optimizer's groups are ``groups``. What FSDP was told to
    ignore is the same on all ranks by your word. Raises CkptdError: nothing in the model is sharded by FSDP1."""
    sharded = Sharded(model, optimizer)
    if not sharded.units():
        hint = "client.register(model=, optimizer=) knows all else"
        raise CkptdError("no FullyShardedDataParallel in it", where="model", hint=hint)
    sharded.attach(client, **objects)


class Sharded(Flat):
    def units(self) -> list[tuple[str, Any]]:
        """(name of the module, its handle)."""
        found = [(name, part) for name, part in self.module.named_modules() if isinstance(part, FullyShardedDataParallel)]
        return [(name, part._handle) for name, part in found if part._handle is not None]

    def called(self, name: str) -> str:
        return clean_tensor_name(name)

    def parts(self) -> Iterator[Part]:
        managed: set[int] = set()
        for prefix, handle in self.units():
            whole = handle.flat_param
            memory = getattr(whole, "_local_shard", whole).detach()
            originals = whole._params or [None] * len(whole._fqns)
            managed |= {id(p) for p in (whole, *(whole._params or ()))}
            for name, shape, place, original in zip(whole._fqns, whole._shapes, whole._shard_param_infos, originals, strict=True):
                if place.in_shard:
                    within = slice(place.offset_in_shard, place.offset_in_shard + place.numel_in_shard)
                    key, start = self.called(f"{prefix}.{name}" if prefix else name), place.intra_param_start_idx
                    under, at = (whole, within) if original is None else (original, None)
                    yield Part(key, tuple(shape), start, memory[within], under, at)
        for name, ignored in self.module.named_parameters():
            if id(ignored) not in managed:
                yield Part(self.called(name), tuple(ignored.shape), 0, ignored.detach().flatten(), ignored)

    def stepped(self) -> list[Tensor]:
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return [p for p in parameters if p.requires_grad and p.numel()]

    def refresh(self) -> None:
        for _, handle in self.units():
            if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):  # there was a forward pass
                handle.reshard(True)  # what was gathered for it is of before


__all__ = ["attach"]
