"""Frozen parts at a whole daemon: what its ranks say in any order, and memory that comes and goes (D6, P8, P13, P14)."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Any

import pytest

from ckptd.arena.arena import Slot
from ckptd.arena.tenant import Tenant
from ckptd.core.protocol.life import NO_TOMBSTONE
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.core.state_map.record_size import predicted_record
from ckptd.daemon import job, local_slots
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import memfd_object
from ckptd.wire.world import pack_world
from tests.node.daemon_rig import Rank, Rig, rig
from tests.node.links import eventually, stays
from tests.node.slots import MIB, write_fragments, write_payload


def layout_of(frozen: int = 2, elements: int = 100_000) -> Layout:
    items = [LayoutItem("w", "F32", (100,), Box.whole((100,)), "param", UNIQUE, 0)]
    for number in range(frozen):
        shape = (elements,)
        items.append(LayoutItem(f"base.{number}", "F32", shape, Box.whole(shape), "param", MAYBE, 0, True))
    return build_layout(0, 1, items, objects_capacity=4096)


async def begin(rank: Rank, layout: Layout, attempt: str = "a") -> int:
    """Join; the slot for the frozen part."""
    node = asdict(rank.daemon.services.node)
    ask = {"step": None, "source": None, "allow_fresh": True}
    room = predicted_record(layout)
    join = wire.Join(attempt, 0, layout.frozen_at, ask, layout.frozen_bytes, record_bytes=room)
    rank.say_join(join, pack_world([node["node"]], [node]))
    await rank.heard(wire.Ready)
    return (await rank.heard(wire.Mapped, frozen=True))[0].slot


async def capture(
    rank: Rank, layout: Layout, step: int, frozen: int, *, fill: bool, tell: bool = False
) -> tuple[wire.GrantSlot, int]:
    """One snapshot that leans on that slot, and its step. ``tell``: the daemon does not know the layout yet."""
    grant, _ = await rank.heard(wire.GrantSlot)
    await eventually(lambda: grant.slot in rank.views)
    if fill:
        write_fragments(rank.views[frozen], layout.frozen, step)
    live = build_layout(0, 1, [(f.key, f.dtype, f.shape, f.box, f.role, f.sharing, f.tier) for f in layout.fragments[:1]], 4096)
    objects = write_payload(rank.views[grant.slot], live, step)
    step = max(step, grant.from_step)
    rank.say(wire.Called(step))
    said = wire.SealedSlot(grant.slot, grant.grant, step, layout.layout_id, objects, frozen=frozen)
    if not tell:
        rank.say(said)
        return grant, step
    fd = memfd_object(layout.encoded)
    rank.say(said, (fd,))
    os.close(fd)
    return grant, step


async def level(rank: Rank, step: int) -> wire.Level:
    return (await rank.heard(wire.Level, step=step))[0]


def frozen_slot(house: Rig) -> Slot | None:
    return house.shell().local_slots.by_rank[0].frozen


async def test_a_layout_stays_known_though_a_snapshot_of_it_could_not_be_sealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P14: its rank does not send it again. Here the copy was found damaged while a snapshot was on its way."""
    async with rig() as house:
        rank, layout = house.rank(), layout_of()
        first = await begin(rank, layout)
        await capture(rank, layout, 1, first, fill=True, tell=True)
        assert not (await level(rank, 1)).void
        known = frozen_slot(house)
        assert known is not None
        house.shell()._doubt(known)
        missed: list[str] = []
        miss = house.shell().ranks._missed
        monkeypatch.setattr(house.shell().ranks, "_missed", lambda *of: (missed.append(of[-1]), miss(*of)))
        _, step = await capture(rank, layout, 2, first, fill=False)
        await eventually(lambda: missed == ["seal failed: its frozen part is damaged"])
        rank.say(wire.Resize(layout.frozen_at, layout.frozen_bytes))
        second = (await rank.heard(wire.Mapped, frozen=True))[0].slot
        void = "its grant was void"
        while void == "its grant was void":  # given before the one above was missed, and taken back a moment after it was used
            rank.say(wire.Called(step + 1, True))
            _, step = await capture(rank, layout, step + 1, second, fill=True)
            void = (await level(rank, step)).void
        assert not void


async def test_a_snapshot_on_its_way_keeps_what_it_leans_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: the rank asks for another slot right after it, and the layout takes its time."""
    async with rig() as house:
        rank, layout = house.rank(), layout_of()
        first = await begin(rank, layout)
        read, go = house.daemon.services.read_layout, asyncio.Event()

        def slow(uid: int, fd: int, bytes_max: int) -> asyncio.Future[Layout]:
            async def later() -> Layout:
                await go.wait()
                return await read(uid, fd, bytes_max)

            return asyncio.ensure_future(later())

        monkeypatch.setattr(house.daemon.services, "read_layout", slow)
        await capture(rank, layout, 1, first, fill=True, tell=True)
        rank.say(wire.Resize(layout.frozen_at, layout.frozen_bytes + (4 << 20)))
        await rank.heard(wire.Mapped, frozen=True)
        go.set()
        assert not (await level(rank, 1)).void


async def test_a_small_live_part_beside_a_large_frozen_one_has_room_for_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: the record of each snapshot describes and sums the frozen part too."""
    monkeypatch.setattr(local_slots, "RECORD_BYTES_MIN", 4096)
    async with rig() as house:
        rank, layout = house.rank(), layout_of(frozen=1000, elements=4096)
        first = await begin(rank, layout)
        await capture(rank, layout, 1, first, fill=True, tell=True)
        assert not (await level(rank, 1)).void


