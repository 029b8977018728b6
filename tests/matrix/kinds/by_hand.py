"""Tensor parallelism of which ckptd hears by rules alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import copied, padded, shard
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.matrix.kinds.fused import QKV, Fused
from tests.matrix.kinds.models import WORDS
from tests.matrix.kinds.spread import Kind, Values


class ByHand(Kind):
    """All ranks cut the tensors, of two rows of ranks if they are even in number: a row has copies of what the other has."""

    def spread(self, make: Any, seed: int) -> None:
        self.copies = 1 if self.world % 2 or self.world == 2 else 2
        self.mesh = init_device_mesh("cpu", (self.copies, self.world // self.copies), mesh_dim_names=("dp", "tp"))
        tp = self.mesh["tp"]
        self.model = Fused(seed, self.world // self.copies, tp.get_local_rank(), tp.get_group())

    def registered(self) -> dict[str, Any]:
        rules = {
            "*.words": [shard(0, over="tp"), padded(0, WORDS), copied("dp")],
            "*.qkv": [shard(0, over="tp", parts=QKV), copied("dp")],
            "*.out": [shard(1, over="tp"), copied("dp")],
            "*.norm": [copied("tp"), copied("dp")],
        }
        return {**super().registered(), "rules": rules, "mesh": self.mesh}

    def values(self) -> Values:
        return {key: self._joined(key, value) for key, value in self.held().items()}

    def _joined(self, key: str, value: Tensor) -> Tensor:
        if "norm" in key or not value.ndim:
            return value.clone()
        group, count = self.mesh["tp"].get_group(), self.world // self.copies
        parts = [torch.empty_like(value) for _ in range(count)]
        dist.all_gather(parts, value.contiguous(), group=group)
        if ".qkv" in key:
            cut = [part.split([size // count for size in QKV]) for part in parts]
            return torch.cat([torch.cat([one[index] for one in cut]) for index in range(len(QKV))])
        return torch.cat(parts, 1) if ".out" in key else torch.cat(parts)[:WORDS]
