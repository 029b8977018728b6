"""Random generators of an accelerator, on the simulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.device import generator, simulated
from tests.node.client_training import load, net, save
from tests.node.rank_daemon_double import RankDaemonDouble

pytestmark = device.NEEDED
device.load_first()


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated():
        yield
    torch.accelerator.set_device_index(0)


def seeded(seed: int) -> list[torch.Tensor]:
    """Each device's next numbers, which are then drawn again by whoever comes next."""
    for at in range(device.COUNT):
        generator(at).manual_seed(seed + at)
    return drawn()


def drawn() -> list[torch.Tensor]:
    states = [generator(at).get_state() for at in range(device.COUNT)]
    found = [torch.randn(8, device=f"{device.KIND}:{at}").cpu() for at in range(device.COUNT)]
    for at, state in enumerate(states):
        generator(at).set_state(state)
    return found


@pytest.mark.parametrize(("current", "then"), [(1, 1), (1, 0), (0, 1)])
def test_generators_come_back_to_the_device_that_the_rank_has(daemon: RankDaemonDouble, current: int, then: int) -> None:
    """A rank that had device 1 of its node gets device 0 of another: a launcher counts anew, or shows it one only."""
    model = net()
    saved = seeded(100)
    torch.accelerator.set_device_index(current)
    save(daemon, model=model)
    own = seeded(200)
    torch.accelerator.set_device_index(then)
    load(daemon, model=model)
    found = drawn()
    expected = saved if current == then else [saved[current] if at == then else own[at] for at in range(device.COUNT)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