async def test_a_sealed_slot_leans_on_nothing_else_whatever_its_rank_says() -> None:
    """P13: a snapshot that is restorable stays so."""
    async with rig() as house:
        rank, layout = house.rank(), layout_of()
        first = await begin(rank, layout)
        grant, _ = await capture(rank, layout, 1, first, fill=True, tell=True)
        assert not (await level(rank, 1)).void
        rank.say(wire.Resize(layout.frozen_at, layout.frozen_bytes))
        second = (await rank.heard(wire.Mapped, frozen=True))[0].slot
        slot = house.shell().local_slots.slots[grant.slot]
        rank.say(wire.SealedSlot(grant.slot, 99, 2, layout.layout_id, 0, frozen=second))
        rank.say(wire.AskHealth(1))
        await rank.heard(wire.Health)
        await stays(lambda: slot.record is not None and slot.frozen is not None and slot.frozen.id == first)


async def test_a_rank_that_has_nothing_frozen_any_more_gives_its_memory_back() -> None:
    """P8"""
    async with rig() as house:
        rank, layout = house.rank(), layout_of()
        await begin(rank, layout)
        assert len(house.shell().frozen.slots) == 1
        rank.say(wire.Resize(layout.frozen_at, wire.NOTHING_FROZEN))
        await eventually(lambda: not house.shell().frozen.slots)
        await rank.heard(wire.Retire)


def allocated(house: Rig, rank: int = 0) -> int:
    """Slots for its snapshots that have room."""
    mine = house.shell().local_slots
    return mine._fitting(mine.by_rank[rank])


async def test_a_frozen_slot_that_found_no_memory_comes_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: another job ends."""
    monkeypatch.setattr(job, "GROW_RETRY_S", 0.1)
    async with rig() as house:
        other = house.rank("other")
        other.join("x", 12 * MIB)
        await other.heard(wire.Ready)
        await eventually(lambda: len(house.shell("other").local_slots.slots) == 3)
        rank, layout = house.rank(), layout_of(frozen=1, elements=8 * MIB)
        task = asyncio.ensure_future(begin(rank, layout))
        await eventually(lambda: "no_memory" in house.problems())
        house.daemon._forget_job(f"{os.getuid()}/other", NO_TOMBSTONE)
        await task
        await eventually(lambda: allocated(house) == 3)
        frozen = house.shell().local_slots.by_rank[0].frozen
        assert frozen is not None and frozen.capacity >= layout.frozen_bytes
        assert "no_memory" not in house.problems()


async def test_memory_of_a_frozen_part_that_goes_serves_who_waits_for_it() -> None:
    """P14: at once."""
    async with rig(memory_budget="56MiB") as house:
        rank, layout = house.rank(), layout_of(frozen=1, elements=5 * MIB)
        await begin(rank, layout)
        await eventually(lambda: allocated(house) == 3)
        rank.say(wire.Resize(12 * MIB, 0))
        await eventually(lambda: "no_memory" in house.problems())
        rank.say(wire.Resize(12 * MIB, wire.NOTHING_FROZEN))
        await eventually(lambda: allocated(house) == 3 and "no_memory" not in house.problems())
        assert not house.shell().frozen.slots and house.shell().local_slots.by_rank[0].frozen is None


async def test_what_the_rank_cannot_use_and_no_snapshot_needs_makes_room_for_another() -> None:
    """P14: there is memory for one frozen part, not for two."""
    async with rig(memory_budget="48MiB") as house:
        rank, layout = house.rank(), layout_of(frozen=1, elements=5 * MIB)
        await begin(rank, layout)
        await eventually(lambda: allocated(house) == 3)
        rank.say(wire.Resize(layout.frozen_at, layout.frozen_bytes + 4 * MIB))
        note: Any = (await rank.heard(wire.Mapped, frozen=True))[0]
        assert note.capacity >= layout.frozen_bytes + 4 * MIB


async def test_a_slot_for_a_frozen_part_that_came_back_empty_is_no_slot_for_snapshots() -> None:
    """P7, P14: the daemon had crashed before it was sealed. Its memory is for the next one."""
    async with rig() as house:
        layout = layout_of(frozen=1, elements=6 * MIB)
        name = f"{os.getuid()}/rig"
        tenant = Tenant(name, os.getuid(), "own", 0)
        slot = await asyncio.to_thread(house.daemon.arena.allocate, tenant, 24 * MIB)
        house.daemon.job(name).adopt(slot)
        rank = house.rank()
        await begin(rank, layout)
        await eventually(lambda: allocated(house) == 3)
        assert slot.id not in house.shell().local_slots.slots
