"""The memory of the local ranks: the slots of each rank, sized to its layout (design D1, D9, section 5)."""

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
class RankSlots:
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
    told_own: set[str] = field(default_factory=set)  # names that it was told are each rank's own
    left: bool = False  # the rank lives on another node in the newest epoch


class LocalSlots:
    """Own slots of one job on this node. Tells the machine what exists (SlotsReady, SlotsGone)."""

    def __init__(
        self, services: Services, job: str, uid: int, frozen: Frozen, feed: Callable[[Event], None]
    ) -> None:
        self._services, self._job, self._uid, self._feed = services, job, uid, feed
        self._frozen = frozen
        frozen.in_use = lambda slot: any(own.frozen is slot for own in self.by_rank.values())
        frozen.on_retired = self._tell_retired
        self.by_rank: dict[int, RankSlots] = {}
        self.slots: dict[int, Slot] = {}  # every own slot of the job, local rank or not
        self.lent: set[int] = set()  # FREE slots that a restore fetches into
        self._told: dict[int, set[RankSession]] = {}  # sessions that were told of a slot

    def of_session(self, session: RankSession) -> RankSlots | None:
        return next((own for own in self.by_rank.values() if own.session is session), None)

    def adopt(self, slot: Slot, *, free: bool) -> None:
        """A slot that came back with the daemon's memory; it is taken when the rank's trainer returns."""
        own = self.by_rank.setdefault(slot.tenant.rank, RankSlots(slot.tenant.rank))
        own.slots[slot.id] = self.slots[slot.id] = slot
        if free:
            own.free.add(slot.id)
            own.adopted.add(slot.id)
            self._feed(SlotsReady(own.rank, (slot.id,)))

    def attach(
        self, rank: int, session: RankSession, state_bytes: int, frozen_bytes: int = 0, record_bytes: int = 0
    ) -> RankSlots:
        own, frozen_bytes = self.by_rank.setdefault(rank, RankSlots(rank)), max(frozen_bytes, 0)
        if own.session is not session:
            own.layouts.clear()
            own.headroom_bytes = own.outgrown_bytes = 0
            kept = self._frozen.kept_for(rank) if frozen_bytes else None
            if kept is not None and self._services.arena.foreign_mapper(kept, session.process):
                kept = None
            own.frozen, own.frozen_wanted = kept, 0 if kept is not None else frozen_bytes
        own.frozen_bytes, own.record_bytes = frozen_bytes, record_bytes
        self.unwatch(own)
        own.session, own.process, own.told_waits, own.told_own = session, session.process, "", set()
        own.state_bytes = max(state_bytes, 1)
        for slot_id in sorted(own.free):
            if self._foreign_mapper(slot_id, session) or self._oversized(own, slot_id):
                self._retire(own, slot_id)
        own.adopted.clear()
        for slot in (*own.slots.values(), *([own.frozen] if own.frozen is not None else [])):
            self._map(own, slot)
        self.resize(own, own.state_bytes)
        return own

    def detach(self, session: RankSession) -> RankSlots | None:
        for told in self._told.values():
            told.discard(session)
        own = self.of_session(session)
        if own is not None:
            own.session = None
            own.frozen, own.frozen_wanted = None, 0
            self._lacks_nothing(own)
            # The memory of a rank that lives elsewhere now goes.
            asyncio.get_running_loop().call_soon(self.tidy)
        return own

    def watch(self, own: RankSlots, process: Process, died: Callable[[], None]) -> None:
        """The connection ended and the process lives. ``died`` unless the rank is back before."""
        self.unwatch(own)
        own.watched = os.dup(process.fileno())  # the session's own goes with the session

        def gone() -> None:
            self.unwatch(own)
            died()

        asyncio.get_running_loop().add_reader(own.watched, gone)

    def unwatch(self, own: RankSlots) -> None:
        if own.watched >= 0:
            asyncio.get_running_loop().remove_reader(own.watched)
            os.close(own.watched)
            own.watched = -1

    def resize(self, own: RankSlots, state_bytes: int, frozen_bytes: int = 0, record_bytes: int = 0) -> None:
        """``frozen_bytes``: a new slot of this size for its frozen part is wanted, unless one waits to be filled; below 0: the
        rank has no frozen part any more."""
        _grow(own, max(state_bytes, 1))
        own.record_bytes = record_bytes or own.record_bytes
        if frozen_bytes < 0:
            own.frozen, own.frozen_wanted, own.frozen_bytes = None, 0, 0
            asyncio.get_running_loop().call_soon(self.tidy)
        frozen_bytes = max(frozen_bytes, 0)
        own.frozen_bytes = frozen_bytes or own.frozen_bytes
        waits = own.frozen is not None and own.frozen.record is None and own.frozen.capacity >= frozen_bytes
        if frozen_bytes and not waits:
            own.frozen_wanted = frozen_bytes
        own.resize_again = True
        if not own.sizing:
            own.sizing = True
            self._services.spawn(self._size(own), f"size {self._job} rank {own.rank}")

    def sizing(self) -> bool:
        return any(own.sizing for own in self.by_rank.values())

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
        for own in list(self.by_rank.values()):
            for slot_id in sorted(own.free):
                if not self._useful(own, slot_id):
                    self._retire(own, slot_id)
                    retired = True
        if self._frozen.tidy() or retired:
            self.grow()

    def drop_idle(self, most_bytes: int | None) -> None:
        """Memory is short: slots of ranks that are gone, with nothing in them, go; not more than so many bytes."""
        for own in self.by_rank.values():
            if own.session is not None or own.watched >= 0:
                continue  # its process lives
            for slot_id in sorted(own.free):
                size = own.slots[slot_id].size
                if most_bytes is None or size <= most_bytes:
                    most_bytes = None if most_bytes is None else most_bytes - size
                    self._retire(own, slot_id)

    def forget_frozen(self, frozen: Slot) -> None:
        """Who captured it is told that it is gone, and captures anew."""
        for own in self.by_rank.values():
            if own.frozen is frozen:
                own.frozen = None
                self._tell_retired(frozen)

    def grow(self) -> None:
        """Memory came free: ranks that are short of slots try again."""
        for own in list(self.by_rank.values()):
            short = self._fitting(own) < self._services.policy.own_slots or own.frozen_wanted
            if own.session is not None and short:
                self.resize(own, own.state_bytes)

    def _useful(self, own: RankSlots, slot_id: int) -> bool:
        if own.session is None:
            return not own.left
        return (
            self._fits(own, own.slots[slot_id])
            and not self._foreign_mapper(slot_id, own.session)
            and self._fitting(own) <= self._services.policy.own_slots  # what is too small goes once it is FREE
        )

    def usable(self, slot_id: int, session: RankSession) -> bool:
        """May this session fill the slot? Not while another living process could write into it (D1). It is told of the slot
        first: one that such a process had mapped when the session began may have come free since."""
        slot = self.slots[slot_id]
        self._map(self.by_rank[slot.tenant.rank], slot)
        return session in self._told.get(slot_id, ())

    def lend(self, rank: int, nbytes: int) -> Slot | None:
        """A FREE slot of the rank for a restore to fetch into. Nobody else knows of it until it is ``returned``."""
        own = self.by_rank.get(rank)
        fitting = [i for i in sorted(own.free) if own.slots[i].capacity >= nbytes] if own else []
        if own is None or not fitting:
            return None
        own.free.discard(fitting[0])
        self.lent.add(fitting[0])
        self._feed(SlotsGone(rank, (fitting[0],)))
        return own.slots[fitting[0]]

    def returned(self, slot: Slot) -> None:
        self.lent.discard(slot.id)
        if slot.id not in self.slots:
            return  # the job was dropped meanwhile
        self.by_rank[slot.tenant.rank].free.add(slot.id)
        self._feed(SlotsReady(slot.tenant.rank, (slot.id,)))
        self.tidy()

    def release_unused(self, ranks_here: frozenset[int]) -> None:
        """After a new epoch: FREE slots of ranks that live elsewhere now make room for those that live here."""
        for own in self.by_rank.values():
            own.left = own.rank not in ranks_here
        self.tidy()

    def drop_all(self) -> None:
        for own in self.by_rank.values():
            self.unwatch(own)
            for slot in own.slots.values():
                self._services.arena.retire(slot)
        self.by_rank.clear()
        self.slots.clear()

    async def _size(self, own: RankSlots) -> None:
        try:
            while own.resize_again and own.session is not None:
                own.resize_again = False
                await self._size_once(own)
        finally:
            own.sizing = False

    async def _size_once(self, own: RankSlots) -> None:
        for slot_id in sorted(own.free):
            if not self._fits(own, own.slots[slot_id]):
                self._retire(own, slot_id)
        if own.frozen_wanted and not await self._give_frozen(own):
            return
        while own.session is not None and self._fitting(own) < self._services.policy.own_slots:
            slot = await self._allocate(own, own.state_bytes, own.headroom_bytes)
            if slot is None:
                return
            if own.session is None or not self._fits(own, slot):
                self._services.arena.retire(slot)
                continue
            own.slots[slot.id] = self.slots[slot.id] = slot
            own.free.add(slot.id)
            self._feed(SlotsReady(own.rank, (slot.id,)))  # first: the connection may end when it is told, and the slot go with it
            self._map(own, slot)
        self._lacks_nothing(own)

    def _fitting(self, own: RankSlots) -> int:
        return sum(1 for slot in own.slots.values() if self._fits(own, slot))

    @staticmethod
    def _fits(own: RankSlots, slot: Slot) -> bool:
        """Has it room for the live part, and for a record of both parts?"""
        return slot.capacity >= own.state_bytes and slot.row.meta_capacity >= _record_room(own)

    @staticmethod
    def _oversized(own: RankSlots, slot_id: int) -> bool:
        """Was it for a frozen part that was not sealed before the daemon ended? As a slot for snapshots it would keep that
        memory from the next one."""
        return slot_id in own.adopted and own.slots[slot_id].capacity > OVERSIZE * max(own.state_bytes, SLOT_GRAIN_BYTES)

    async def _give_frozen(self, own: RankSlots) -> bool:
        """Before the slots that snapshots are granted: a grant is of no use without it."""
        session, nbytes = own.session, own.frozen_wanted
        slot = await self._allocate(own, nbytes)
        if slot is None:
            own.frozen = None  # the rank cannot use the one it has: nothing but snapshots may keep that memory now
            own.resize_again = self._frozen.tidy() or own.resize_again
            return False
        if session is None or own.session is not session or own.frozen_wanted != nbytes:
            self._services.arena.retire(slot)
            own.resize_again = own.resize_again or own.session is not None
            return False
        own.frozen, own.frozen_wanted = slot, 0
        self._frozen.add(slot)
        self._map(own, slot)
        if self._frozen.tidy():
            asyncio.get_running_loop().call_soon(self.grow)
        return True

    async def _allocate(self, own: RankSlots, nbytes: int, headroom_bytes: int = 0) -> Slot | None:
        """``headroom_bytes`` more where that takes the memory of nothing else: of no slot that is missing, and of no copy."""
        tenant = Tenant(self._job, self._uid, "own", own.rank)
        process = own.session.process if own.session else None
        policy, record = self._services.policy, _record_room(own)
        missing = max(1, policy.own_slots - self._fitting(own)) + policy.replicas * policy.peer_sets
        make = partial(_make, self._services.arena, tenant, record, process)
        try:
            slot = await self._services.in_sizing(make, nbytes, headroom_bytes, missing * len(self.by_rank))
        except NoMemory as error:
            if own.session is None:
                return None  # whom it was for has gone meanwhile
            have = self._fitting(own)
            slots = f"{have} of {self._services.policy.own_slots} slots"
            if have == 1 and self._services.storage is not None:
                slots += ", which is free again once storage has its snapshot"
            text = f"rank {own.rank} has {slots}: {error}"
            self._services.health.report("no_memory", text, job=self._job, which=str(own.rank))
            self._feed(SlotsShort(own.rank, f"{slots}: {error.what} [{error.where}]"))
            return None
        self._lacks_nothing(own)
        return slot

    def _lacks_nothing(self, own: RankSlots) -> None:
        """For now: it got memory, needs no more, or is not here."""
        if self._services.health.clear("no_memory", job=self._job, which=str(own.rank)):
            self._feed(SlotsShort(own.rank, ""))

    def _map(self, own: RankSlots, slot: Slot) -> None:
        session = own.session
        told = self._told.setdefault(slot.id, set())
        if session is None or session in told or not self._services.arena.lend(slot, session.process):
            return
        segment = slot.segment
        told.add(session)
        frozen = slot is own.frozen
        holds = slot.record.layout.layout_id if frozen and slot.record is not None else ""
        note = Mapped(slot.id, segment.name, segment.size, slot.offset, slot.capacity, frozen, holds)
        session.send_segment(note, segment.name, segment.fd)

    def _foreign_mapper(self, slot_id: int, session: RankSession) -> bool:
        """A mapping cannot be revoked: while another process may write into the slot, nobody else gets it (D1)."""
        return self._services.arena.foreign_mapper(self.slots[slot_id], session.process)

    def _retire(self, own: RankSlots, slot_id: int) -> None:
        slot = own.slots.pop(slot_id)
        self.slots.pop(slot_id)
        own.free.discard(slot_id)
        self._tell_retired(slot)
        self._feed(SlotsGone(own.rank, (slot_id,)))
        self._services.arena.retire(slot)

    def _tell_retired(self, slot: Slot) -> None:
        for session in self._told.pop(slot.id, set()):
            session.send(Retire(slot.id))


def _grow(own: RankSlots, state_bytes: int) -> None:
    """A state that has outgrown its room twice gets headroom, or one that grows with each step would outgrow its slots with each
    step: by the time they are made they are too small again (P14). Once is what any does whose optimizer's state is born."""
    over = state_bytes - _grained(own.state_bytes + own.headroom_bytes)
    if over > 0:
        if own.outgrown_bytes:
            steadily, small = min(over, own.outgrown_bytes), min(state_bytes, SMALL_BYTES)
            own.headroom_bytes = max(state_bytes // STATE_SHARE, 2 * steadily, small)
        own.outgrown_bytes = over
    else:
        own.headroom_bytes = min(own.headroom_bytes, -over)
    own.state_bytes = state_bytes


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


def _record_room(own: RankSlots) -> int:
    return max(RECORD_BYTES_MIN, own.record_bytes)


async def settle(predicate: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition of this loop without a busy wait; False at the timeout."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not predicate():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(SETTLE_POLL_S)
    return True


SETTLE_POLL_S = 0.01
