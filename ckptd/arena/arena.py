"""The arena: all memory that this daemon holds for others, within one budget (design D1, P7, P8)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping

from ckptd.arena.budget import NoMemory
from ckptd.arena.header import EXTENTS_AT, HeaderCorrupt, is_segment_name
from ckptd.arena.record import SlotRecord
from ckptd.arena.segment import Segment, pages
from ckptd.arena.segment_pool import SEGMENTS_MAX, FdKeeper, SegmentPool
from ckptd.arena.slot import MetaTooLarge, Slot, SlotMisuse
from ckptd.arena.tenant import Tenant
from ckptd.process import Process

__all__ = ["SEGMENTS_MAX", "Arena", "MetaTooLarge", "NoMemory", "Slot", "SlotMisuse", "SlotRecord", "Tenant"]

log = logging.getLogger("ckptd.arena")

SEGMENT_BYTES = 64 << 20  # a segment for several small replicas; larger ones get their own
SEGMENT_BUDGET_SHARE = 16  # but no more than this part of the budget
SEGMENT_BYTES_MIN = 1 << 20
META_BYTES = 1 << 20  # for layout, sums and digests where the caller does not say
RESERVE_BYTES = 256 << 20  # left free on the machine and in each cgroup
DEDICATED_USE_SHARE = 2  # a single-slot segment is used again only for at least 1/2 of itself


class Arena:
    """``keeper`` outlives us with the descriptors. ``uid_budget_bytes`` is each user's share, which binds him while another one
    lacks memory; ``segment_bytes`` is the size of shared segments.
    Thread-safe; ``allocate`` blocks for the kernel, everything else returns at once."""

    def __init__(
        self,
        budget_bytes: int,
        keeper: FdKeeper,
        *,
        segment_bytes: int | None = None,
        incarnation: str,
        uid_budget_bytes: int | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        prefault: bool = True,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.segment_bytes = pages(segment_bytes or _shared_size(budget_bytes))
        self.refused: list[tuple[str, str]] = []  # segments of an earlier life, not trusted: (name, reason)
        self._pool = SegmentPool(
            keeper, budget_bytes, uid_budget_bytes, reserve_bytes, incarnation, touch=prefault
        )
        self._lock = self._pool.lock
        self._slots: dict[int, Slot] = {}

    # --- what there is ------------------------------------------------------------------------------
    @property
    def slots(self) -> dict[int, Slot]:
        with self._lock:
            return dict(self._slots)

    @property
    def used_bytes(self) -> int:
        """Memory taken from the machine, whether slots lie in it or not."""
        with self._lock:
            return self._pool.committed() + self._pool.dying_bytes()

    def used_by(self, uid: int) -> int:
        with self._lock:
            return self._pool.committed(uid)

    @property
    def share_bytes(self) -> int:
        """What one user may have while another one trains or lacks memory."""
        return self._pool.share_bytes

    def spare_bytes(self, uid: int) -> int:
        """What may still be allocated for this user as things are. Reads the kernel's files."""
        return self._pool.spare_bytes(uid)

    def on_short(self, told: Callable[[int, int], None]) -> None:
        """``told(uid, bytes)`` of each request that is refused, from any thread."""
        self._pool.on_short = told

    def on_users(self, users: Callable[[], Collection[int]]) -> None:
        """``users``: who has processes here, from any thread. Each has no more than his share where there are others."""
        self._pool.users = users

    # --- allocate -----------------------------------------------------------------------------------
    def allocate(
        self,
        tenant: Tenant,
        payload_bytes: int,
        meta_bytes: int = META_BYTES,
        *,
        mapper: Process | None = None,
        beyond_budget: bool = False,
    ) -> Slot:
        """A FREE slot of at least these sizes. Blocks, for up to seconds per GiB. ``mapper``: the process that will map
        it; memory that another living process may write into is not used (D1). ``beyond_budget``: for a restore's last
        megabyte; only the machine and its cgroups must have room. Raises NoMemory."""
        capacity, meta = pages(max(payload_bytes, 1)), pages(max(meta_bytes, 1))
        with self._lock:
            slot = self._place(tenant, capacity, meta, mapper)
        return slot or self._in_new_segment(tenant, capacity, meta, beyond_budget)

    def _place(self, tenant: Tenant, capacity: int, meta: int, mapper: Process | None) -> Slot | None:
        need, group = capacity + meta, tenant.group
        for segment in self._pool.segments.values():
            if segment.tenant != group or segment.retired or self._foreign(segment, mapper):
                continue
            dedicated = segment.size > self.segment_bytes
            if dedicated and need * DEDICATED_USE_SHARE < segment.size - EXTENTS_AT:
                continue
            at = segment.gap(need)
            if at is not None:
                return self._add(segment, at, capacity, meta)
        return None

    def _add(self, segment: Segment, offset: int, capacity: int, meta: int) -> Slot:
        number = self._pool.number()
        slot = self._slots[number] = segment.place(number, offset, capacity, meta)
        return slot

    def _in_new_segment(self, tenant: Tenant, capacity: int, meta: int, beyond_budget: bool) -> Slot:
        def use(segment: Segment) -> Slot:
            return self._add(segment, EXTENTS_AT, capacity, meta)

        exact = EXTENTS_AT + capacity + meta
        if tenant.kind != "own" and exact < self.segment_bytes:
            try:
                return self._pool.make(tenant, self.segment_bytes, use)
            except NoMemory:
                log.info("no room for a shared segment, trying %d bytes", exact)
        return self._pool.make(tenant, exact, use, beyond_budget=beyond_budget)

    # --- let go -------------------------------------------------------------------------------------
    def release(self, slot: Slot) -> None:
        """The extent is free for another slot of the same group. Wholly unused segments stay, for reuse, until ``trim``
        or until their room is needed. A slot that is gone already is nothing to do."""
        with self._lock:
            if self._slots.pop(slot.id, None) is None:
                return
            slot.segment.remove(slot)
            if slot.segment.retired and not slot.segment.slots:
                self._pool.drop(slot.segment)

    def retire(self, slot: Slot) -> None:
        """Nobody gets this memory again: whoever maps it cannot be made to let go. Its pages return to the machine once
        the segment's last slot is gone."""
        with self._lock:
            slot.segment.retired = True
            self.release(slot)

    def trim(self) -> int:
        """Give wholly unused segments back. Returns their bytes."""
        return self._pool.trim()

    # --- who maps what ------------------------------------------------------------------------------
    def lend(self, slot: Slot, process: Process) -> bool:
        """``process`` is about to be told of this slot's segment. False: another living process may map it, the slot
        must be retired instead. Remembered in the segment header, so that it holds over a restart of the daemon too."""
        with self._lock:
            return not self._foreign(slot.segment, process) and slot.segment.lend(process)

    def foreign_mapper(self, slot: Slot, process: Process | None = None) -> bool:
        """May a living process other than this one write into the slot's segment?"""
        with self._lock:
            return self._foreign(slot.segment, process)

    @staticmethod
    def _foreign(segment: Segment, process: Process | None) -> bool:
        return any(process is None or not process.same(mapper) for mapper in segment.living_mappers())

    # --- take back ----------------------------------------------------------------------------------
    def adopt(self, fds: Mapping[str, int]) -> list[Slot]:
        """The segments that an earlier life left with the keeper: every slot with its old id, SEALED ones with their
        record, the rest FREE. Takes the descriptors. What cannot be trusted is listed in ``refused``, closed and
        forgotten; what cannot be looked at for what this process lacks is kept for the next life."""
        found: list[Slot] = []
        for name, fd in sorted(fds.items()):
            if not is_segment_name(name):
                os.close(fd)
                continue
            try:
                found += self._take(Segment.adopt(name, fd, self._pool.incarnation))
            except HeaderCorrupt as error:
                self._refuse(name, fd, error)
                self._pool.keeper.remove(name)
            except OSError as error:
                self._refuse(name, fd, error)
        return found

    def take_offer(
        self, fds: Mapping[str, int], *, job: str, uid: int, process: Process, refused: Callable[[str, Exception], None]
    ) -> list[Slot]:
        """Memory that a trainer still maps and we may have lost (no keeper). Only its own job's own slots, within the
        budget; the descriptors stay the caller's. What we have already is returned as it is."""
        found: list[Slot] = []
        for name, fd in fds.items():
            known = self._pool.segments.get(name)
            if known is not None:
                same = os.path.sameopenfile(known.fd, fd) and (known.tenant.job, known.tenant.uid) == (
                    job,
                    uid,
                )
                found += known.slots.values() if same else []
                continue
            copy = os.dup(fd)
            try:
                self._pool.admit_offer(name, os.fstat(copy).st_size, uid)
                segment = Segment.adopt(name, copy, self._pool.incarnation, offered=True)
                found += self._take_offered(segment, job, uid, process)
            except (HeaderCorrupt, NoMemory, OSError) as error:
                refused(name, error)
                os.close(copy)
        return found

    def _take_offered(self, segment: Segment, job: str, uid: int, process: Process) -> list[Slot]:
        tenant = segment.tenant
        if (tenant.kind, tenant.job, tenant.uid) != ("own", job, uid):
            raise HeaderCorrupt("offered by a process that it does not belong to", segment.name)
        with self._lock:
            self._pool.admit_slots(segment)
            self._pool.make_room(segment.size, uid)
            slots = self._take(segment)
            segment.lend(process)  # before anybody else finds room in it
        self._pool.keep(segment)
        return slots

    def _take(self, segment: Segment) -> list[Slot]:
        with self._lock:
            if segment.name in self._pool.segments or segment.slots.keys() & self._slots.keys():
                raise HeaderCorrupt("its name or a slot of it exists already", segment.name)
            self._pool.add(segment)
            self._slots.update(segment.slots)
            segment.write_ledger()
            return list(segment.slots.values())

    def _refuse(self, name: str, fd: int, error: Exception) -> None:
        log.error("segment %s is refused: %s", name, error)
        self.refused.append((name, str(error)))
        os.close(fd)

    def ready(self) -> None:
        """Start the helper thread ahead of need. Raises OSError: it cannot be started."""
        self._pool.ready()

    def close(self) -> None:
        """Stop the helper thread. The memory stays with the keeper; without one it goes with this process."""
        self._pool.close()


def _shared_size(budget_bytes: int) -> int:
    return max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES, budget_bytes // SEGMENT_BUDGET_SHARE))
