"""The memory of the local ranks: a *seat* per rank, with its own slots, sized to its layout (design D1, D9, section 5)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ckptd.arena.arena import Arena, NoMemory, Slot, Tenant
from ckptd.core.protocol.events import Event, SlotsGone, SlotsReady, SlotsShort
from ckptd.core.state_map.layout import Layout
from ckptd.daemon.frozen import Frozen
from ckptd.daemon.services import Services
from ckptd.process import Process
from ckptd.wire.rank import Mapped, Retire
from ckptd.wire.rank_link import RankSession

SLOT_GRAIN_BYTES = 2 << 20  # slots grow in these, so that small changes of a layout need no new memory
RECORD_BYTES_MIN = 1 << 20  # of the room for a slot's record; what its layout needs beyond that the rank says
SMALL_BYTES = 64 << 20  # a state that grows may double at the cost of so much
STATE_SHARE = 8  # a larger one gets this part of itself as headroom
OVERSIZE = 2  # a slot of more than this many times what is needed was made for something else


@dataclass
class Seat:
    rank: int
    session: RankSession | None = None
    process: Process | None = None  # who sits here, or lost its connection; its end has not been told
    state_bytes: int = 0
    headroom_bytes: int = 0  # that new slots have beyond the state, since it has grown more than once
    outgrown_bytes: int = 0  # by so much the state was larger than its room when it last outgrew that
    slots: dict[int, Slot] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    layouts: dict[str, asyncio.Future[Layout]] = field(default_factory=dict)
    sizing: bool = False
    resize_again: bool = False
    frozen: Slot | None = None  # where its trainer captures the frozen part, or has captured it
    frozen_wanted: int = 0  # bytes of a new one
    frozen_bytes: int = 0  # of the rank's frozen part
    record_bytes: int = 0  # of a slot's record, which describes both parts
    adopted: set[int] = field(default_factory=set)  # FREE slots that came back, of which nobody knows what they were for
    granted: dict[int, RankSession] = field(default_factory=dict)  # grant -> who may be filling its slot
    watched: int = -1  # pidfd of the process whose connection ended: its death is still to be told
    told_waits: str = ""  # what this session was told of why nothing is granted
    left: bool = False  # the rank lives on another node in the newest epoch


class Seats:
    """Own slots of one job on this node. Tells the machine what exists (SlotsReady, SlotsGone)."""

    def __init__(
        self, services: Services, job: str, uid: int, frozen: Frozen, feed: Callable[[Event], None]
    ) -> None:
        self._services, self._job, self._uid, self._feed = services, job, uid, feed
        self._frozen = frozen
        frozen.in_use = lambda slot: any(seat.frozen is slot for seat in self.by_rank.values())
        frozen.on_retired = self._tell_retired
        self.by_rank: dict[int, Seat] = {}
        self.slots: dict[int, Slot] = {}  # every own slot of the job, local rank or not
        self.lent: set[int] = set()  # FREE slots that a restore fetches into
        self._told: dict[int, set[RankSession]] = {}  # sessions that were told of a slot

    def seat_of(self, session: RankSession) -> Seat | None:
        return next((seat for seat in self.by_rank.values() if seat.session is session), None)

    def adopt(self, slot: Slot, *, free: bool) -> None:
        """A slot that came back with the daemon's memory; its seat is taken when the rank's trainer returns."""
        seat = self.by_rank.setdefault(slot.tenant.rank, Seat(slot.tenant.rank))
        seat.slots[slot.id] = self.slots[slot.id] = slot
        if free:
            seat.free.add(slot.id)
            seat.adopted.add(slot.id)
            self._feed(SlotsReady(seat.rank, (slot.id,)))

    def attach(
        self, rank: int, session: RankSession, state_bytes: int, frozen_bytes: int = 0, record_bytes: int = 0
    ) -> Seat:
        seat, frozen_bytes = self.by_rank.setdefault(rank, Seat(rank)), max(frozen_bytes, 0)
        if seat.session is not session:
            seat.layouts.clear()
            seat.headroom_bytes = seat.outgrown_bytes = 0
            kept = self._frozen.kept_for(rank) if frozen_bytes else None
            if kept is not None and self._services.arena.foreign_mapper(kept, session.process):
                kept = None
            seat.frozen, seat.frozen_wanted = kept, 0 if kept is not None else frozen_bytes
        seat.frozen_bytes, seat.record_bytes = frozen_bytes, record_bytes
        self.unwatch(seat)
        seat.session, seat.process, seat.told_waits = session, session.process, ""
        seat.state_bytes = max(state_bytes, 1)
        for slot_id in sorted(seat.free):
            if self._foreign_mapper(slot_id, session) or self._oversized(seat, slot_id):
                self._retire(seat, slot_id)
        seat.adopted.clear()
        for slot in (*seat.slots.values(), *([seat.frozen] if seat.frozen is not None else [])):
            self._map(seat, slot)
        self.resize(seat, seat.state_bytes)
        return seat

    def detach(self, session: RankSession) -> Seat | None:
        for told in self._told.values():
            told.discard(session)
        seat = self.seat_of(session)
        if seat is not None:
            seat.session = None
            seat.frozen, seat.frozen_wanted = None, 0
            # The memory of a rank that lives elsewhere now goes.
            asyncio.get_running_loop().call_soon(self.tidy)
        return seat

    def watch(self, seat: Seat, process: Process, died: Callable[[], None]) -> None:
        """The connection ended and the process lives. ``died`` unless the seat is taken again before."""
        self.unwatch(seat)
        seat.watched = os.dup(process.fileno())  # the session's own goes with the session

        def gone() -> None:
            self.unwatch(seat)
            died()

        asyncio.get_running_loop().add_reader(seat.watched, gone)

    def unwatch(self, seat: Seat) -> None:
        if seat.watched >= 0:
            asyncio.get_running_loop().remove_reader(seat.watched)
            os.close(seat.watched)
            seat.watched = -1

    def resize(self, seat: Seat, state_bytes: int, frozen_bytes: int = 0, record_bytes: int = 0) -> None:
        """``frozen_bytes``: a new slot of this size for its frozen part is wanted, unless one waits to be filled; below 0: the
        rank has no frozen part any more."""
        _grow(seat, max(state_bytes, 1))
        seat.record_bytes = record_bytes or seat.record_bytes
        if frozen_bytes < 0:
            seat.frozen, seat.frozen_wanted, seat.frozen_bytes = None, 0, 0
            asyncio.get_running_loop().call_soon(self.tidy)
        frozen_bytes = max(frozen_bytes, 0)
        seat.frozen_bytes = frozen_bytes or seat.frozen_bytes
        waits = seat.frozen is not None and seat.frozen.record is None and seat.frozen.capacity >= frozen_bytes
        if frozen_bytes and not waits:
            seat.frozen_wanted = frozen_bytes
        seat.resize_again = True
        if not seat.sizing:
            seat.sizing = True
            self._services.spawn(self._size(seat), f"size {self._job} rank {seat.rank}")

    def sizing(self) -> bool:
        return any(seat.sizing for seat in self.by_rank.values())

    def freed(self, slot_id: int) -> None:
        """The machine let go of an own slot. Whether it may stay is looked at after the machine's batch (``tidy``): the
        same batch may grant it again."""
        slot = self.slots[slot_id]
        slot.free()
        self.by_rank[slot.tenant.rank].free.add(slot_id)
        asyncio.get_running_loop().call_soon(self.tidy)

    def tidy(self) -> None:
        """Give back FREE slots that fit nobody here, and use what that freed."""
        retired = False
        for seat in list(self.by_rank.values()):
            for slot_id in sorted(seat.free):
                if not self._useful(seat, slot_id):
                    self._retire(seat, slot_id)
                    retired = True
        if self._frozen.tidy() or retired:
            self.grow()

    def drop_idle(self, most_bytes: int | None) -> None:
        """Memory is short: slots of ranks that are gone, with nothing in them, go; not more than so many bytes."""
        for seat in self.by_rank.values():
            if seat.session is not None or seat.watched >= 0:
                continue  # its process lives
            for slot_id in sorted(seat.free):
                size = seat.slots[slot_id].size
                if most_bytes is None or size <= most_bytes:
                    most_bytes = None if most_bytes is None else most_bytes - size
                    self._retire(seat, slot_id)

    def forget_frozen(self, frozen: Slot) -> None:
        """Who captured it is told that it is gone, and captures anew."""
        for seat in self.by_rank.values():
            if seat.frozen is frozen:
                seat.frozen = None
                self._tell_retired(frozen)

    def grow(self) -> None:
        """Memory came free: seats that are short of slots try again."""
        for seat in list(self.by_rank.values()):
            short = self._fitting(seat) < self._services.policy.own_slots or seat.frozen_wanted
            if seat.session is not None and short:
                self.resize(seat, seat.state_bytes)

    def _useful(self, seat: Seat, slot_id: int) -> bool:
        if seat.session is None:
            return not seat.left
        return (
            self._fits(seat, seat.slots[slot_id])
            and not self._foreign_mapper(slot_id, seat.session)
            and self._fitting(seat) <= self._services.policy.own_slots  # what is too small goes once it is FREE
        )

    def usable(self, slot_id: int, session: RankSession) -> bool:
        """May this session fill the slot? Not while another living process could write into it (D1). It is told of the slot
        first: one that such a process had mapped when the session began may have come free since."""
        slot = self.slots[slot_id]
        self._map(self.by_rank[slot.tenant.rank], slot)
        return session in self._told[slot_id]

    def lend(self, rank: int, nbytes: int) -> Slot | None:
        """A FREE slot of the rank for a restore to fetch into. Nobody else knows of it until it is ``returned``."""
        seat = self.by_rank.get(rank)
        fitting = [i for i in sorted(seat.free) if seat.slots[i].capacity >= nbytes] if seat else []
        if seat is None or not fitting:
            return None
        seat.free.discard(fitting[0])
        self.lent.add(fitting[0])
        self._feed(SlotsGone(rank, (fitting[0],)))
        return seat.slots[fitting[0]]

    def returned(self, slot: Slot) -> None:
        self.lent.discard(slot.id)
        if slot.id not in self.slots:
            return  # the job was dropped meanwhile
        self.by_rank[slot.tenant.rank].free.add(slot.id)
        self._feed(SlotsReady(slot.tenant.rank, (slot.id,)))
        self.tidy()

    def release_unused(self, ranks_here: frozenset[int]) -> None:
        """After a new epoch: FREE slots of ranks that live elsewhere now make room for those that live here."""
        for seat in self.by_rank.values():
            seat.left = seat.rank not in ranks_here
        self.tidy()

    def drop_all(self) -> None:
        for seat in self.by_rank.values():
            self.unwatch(seat)
            for slot in seat.slots.values():
                self._services.arena.retire(slot)
        self.by_rank.clear()
        self.slots.clear()

    async def _size(self, seat: Seat) -> None:
        try:
            while seat.resize_again and seat.session is not None:
                seat.resize_again = False
                await self._size_once(seat)
        finally:
            seat.sizing = False

    async def _size_once(self, seat: Seat) -> None:
        for slot_id in sorted(seat.free):
            if not self._fits(seat, seat.slots[slot_id]):
                self._retire(seat, slot_id)
        if seat.frozen_wanted and not await self._give_frozen(seat):
            return
        while seat.session is not None and self._fitting(seat) < self._services.policy.own_slots:
            slot = await self._allocate(seat, seat.state_bytes, seat.headroom_bytes)
            if slot is None:
                return
            if seat.session is None or not self._fits(seat, slot):
                self._services.arena.retire(slot)
                continue
            seat.slots[slot.id] = self.slots[slot.id] = slot
            seat.free.add(slot.id)
            self._map(seat, slot)
            self._feed(SlotsReady(seat.rank, (slot.id,)))

    def _fitting(self, seat: Seat) -> int:
        return sum(1 for slot in seat.slots.values() if self._fits(seat, slot))

    @staticmethod
    def _fits(seat: Seat, slot: Slot) -> bool:
        """Has it room for the live part, and for a record of both parts?"""
        return slot.capacity >= seat.state_bytes and slot.row.meta_capacity >= _record_room(seat)

    @staticmethod
    def _oversized(seat: Seat, slot_id: int) -> bool:
        """Was it for a frozen part that was not sealed before the daemon ended? As a slot for snapshots it would keep that
        memory from the next one."""
        return slot_id in seat.adopted and seat.slots[slot_id].capacity > OVERSIZE * max(seat.state_bytes, SLOT_GRAIN_BYTES)

    async def _give_frozen(self, seat: Seat) -> bool:
        """Before the slots that snapshots are granted: a grant is of no use without it."""
        session, nbytes = seat.session, seat.frozen_wanted
        slot = await self._allocate(seat, nbytes)
        if slot is None:
            seat.frozen = None  # the rank cannot use the one it has: nothing but snapshots may keep that memory now
            seat.resize_again = self._frozen.tidy() or seat.resize_again
            return False
        if session is None or seat.session is not session or seat.frozen_wanted != nbytes:
            self._services.arena.retire(slot)
            seat.resize_again = seat.resize_again or seat.session is not None
            return False
        seat.frozen, seat.frozen_wanted = slot, 0
        self._frozen.add(slot)
        self._map(seat, slot)
        if self._frozen.tidy():
            asyncio.get_running_loop().call_soon(self.grow)
        return True

    async def _allocate(self, seat: Seat, nbytes: int, headroom_bytes: int = 0) -> Slot | None:
        """``headroom_bytes`` more where that takes the memory of nothing else: of no slot that is missing, and of no copy."""
        tenant = Tenant(self._job, self._uid, "own", seat.rank)
        process = seat.session.process if seat.session else None
        policy, record = self._services.policy, _record_room(seat)
        missing = max(1, policy.own_slots - self._fitting(seat)) + policy.replicas * policy.peer_sets
        make = partial(_make, self._services.arena, tenant, record, process)
        try:
            slot = await self._services.in_work(make, nbytes, headroom_bytes, missing * len(self.by_rank))
        except NoMemory as error:
            have = self._fitting(seat)
            slots = f"{have} of {self._services.policy.own_slots} slots"
            if have == 1 and self._services.storage is not None:
                slots += ", which is free again once storage has its snapshot"
            text = f"rank {seat.rank} has {slots}: {error}"
            self._services.health.report("no_memory", text, job=self._job, which=str(seat.rank))
            self._feed(SlotsShort(seat.rank, f"{slots}: {error.what} [{error.where}]"))
            return None
        if self._services.health.clear("no_memory", job=self._job, which=str(seat.rank)):
            self._feed(SlotsShort(seat.rank, ""))
        return slot

    def _map(self, seat: Seat, slot: Slot) -> None:
        session = seat.session
        told = self._told.setdefault(slot.id, set())
        if session is None or session in told or not self._services.arena.lend(slot, session.process):
            return
        segment = slot.segment
        told.add(session)
        frozen = slot is seat.frozen
        holds = slot.record.layout.layout_id if frozen and slot.record is not None else ""
        note = Mapped(slot.id, segment.name, segment.size, slot.offset, slot.capacity, frozen, holds)
        session.send_segment(note, segment.name, segment.fd)

    def _foreign_mapper(self, slot_id: int, session: RankSession) -> bool:
        """A mapping cannot be revoked: while another process may write into the slot, nobody else gets it (D1)."""
        return self._services.arena.foreign_mapper(self.slots[slot_id], session.process)

    def _retire(self, seat: Seat, slot_id: int) -> None:
        slot = seat.slots.pop(slot_id)
        self.slots.pop(slot_id)
        seat.free.discard(slot_id)
        self._tell_retired(slot)
        self._feed(SlotsGone(seat.rank, (slot_id,)))
        self._services.arena.retire(slot)

    def _tell_retired(self, slot: Slot) -> None:
        for session in self._told.pop(slot.id, set()):
            session.send(Retire(slot.id))


def _grow(seat: Seat, state_bytes: int) -> None:
    """A state that has outgrown its room twice gets headroom, or one that grows with each step would outgrow its slots with each
    step: by the time they are made they are too small again (P14). Once is what any does whose optimizer's state is born."""
    over = state_bytes - _grained(seat.state_bytes + seat.headroom_bytes)
    if over > 0:
        if seat.outgrown_bytes:
            steadily, small = min(over, seat.outgrown_bytes), min(state_bytes, SMALL_BYTES)
            seat.headroom_bytes = max(state_bytes // STATE_SHARE, 2 * steadily, small)
        seat.outgrown_bytes = over
    else:
        seat.headroom_bytes = min(seat.headroom_bytes, -over)
    seat.state_bytes = state_bytes


def _grained(nbytes: int) -> int:
    return -(-nbytes // SLOT_GRAIN_BYTES) * SLOT_GRAIN_BYTES


def _make(
    arena: Arena, tenant: Tenant, record: int, process: Process | None, nbytes: int, headroom_bytes: int, missing: int
) -> Slot:
    """With headroom, where ``missing`` such slots would fit. Blocks. Raises NoMemory: not even ``nbytes`` fit."""
    large, exact = _grained(nbytes + headroom_bytes), _grained(nbytes)
    if headroom_bytes and missing * (large + record) <= arena.spare_bytes(tenant.uid):
        with contextlib.suppress(NoMemory):  # somebody else was faster
            return arena.allocate(tenant, large, record, mapper=process)
    return arena.allocate(tenant, exact, record, mapper=process)


def _record_room(seat: Seat) -> int:
    return max(RECORD_BYTES_MIN, seat.record_bytes)


async def settle(predicate: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition of this loop without a busy wait; False at the timeout."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not predicate():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(SETTLE_POLL_S)
    return True


SETTLE_POLL_S = 0.01
