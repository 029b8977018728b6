"""A rank whose state grows while it trains: the daemon makes its slots larger now and then, not with each step (P14)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from ckptd_client import Client
from torch import nn

from ckptd.daemon.local_slots import SLOT_GRAIN_BYTES
from ckptd.wire import rank as wire
from tests.node.daemon_rig import Rank, Rig, rig
from tests.node.links import eventually
from tests.waiting import until

MIB = 1 << 20
STEPS = 24


class Buffer:
    """Of replayed samples, say: a megabyte more with each step."""

    def __init__(self) -> None:
        self.samples = torch.zeros(0)

    def grow(self) -> None:
        self.samples = torch.cat([self.samples, torch.randn(MIB // 4)])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.samples = state["samples"]


def ready(house: Rig, client: Client) -> bool:
    return not house.shell().local_slots.sizing() and len(client._session.grants) > 0


def train(house: Rig, *, must: bool) -> list[str]:
    """What became of each snapshot."""
    model = nn.Linear(8, 8)
    optimizer, buffer = torch.optim.SGD(model.parameters(), lr=0.1), Buffer()
    with Client.connect("rig", socket=house.daemon.config.socket, required=True, must_timeout_s=20.0) as client:
        client.register(model=model, optimizer=optimizer, buffer=buffer)
        client.restore()
        handles = []
        for step in range(1, STEPS + 1):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            buffer.grow()
            handles.append(client.snapshot(step, must=must))
            handles[-1].wait("sealed", 20)
            until(partial(ready, house, client), what="slots, and a grant: a step takes as long")
        handles[-1].wait("sealed", 20)
        return [handle.status for handle in handles]


@pytest.mark.parametrize("must", [True, pytest.param(False, marks=pytest.mark.chaos)])
async def test_a_state_that_grows_with_each_step_is_captured_all_the_same(must: bool) -> None:
    """Slots had exactly the size that was asked for, and were too small by the time they were made: 20 steps in a row were
    skipped, and with must=True each second one."""
    async with rig(memory_budget="2GiB") as house:
        statuses = await asyncio.to_thread(train, house, must=must)
        taken = ("sealed", "captured", "released")
        lost = [f"{step}: {status}" for step, status in enumerate(statuses, 1) if not status.startswith(taken)]
        assert len(lost) <= (0 if must else STEPS // 2), lost
        assert not [line for line in lost if "no memory" in line]
        assert "no_memory" not in house.problems()


async def capacities(house: Rig, nbytes: int, count: int = 3) -> list[int]:
    """Of the rank's slots, once all of them have room for so much; in MiB."""
    slots_here = house.shell().local_slots

    def made() -> bool:
        slots = [slot.capacity for slot in slots_here.by_rank[0].slots.values()]
        return not slots_here.sizing() and len(slots) == count and min(slots) >= nbytes

    await eventually(made, what=f"{count} slots of {nbytes} bytes")
    return sorted(slot.capacity // MIB for slot in slots_here.by_rank[0].slots.values())


async def give_up_all(house: Rig, rank: Rank, nbytes: int) -> None:
    """Grants of slots that are too small, as a rank does that has asked for larger ones."""
    own = house.shell().local_slots.by_rank[0]
    step = 0
    while any(slot.capacity < nbytes for slot in own.slots.values()):
        rank.read()
        for note, _ in list(rank.seen):
            if isinstance(note, wire.GrantSlot):
                rank.seen = [(other, fds) for other, fds in rank.seen if other is not note]
                step += 1
                rank.say(wire.GaveUp(note.grant, step, "too small"))
        await asyncio.sleep(0.01)


async def test_only_a_state_that_has_grown_twice_has_headroom() -> None:
    """Once is what every state does whose optimizer's is born."""
    async with rig(memory_budget="1GiB") as house:
        rank = house.rank()
        rank.join("a", 6 * MIB)
        await rank.heard(wire.Ready)
        assert await capacities(house, 6 * MIB) == [6, 6, 6]
        rank.say(wire.Resize(6 * MIB - 1))
        rank.say(wire.Resize(6 * MIB))
        await eventually(lambda: not house.shell().local_slots.sizing())
        assert await capacities(house, 6 * MIB) == [6, 6, 6]
        rank.say(wire.Resize(7 * MIB))
        await give_up_all(house, rank, 7 * MIB)
        assert await capacities(house, 7 * MIB) == [8, 8, 8]
        rank.say(wire.Resize(9 * MIB))
        await give_up_all(house, rank, 9 * MIB)
        assert await capacities(house, 9 * MIB) == [18, 18, 18]


@pytest.mark.parametrize("replicas", [0, 1])
async def test_headroom_takes_the_room_of_no_slot_and_of_no_copy(replicas: int) -> None:
    """Where all of it fits just so, slots have the exact size: P8."""
    rows = {"exact": 3 + 2 * replicas, "roomy": 2 * (3 + 2 * replicas)}
    for name, slots in rows.items():
        async with rig(memory_budget=f"{slots * 15 + 2}MiB", replicas=replicas) as house:
            rank = house.rank()
            rank.join("a", 2 * MIB)
            await rank.heard(wire.Ready)
            rank.say(wire.Resize(4 * MIB))
            await give_up_all(house, rank, 4 * MIB)
            await capacities(house, 4 * MIB)
            rank.say(wire.Resize(13 * MIB))
            await give_up_all(house, rank, 13 * MIB)
            found = await capacities(house, 13 * MIB)
            assert found == ([14] * 3 if name == "exact" else [26] * 3), name


def test_the_grain_is_as_these_tests_take_it() -> None:
    assert SLOT_GRAIN_BYTES == 2 * MIB
