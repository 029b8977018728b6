"""A small training for tests of the client, and what its snapshots must hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ckptd_client import Client
from ckptd_client.device import Batch
from ckptd_client.dtypes import TORCH
from torch import nn

from tests.node.rank_daemon_double import Held, RankDaemonDouble
from tests.waiting import until


class Training:
    """Linear, BatchNorm, Linear under AdamW: large and small tensors, buffers, CPU step counters."""

    def __init__(self, width: int = 150, seed: int = 1, **adamw: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **adamw)
        self.width = width

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self.width, device=self.model[0].weight.device)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Clones, by the names that the client gives."""
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.model.{name}.{key}"] = value.clone()
        return found


def connected(daemon: RankDaemonDouble, training: Training, **options: Any) -> Client:
    client = Client.connect("job", socket=daemon.path, **options)
    client.register(model=training.model, optimizer=training.optimizer)
    return client


@contextmanager
def restored(daemon: RankDaemonDouble, training: Training, **options: Any) -> Iterator[Client]:
    """The same after a restore()."""
    with connected(daemon, training, **options) as client:
        client.restore()
        yield client


@contextmanager
def stepped(daemon: RankDaemonDouble, **options: Any) -> Iterator[tuple[Client, Training]]:
    """A client of a training that has restored nothing and made its first step."""
    training = Training()
    with restored(daemon, training, **options) as client:
        training.step()
        yield client, training


@contextmanager
def begun(daemon: RankDaemonDouble, **objects: Any) -> Iterator[Client]:
    """After a restore() of these objects."""
    with Client.connect("job", socket=daemon.path) as client:
        client.register(**objects)
        client.restore()
        yield client


def first_snapshot(client: Client, training: Training, level: str = "sealed") -> None:
    """A new job's first step and its snapshot, waited for."""
    client.restore()
    training.step()
    client.snapshot(1, must=True)
    assert client.wait(level, 30) == "durable"


def copying(client: Client) -> None:
    """Wait until the capture thread is in the middle of a copy."""
    def amid() -> bool:
        jobs = list(client._engine._jobs)
        return any(job.in_flight or (isinstance(job.device, Batch) and job.device._lock.locked()) for job in jobs)

    until(amid, what="a copy in progress")


def all_copied(client: Client) -> None:
    """Wait until no tensor is read any more, and nothing of a device is on its way."""
    until(lambda: all(job.copied and not job.on_device for job in list(client._engine._jobs)), what="all copies")


def stored(held: Held) -> dict[str, torch.Tensor]:
    """The tensors of a sealed slot."""
    found = {}
    for f in held.layout.fragments:
        data = torch.frombuffer(
            bytearray(held.payload[f.offset : f.offset + f.nbytes] or b"\0"), dtype=torch.uint8
        )
        found[f.key] = data[: f.nbytes].view(TORCH[f.dtype]).view(f.box.sizes)
    return found


def assert_same(held: Held, expected: dict[str, torch.Tensor]) -> None:
    """P1: exactly these tensors, bit by bit."""
    assert_equal(stored(held), expected)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    wrong = [key for key, value in expected.items() if not bits_equal(found[key], value)]
    assert not wrong, f"torn or wrong: {wrong}"


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if not a.numel():
        return True
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def save(daemon: RankDaemonDouble, step: int = 1, **objects: Any) -> None:
    """One snapshot of these objects."""
    with Client.connect("job", socket=daemon.path) as client:
        client.register(**objects)
        client.restore(only="$meta") if daemon.held else client.restore()
        assert client.snapshot(step, {"note": "hello"}, must=True).wait("sealed", 30) == "durable"


def load(daemon: RankDaemonDouble, how: dict[str, Any] | None = None, **objects: Any) -> Client:
    """A closed client after restore()."""
    with Client.connect("job", socket=daemon.path) as client:
        client.register(**objects)
        client.restore(**(how or {}))
    return client


class Tied(nn.Module):
    """Two layers of one shape, with one weight when they are tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 130), nn.ReLU(), nn.Linear(130, 130))
