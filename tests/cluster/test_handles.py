"""What handles say is so, whatever became of daemon and job meanwhile, and nobody has to wait on one to hear it (P2, P15)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ckptd_client import Client, handles
from ckptd_client.handles import HELD, Handle
from torch import nn

from tests.cluster.nodes import Cluster, Node
from tests.waiting import until

JOB = "handles"
PATIENCE_S = 60.0


class Training:
    def __init__(self) -> None:
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.made: dict[int, Handle] = {}
        self.step = 0

    def goes_on(self, client: Client, steps: int, **how: Any) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 256)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            self.made[self.step] = client.snapshot(self.step, **how)


@contextmanager
def trained(node: Node) -> Iterator[tuple[Client, Training]]:
    training = Training()
    with Client.connect(JOB, node.socket, required=True) as client:
        client.register(model=training.model, optimizer=training.optimizer)
        training.step = client.restore() or 0
        yield client, training


def untrue(client: Client, made: dict[int, Handle]) -> dict[int, tuple[str, Any]]:
    """step -> (what its handle says, what the daemon lists), where these differ."""
    rows = {row["step"]: row for row in client.steps()}

    def fits(step: int, said: str) -> bool:
        row = rows.get(step)
        if row is None:
            return said.startswith(("void", "skipped", "released"))
        return said == "durable" if row["durable"] else said.startswith((*HELD, "void"))

    said = {step: handle.status for step, handle in made.items()}
    return {step: (text, rows.get(step)) for step, text in said.items() if not fits(step, text)}


@pytest.mark.parametrize("keep", [True, False])
def test_of_a_daemon_that_was_killed(nodes: Cluster, keep: bool) -> None:
    """Two that are durable, one that was being sealed: "released", "captured" was said of them for good."""
    node = nodes.node(storage_root=nodes.root / "storage", replicas=0, keep_last=50)
    with trained(node) as (client, training):
        training.goes_on(client, 4, must=True)
        training.goes_on(client, 2, must=True, keep=keep)
        node.crash()
        training.goes_on(client, 3)
        node.until_up()
        training.goes_on(client, 1, must=True)
        assert training.made[training.step].wait("sealed", PATIENCE_S) in ("sealed", "durable")
        until(lambda: not untrue(client, training.made), PATIENCE_S, f"true words, not {untrue(client, training.made)}")
        for step, handle in training.made.items():
            said = handle.status
            assert not said.startswith(("captured", "void: released"))
            if said.startswith("void"):
                assert any(map(said.startswith, client.health().facts["lost"])), (step, said)


def test_of_a_daemon_that_stands_still(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "sealed" for as long as the daemon did, although nothing was heard of it."""
    monkeypatch.setattr(handles, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(handles, "SILENT_AFTER_S", 1.0)
    node = nodes.node(replicas=0)
    with trained(node) as (client, training):
        training.goes_on(client, 1, must=True)
        handle = training.made[1]
        assert handle.wait("sealed", PATIENCE_S) == "sealed"
        node.signal_daemon(signal.SIGSTOP)
        try:
            until(lambda: handle.status == "unreachable: sealed, as far as the daemon had said", PATIENCE_S)
        finally:
            node.signal_daemon(signal.SIGCONT)
        until(lambda: handle.status == "sealed", PATIENCE_S)


def test_of_a_job_that_went_on_elsewhere(nodes: Cluster) -> None:
    """A step that another program trained again was "sealed" for the first one, although no memory held it any more."""
    node = nodes.node(replicas=0)
    with trained(node) as (client, training):
        training.goes_on(client, 3, must=True)
        assert training.made[3].wait("sealed", PATIENCE_S) == "sealed"
        with trained(node) as (other, again):
            assert again.step == 3
            again.goes_on(other, 3, must=True)
            assert again.made[6].wait("sealed", PATIENCE_S) == "sealed"
            until(lambda: training.made[3].status.startswith("superseded: sealed"), PATIENCE_S)
            assert training.made[3].wait("durable", PATIENCE_S).startswith("superseded"), "at once"
            assert again.made[6].status == "sealed"
