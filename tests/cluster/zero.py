"""ZeRO-1 by hand, as an engine has it: every rank holds the model, and of the optimizer a flat range of all parameters laid end
to end. ckptd hears of that by boxes alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Blob, Box, Client
from torch import Tensor, nn

STATES = ("exp_avg", "exp_avg_sq")


class Zero:
    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.model, self.rank, self.world = model, rank, world
        self.named = list(model.named_parameters())
        flat = torch.cat([p.detach().flatten() for _, p in self.named])
        self.share = -(-flat.numel() // world)
        self.start, self.stop = (min(at * self.share, flat.numel()) for at in (rank, rank + 1))
        self.master = nn.Parameter(flat[self.start : self.stop].clone())
        self.inner = torch.optim.Adam([self.master], lr=1e-3)
        self.loaded: list[int] = []

    def step(self) -> None:
        gradients = torch.cat([p.grad.flatten() for _, p in self.named if p.grad is not None])
        self.master.grad = gradients[self.start : self.stop]
        self.inner.step()
        self.spread()

    def spread(self) -> None:
        """Every rank has the parameters again."""
        mine = torch.zeros(self.share)
        mine[: self.stop - self.start] = self.master.detach()
        parts = [torch.empty(self.share) for _ in range(self.world)]
        if self.world > 1:
            dist.all_gather(parts, mine)
        else:
            parts = [mine]
        flat, at = torch.cat(parts), 0
        for _, p in self.named:
            p.data.copy_(flat[at : at + p.numel()].view(p.shape))  # past every counter
            at += p.numel()

    def zero_grad(self) -> None:
        for _, p in self.named:
            p.grad = None

    def state(self, create: bool) -> dict[str, Tensor]:
        held: dict[str, Tensor] = self.inner.state[self.master]
        if create and not held:
            held |= {"step": torch.zeros(()), **{name: torch.zeros_like(self.master.detach()) for name in STATES}}
        return held

    def provide(self, loading: bool) -> Iterable[Box | Blob]:
        held, at = self.state(loading), 0
        pieces = {"fp32": self.master.detach(), **{name: held[name] for name in STATES if name in held}}
        for name, p in self.named:
            whole = (0,) * p.dim()
            yield Box(f"model.{name}", p.detach(), p.shape, whole, copy=self.rank)
            low, high = max(at, self.start), min(at + p.numel(), self.stop)
            for state, tensor in pieces.items() if low < high else ():
                part = tensor[low - self.start : high - self.start]
                yield Box("", part, p.shape, whole, p.shape, (low - at, high - at), of=(f"model.{name}", state))
            at += p.numel()
        for name, buffer in self.model.named_buffers():
            yield Box(f"model.{name}", buffer, buffer.shape, (0,) * buffer.dim(), copy=self.rank, role="buffer")
        if "step" in held:
            yield Box("optimizer.step", held["step"], (), (), copy=self.rank, role="extra")
        yield Blob("engine.config", lambda: json.dumps({"lr": 1e-3}).encode())
        yield Blob("engine.ranges", lambda: json.dumps([self.start, self.stop]).encode(), per_rank=True)

    def register(self, client: Client) -> None:
        client.register_boxes("zero", self.provide, self.restored)

    def restored(self, blobs: dict[str, Any]) -> None:
        assert json.loads(blobs["engine.config"]) == {"lr": 1e-3}
        ranges = blobs["engine.ranges"]
        found = [ranges] if isinstance(ranges, bytes) else [ranges[rank] for rank in sorted(ranges)]
        self.loaded = [stop - start for start, stop in map(json.loads, found)]

    def state_dict(self) -> dict[str, Any]:
        """All of it, on every rank: for the test's own comparison."""
        state = {}
        for name in STATES:
            mine = torch.zeros(self.share)
            mine[: self.stop - self.start] = self.state(True)[name]
            parts = [torch.empty(self.share) for _ in range(self.world)]
            if self.world > 1:
                dist.all_gather(parts, mine)
            state[name] = torch.cat(parts if self.world > 1 else [mine])[: sum(p.numel() for _, p in self.named)]
        return {"state": {0: state}}
