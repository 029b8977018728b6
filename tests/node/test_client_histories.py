"""Random histories of training: steps, closures, writes by hand, swaps, snapshots. What is sealed is what was there when snapshot()
was called, to the bit (P1); every copy is delayed.

Writes that move no counter (``.data``) between snapshot() and the fence are not among them: no client sees those, only the audit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ckptd_client import Client, _switches

from ckptd.core import failpoint
from tests.node.client_training import Training, bits_equal, stored
from tests.node.rank_daemon_double import RankDaemonDouble

ACTIONS = 60
SEEDS = range(6)
DELAY_S = 0.003  # before each tensor's copy: a snapshot takes about as long as three actions
KINDS = ({"fused": True}, {"foreach": True}, {"foreach": False})


@pytest.fixture(autouse=True)
def _delayed() -> Iterator[None]:
    failpoint.arm(f"capture.tensor:sleep={DELAY_S}")
    yield
    failpoint.arm("")


class History:
    """One seed's actions on one training; ``expected``: what each snapshot must hold."""

    def __init__(self, client: Client, dice: random.Random) -> None:
        self.client, self.dice = client, dice
        self.training = Training(100 + dice.randrange(3) * 40, seed=dice.randrange(100), **dice.choice(KINDS))
        self.average = torch.zeros(60, 100)
        client.register(model=self.training.model, optimizer=self.training.optimizer)
        client.register(average=self.average, fenced=True)
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.done: list[str] = []
        self.number = 0

    def run(self) -> None:
        actions: list[Callable[[], None]] = [
            self.step, self.step, self.closure, self.write, self.write, self.load, self.swap, self.look, self.own_fence,
            self.snapshot, self.snapshot, self.snapshot, self.wait,
        ]  # fmt: skip
        self.step()
        for _ in range(ACTIONS):
            action = self.dice.choice(actions)
            self.done.append(action.__name__)
            action()
        self.client.wait("sealed", 30)

    def step(self) -> None:
        self.training.step()

    def closure(self) -> None:
        """Writes by hand before its backward pass now and then, as a clamp in a training step does."""
        training, clamps = self.training, self.dice.random() < 0.3

        def again() -> torch.Tensor:
            training.optimizer.zero_grad()
            if clamps:
                self.write()
            loss: torch.Tensor = training.model(torch.randn(4, training.width)).square().mean()
            loss.backward()
            return loss

        training.optimizer.step(again)  # type: ignore[arg-type]

    def write(self) -> None:
        with torch.no_grad():
            self.dice.choice(list(self.training.model.parameters())).mul_(0.9)

    def load(self) -> None:
        model = self.training.model
        model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})

    def swap(self) -> None:
        """Other memory under the same parameter, and other tensors for the optimizer's state."""
        parameter = self.dice.choice(list(self.training.model.parameters()))
        parameter.data = parameter.data * 1.01
        if self.dice.random() < 0.5:
            self.training.optimizer.load_state_dict(copy.deepcopy(self.training.optimizer.state_dict()))

    def look(self) -> None:
        """BatchNorm's statistics move."""
        self.training.model(torch.randn(4, self.training.width))

    def own_fence(self) -> None:
        self.client.fence()
        self.average.data.add_(1)

    def snapshot(self) -> None:
        self.number += 1
        self.expected[self.number] = self.training.tensors() | {"average": self.average.clone()}
        self.client.snapshot(self.number, must=self.dice.random() < 0.7)

    def wait(self) -> None:
        """It may capture a step that was skipped, as the state is now."""
        if self.client._last is not None and self.client._last.step == self.client._session.called:
            self.client._last.wait("sealed", 30)


def wrong(daemon: RankDaemonDouble, seed: int) -> tuple[list[str], int]:
    """(what some sealed snapshot holds wrong, how many were sealed)."""
    torch.manual_seed(seed)
    with Client.connect("job", socket=daemon.path) as client:
        history = History(client, random.Random(seed))
        client.restore()
        history.run()
        last = client._session.called
    found = []
    for (_, step), ranks in daemon.held.items():
        if step != last:  # the final wait() may have captured it, as the state was then
            held = stored(ranks[0])
            keys = history.expected[step]
            found += [f"{step}: {key} after {history.done}" for key in keys if not bits_equal(held[key], keys[key])]
    return found, len(daemon.held)


@pytest.mark.writes_what_is_read
@pytest.mark.parametrize("seed", [*SEEDS[:3], *(pytest.param(seed, marks=pytest.mark.chaos) for seed in SEEDS[3:])])
def test_what_is_sealed_is_what_was_there(daemon: RankDaemonDouble, seed: int) -> None:
    found, sealed = wrong(daemon, seed)
    assert found == []
    assert sealed >= 3, "they are not all void or skipped"


@pytest.mark.chaos
@pytest.mark.writes_what_is_read
@pytest.mark.parametrize("guard", ["FENCE", "VERSIONS", "SYNC_COPIES"])
def test_each_guard_is_needed(guard: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_switches, guard, False)
    if guard == "FENCE":
        monkeypatch.setattr(_switches, "VERSIONS", False)
    failpoint.arm("capture.tensor:sleep=0.02")
    found: list[str] = []
    for seed in SEEDS:
        with RankDaemonDouble(tmp_path / f"{seed}.sock") as daemon:  # a late seal of one history is not the next one's snapshot
            found = found or wrong(daemon, seed)[0]
    assert found != []
