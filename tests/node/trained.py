"""Checkpoints of real models, captured by the client and written by a daemon: what the tests of exports begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ckptd_client import Client
from torch import nn

from tests.cluster.nodes import Node, cluster

STEPS = 3
Train = Callable[[str, dict[str, Any], Callable[[int], Any]], Path]


@contextmanager
def trained() -> Iterator[Train]:
    """``train(job, registered, step)`` calls ``step`` a few times and returns the directory of the checkpoint behind the last."""
    with cluster() as made:
        root = made.root / "storage"
        root.mkdir()
        node = made.node(replicas=0, storage_root=root)

        def train(job: str, registered: dict[str, Any], step: Callable[[int], Any]) -> Path:
            return train_on(node, root, job, registered, step)

        yield train


def train_on(node: Node, root: Path, job: str, registered: dict[str, Any], step: Callable[[int], Any]) -> Path:
    with Client.connect(job=job, socket=str(node.socket)) as client:
        client.register(**registered)
        assert client.restore() is None
        for number in range(STEPS):
            step(number)
        client.snapshot(STEPS, must=True)
        assert client.wait("durable") == "durable"
    (found,) = root.glob(f"*/{job}/epoch-*/step-*")
    return found


class Small(nn.Module):
    """Tied weights, a buffer, bfloat16, a frozen parameter, an empty one, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8).bfloat16()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.embed(tokens).bfloat16()).float() + self.none.sum()
        found: torch.Tensor = self.head(self.norm(hidden))
        return found

    def get_extra_state(self) -> Any:
        return {"counts": [1, 2], "name": "small"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"counts": [1, 2], "name": "small"}


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Callable[[int], None]:
    def step(number: int) -> None:
        tokens = torch.arange(5) + number
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return step
