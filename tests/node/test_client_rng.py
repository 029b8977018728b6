"""Random generators of an accelerator, without one: torch's own functions for them are replaced by a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.node.client_training import load, net, save
from tests.node.rank_daemon_double import RankDaemonDouble


class Devices:
    """Four devices with a generator each, of which this process uses one."""

    def __init__(self, current: int, seed: int) -> None:
        self.current = current
        self.states = [torch.full((16,), seed + device, dtype=torch.uint8) for device in range(4)]

    def install(self, patch: pytest.MonkeyPatch) -> Devices:
        def get(device: Any = None) -> torch.Tensor:
            return self.states[self.current if device is None else int(device)]

        def put(state: torch.Tensor, device: Any = None) -> None:
            self.states[self.current if device is None else int(device)] = state.clone()

        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "get_rng_state", get)
        patch.setattr(torch.cuda, "set_rng_state", put)
        return self

    def numbers(self) -> list[int]:
        return [int(state[0]) for state in self.states]


@pytest.mark.parametrize(
    ("device", "then", "numbers"),
    [(1, 1, [100, 101, 102, 103]), (2, 0, [102, 201, 202, 203])],
    ids=["same", "another"],
)
def test_generators_come_back_to_the_device_that_the_rank_has(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, device: int, then: int, numbers: list[int]
) -> None:
    """A rank that had device 2 of its node gets device 0 of another: a launcher counts anew, or shows it one only."""
    Devices(device, 100).install(monkeypatch)
    save(daemon, model=net())
    found = Devices(then, 200).install(monkeypatch)
    load(daemon, model=net())
    assert found.numbers() == numbers
