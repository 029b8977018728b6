"""Importing by the command line, and restoring what was imported with a real client over a real daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ckptd_client import Client

from tests.node.commands import Cli
from tests.node.daemon_rig import rig

JOB = "imported"
STEP = 7


def run_import(cli: Cli, source: Path, kind: str, root: Path | str, *more: object) -> dict[str, Any]:
    ran = cli("import", source, "--from", kind, "--job", JOB, "--step", STEP, "--storage-root", root, "--json", *more)
    assert ran.code == 0, ran.err
    report: dict[str, Any] = json.loads(ran.out)
    return report


def restored(root: Path, *, strict: bool = True, **registered: Any) -> dict[str, Any]:
    """Into these objects; what ``last_restore`` says."""

    def train(socket: Path) -> dict[str, Any]:
        with Client.connect(JOB, socket=str(socket)) as client:
            client.register(**registered)
            assert client.restore(strict=strict) == STEP
            return dict(client.last_restore or {})

    async def over_a_daemon() -> dict[str, Any]:
        async with rig(storage_root=root) as house:
            return await asyncio.to_thread(train, house.daemon.config.socket)

    return asyncio.run(over_a_daemon())


class Net(torch.nn.Module):
    """Tied weights, buffers, a 0-d parameter, an empty one, bfloat16."""

    def __init__(self, *, fill: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False)
        self.norm, self.low = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6).to(torch.bfloat16)
        self.scale, self.none = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.empty(0, 4))
        self.head.weight = self.embed.weight
        if fill is not None:
            with torch.no_grad():
                for tensor in self.state_dict().values():
                    tensor.fill_(fill)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.embed(tokens))
        out: torch.Tensor = self.head(hidden + self.low(hidden.to(torch.bfloat16)).float()) * self.scale + self.none.sum()
        return out


def trained(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    """A few steps, and a learning rate that a scheduler has changed."""
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    for step in range(3):
        net(torch.arange(9) + step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.025
    return net, optimizer


def fresh(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(fill=0)
    return net, kind(net.parameters(), lr=0.1)


def expect_same(net: Net, optimizer: torch.optim.Optimizer | None, other: Net, its: torch.optim.Optimizer | None) -> None:
    """Bit by bit."""
    ours, theirs = net.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype == theirs[key].dtype and torch.equal(value, theirs[key]), key
    assert other.head.weight is other.embed.weight
    if optimizer is None or its is None:
        return
    for one, two in zip(optimizer.param_groups, its.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k not in ("params", "param_names")} == {
            k: v for k, v in two.items() if k not in ("params", "param_names")
        }
        for p, q in zip(one["params"], two["params"], strict=True):
            assert optimizer.state[p].keys() == its.state[q].keys()
            for name, value in optimizer.state[p].items():
                other_value = its.state[q][name]
                assert torch.equal(value, other_value) if isinstance(value, torch.Tensor) else value == other_value, name
