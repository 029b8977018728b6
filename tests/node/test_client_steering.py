"""P15 for what steers an optimizer from outside: a scheduler or a scaler that nobody registered is told of, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ckptd_client import Client
from torch import nn
from torch.optim import AdamW, Optimizer

from ckptd.core.errors import CkptdError
from tests.node.client_training import begun, net
from tests.node.rank_daemon_double import RankDaemonDouble


def steered(model: nn.Module) -> tuple[Optimizer, dict[str, Any]]:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    return optimizer, {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9), "scaler": scaler}


def stepped_by(scaler: Any, model: nn.Module, optimizer: Optimizer) -> None:
    scaler.scale(model(torch.ones(2, 20)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_scheduler_and_a_scaler_that_nobody_registered_are_told_of_once(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """The restored job trained on with another learning rate and scale, and nobody was told."""
    model = net()
    optimizer, steering = steered(model)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        for step in (1, 2, 3):
            stepped_by(steering["scaler"], model, optimizer)
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        problems = client.health().problems
        said = [record.getMessage() for record in caplog.records if "nobody registered the" in record.getMessage()]
        for told in (problems, said):
            assert len(told) == 2 and all(f"client.register({kind}=...)" in text for kind, text in zip(steering, told, strict=True))
        client.register(**steering)
        stepped_by(steering["scaler"], model, optimizer)
        assert client.snapshot(4, must=True).wait("sealed", 30) == "durable"
        assert client.health().problems == []


def test_what_is_registered_at_last_is_restored_over_a_snapshot_without_it_as_the_advice_says(daemon: RankDaemonDouble) -> None:
    """A user did what health() said, and the next start refused: the scheduler is not in the snapshot."""
    model = net()
    optimizer, steering = steered(model)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        stepped_by(steering["scaler"], model, optimizer)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        assert all("strict=False" in text for text in client.health().problems)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, optimizer=optimizer, **steering)
        with pytest.raises(CkptdError, match="scheduler"):
            client.restore()
        assert client.restore(strict=False) == 1


class Loop:
    """A trainer that saves them by itself."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("known", ["saved by another", "meant to be absent", "nobody's"])
def test_a_scheduler_and_a_scaler_that_are_no_loss_are_not_told_of(daemon: RankDaemonDouble, known: str) -> None:
    model, other = net(), net()
    optimizer, steering = steered(other if known == "nobody's" else model)
    mine = AdamW(model.parameters()) if known == "nobody's" else optimizer
    with begun(daemon, model=model, optimizer=mine) as client:
        if known == "saved by another":
            client.register(loop=Loop(steering))
        elif known == "meant to be absent":
            client.register(without=["scheduler", "scaler"])
        stepped_by(steering["scaler"], other if known == "nobody's" else model, optimizer)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        assert client.health().problems == []
