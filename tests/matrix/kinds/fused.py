"""A model that is cut by hand as Megatron cuts: query, key and value in one matrix, each cut by itself; a vocabulary made longer so
that it divides. No DTensor is in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.matrix.kinds.models import WORDS

QUERIES, KEYS = 36, 12
QKV = (QUERIES, KEYS, KEYS)
WIDTH = 10


class Copy(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Of what each rank has; the gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Fused(nn.Module):
    """``at`` of ``count`` parts of each tensor."""

    def __init__(self, seed: int, count: int = 1, at: int = 0, group: Any = None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        whole = {"words": (WORDS, WIDTH), "qkv": (sum(QKV), WIDTH), "out": (WIDTH, QUERIES), "norm": (WIDTH,)}
        values = {name: torch.randn(shape, generator=draw) / 4 for name, shape in whole.items()}
        longer = torch.cat([values["words"], torch.zeros(-WORDS % count, WIDTH)])
        self.words = nn.Parameter(longer.chunk(count)[at].clone())
        self.qkv = nn.Parameter(torch.cat([part.chunk(count)[at] for part in values["qkv"].split(QKV)]))
        self.out = nn.Parameter(values["out"].chunk(count, 1)[at].clone())
        self.norm = nn.Parameter(values["norm"].clone())
        self.count, self.at, self.group = count, at, group

    def forward(self, ids: Tensor) -> Tensor:
        rows = len(self.words)
        mine = ids - self.at * rows
        known = (mine >= 0) & (mine < rows)
        hidden = self.words[mine.clamp(0, rows - 1)] * known.unsqueeze(-1)
        hidden = self._sum(hidden) * self.norm
        query, key, value = (self._copy(hidden) @ self.qkv.T).split([part // self.count for part in QKV], -1)
        group = QUERIES // KEYS
        mixed = torch.sigmoid(query * key.repeat_interleave(group, -1)) * value.repeat_interleave(group, -1)
        hidden = hidden + self._sum(mixed @ self.out.T)
        logits = self._copy(hidden) @ self.words.T
        before, behind = self.at * rows, (self.count - 1 - self.at) * rows
        return self._sum(functional.pad(logits, (before, behind)))[..., :WORDS]

    def _copy(self, x: Tensor) -> Tensor:
        return x if self.group is None else Copy.apply(x, self.group)  # type: ignore[no-any-return]

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else Sum.apply(x, self.group)  # type: ignore[no-any-return]
