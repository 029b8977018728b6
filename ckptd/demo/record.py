"""The experimenter's own record of the training state, made without any code of ckptd.

Every full tensor is put together on rank 0 by one plain ``gather`` and hashed there; the same gathered tensors are what
``torch.save`` writes for the reference run. ``DTensor.full_tensor()`` gives the same (a test compares them) but
costs one collective per tensor, too many for every step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

DIGEST_BYTES = 16


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state by plain names (``model.NAME``, ``optimizer.NAME.exp_avg``), this rank's parts."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(rows: int, rank: int, world: int) -> int:
    """How many of ``rows`` rank holds under Shard(0): torch.chunk's rule, the last ranks may hold less or none."""
    chunk = -(-rows // world)
    return max(0, min(chunk, rows - rank * chunk))


def gather_full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Full float32 tensors by name on rank 0, None elsewhere. Collective: every rank calls it with the same names."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not _shard0(tensor):
            raise TypeError(f"{name}: the record handles float32 tensors, sharded on dimension 0 or not at all")
    sharded = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [[_elements(t, r, world) for t in sharded.values()] for r in range(world)]
    mine = torch.zeros(max(sum(row) for row in sizes))
    parts = [local(t).reshape(-1) for t in sharded.values()]
    torch.cat(parts, out=mine[: sum(sizes[rank])])
    all_parts = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, all_parts, dst=0)
    if all_parts is None:
        return None
    rows = [torch.split(part[: sum(row)], row) for part, row in zip(all_parts, sizes, strict=True)]
    by_name = zip(sharded, zip(*rows, strict=True), strict=True)
    full = {name: torch.cat(pieces).view(sharded[name].shape) for name, pieces in by_name}
    return {name: full.get(name, tensor).clone() for name, tensor in tensors.items()}


def _shard0(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) or (len(tensor.placements) == 1 and tensor.placements[0] == Shard(0))


def _elements(tensor: Tensor, rank: int, world: int) -> int:
    rows = tensor.shape[0]
    return rows_of(rows, rank, world) * (tensor.numel() // rows)


def digest(tensor: Tensor) -> str:
    """Of shape and bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=DIGEST_BYTES, key=repr(tuple(tensor.shape)).encode()).hexdigest()


def digest_plain(value: Any) -> str:
    """Of non-tensor state; floats count with all their digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def plain_state(optimizer: torch.optim.Optimizer, scheduler: Any, loader: Any) -> dict[str, Any]:
    """What is not a tensor: hyperparameters of each group, the schedule, the loader's position."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"groups": groups, "scheduler": scheduler.state_dict(), "loader": loader.state_dict()}


def digests(full: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, str]:
    found = {name: digest(tensor) for name, tensor in full.items()}
    return found | {name: digest_plain(value) for name, value in plain.items()}
