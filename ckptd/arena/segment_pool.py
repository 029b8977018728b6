"""The stock: every segment that exists, how they come and go, and that they stay within the budget (design D1, P8)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Protocol

from ckptd.arena.budget import NoMemory, headroom
from ckptd.arena.header import HeaderCorrupt, is_segment_name
from ckptd.arena.segment import Segment
from ckptd.arena.slot import Slot
from ckptd.arena.tenant import Tenant
from ckptd.core.failpoint import failpoint
from ckptd.thread_pool import ThreadPool, here
from ckptd.units import format_bytes

log = logging.getLogger("ckptd.arena")

SEGMENTS_MAX = 3072  # names come back in one environment variable of at most 128 KiB; with its colon one has at most 39 characters
REAP_TIMEOUT_S = 60.0
SEGMENTS_OFFERED_MAX = 1024  # of one user, until a daemon takes no more from his processes
SHOWN_CHARS_MAX = 80
HOLDERS_SHOWN_MAX = 4  # in one refusal
CLOCK_BACK_S = 24 * 3600  # by so much the clock may have been set back since an earlier life gave a number
LACK_S = 15.0  # a request that was refused is repeated every few seconds, as long as there is need


class FdKeeper(Protocol):
    def store(self, name: str, fd: int) -> bool: ...
    def remove(self, name: str) -> bool: ...


class SegmentPool:
    """``lock`` is the arena's too. ``reserve_bytes`` stay free on the machine and in each cgroup.
    ``uid_budget_bytes``: what one user may take while another one trains or lacks memory. ``on_short``: (uid, bytes) of each
    request that is refused, from any thread."""

    def __init__(
        self,
        keeper: FdKeeper,
        budget_bytes: int,
        uid_budget_bytes: int | None,
        reserve_bytes: int,
        incarnation: str,
        *,
        touch: bool,
    ) -> None:
        self.lock = threading.RLock()
        self.keeper, self.incarnation = keeper, incarnation
        self.segments: dict[str, Segment] = {}  # oldest first
        self._budget_bytes = budget_bytes
        self.share_bytes = budget_bytes if uid_budget_bytes is None else uid_budget_bytes
        self.on_short: Callable[[int, int], None] = lambda uid, nbytes: None
        self.users: Callable[[], Collection[int]] = tuple  # who has processes here, from any thread
        self._lacking: dict[int, float] = {}  # uid -> when a request within his share was refused last
        self._reserve_bytes, self._touch = reserve_bytes, touch
        self._pending: dict[int, tuple[int, int]] = {}  # allocation -> (uid, bytes) not there yet
        self._dying: dict[Future[None], int] = {}  # bytes whose pages are being given back
        self._reaper = ThreadPool(1, "arena-reaper")
        self._number = _first()  # above all of an earlier life, should its segment header come late

    def number(self) -> int:
        """Never given twice, over re-adoption too: ids of slots and segments."""
        with self.lock:
            self._number += 1
            return self._number

    def committed(self, uid: int | None = None) -> int:
        """Bytes of segments that exist or are being made, of one user or of all."""
        segments = sum(s.size for s in self.segments.values() if uid in (None, s.tenant.uid))
        return segments + sum(size for owner, size in self._pending.values() if uid in (None, owner))

    def dying_bytes(self) -> int:
        return sum(self._dying.values())

    def admit_offer(self, name: str, size: int, uid: int) -> None:
        """Before anything of it is read: whoever offers it may have made it himself. Raises NoMemory, HeaderCorrupt."""
        with self.lock:
            if not is_segment_name(name) or number_of(name) > _newest():
                raise HeaderCorrupt("no name that a daemon gave", name[:SHOWN_CHARS_MAX])
            self._admit_one_more()
            if sum(s.tenant.uid == uid for s in self.segments.values()) >= SEGMENTS_OFFERED_MAX:
                raise NoMemory(f"{SEGMENTS_OFFERED_MAX} segments of uid {uid} exist", where=name)
            self.make_room(size, uid)

    def admit_slots(self, segment: Segment) -> None:
        """Raises HeaderCorrupt: it would give others' slots their numbers."""
        if not segment.slots or max(segment.slots) > _newest():
            raise HeaderCorrupt("no slots that a daemon gave", segment.name)

    # --- coming -------------------------------------------------------------------------------------
    def make(
        self, tenant: Tenant, size: int, use: Callable[[Segment], Slot], *, beyond_budget: bool = False
    ) -> Slot:
        """A new segment, with its pages, and its first slot: ``use`` places it before anybody else sees the segment. Blocks.
        ``beyond_budget``: it counts, but the budget does not refuse it. Raises NoMemory."""
        with self._reserved(tenant, size, beyond_budget) as number:
            wait(list(self._dying), REAP_TIMEOUT_S)
            self._admit(size, tenant.uid)
            name = f"{tenant.kind}-{number:x}-{tenant.tag}"
            try:
                segment = Segment.create(name, tenant, size, self.incarnation, touch=self._touch)
            except OSError as error:
                raise NoMemory(f"allocation failed: {error}", where=format_bytes(size)) from error
            self.keep(segment)
            with self.lock:
                self.segments[name] = segment
                del self._pending[number]
                return use(segment)

    def add(self, segment: Segment) -> None:
        """One that exists already. ``make_room`` first, if it is not from an earlier life of ours."""
        with self.lock:
            self.segments[segment.name] = segment
            self._number = max(self._number, number_of(segment.name), *segment.slots)

    def keep(self, segment: Segment) -> None:
        failpoint("arena.keep")
        if not self.keeper.store(segment.name, segment.fd):
            log.warning("segment %s is not in the keeper: a crash of the daemon loses it", segment.name)

    @contextmanager
    def _reserved(self, tenant: Tenant, size: int, beyond_budget: bool) -> Iterator[int]:
        """Counted before it exists, so that two allocations cannot both fit into the last gap."""
        with self.lock:
            if not beyond_budget:
                self.make_room(size, tenant.uid)
            self._admit_one_more()
            number = self.number()
            self._pending[number] = (tenant.uid, size)
        try:
            yield number
        finally:
            with self.lock:
                self._pending.pop(number, None)

    def _admit_one_more(self) -> None:
        if len(self.segments) + len(self._pending) >= SEGMENTS_MAX:
            raise NoMemory(f"{SEGMENTS_MAX} segments exist", hint="use fewer copies or own slots")

    def make_room(self, size: int, uid: int) -> None:
        """Idle segments give way. Raises NoMemory when that is not enough for the budget, or for the user's share of it while
        another one lacks memory."""
        with self.lock:
            try:
                self._make_room(size, self._budget_bytes, None, uid)
                if self._others(uid):
                    self._make_room(size, self.share_bytes, uid, uid)
            except NoMemory:
                if self.committed(uid) + size <= self.share_bytes:
                    self._lacking[uid] = time.monotonic()
                self.on_short(uid, size)
                raise
            self._lacking.pop(uid, None)

    def spare_bytes(self, uid: int) -> int:
        """What this user could still have without being refused, and without asking anybody to let go of memory."""
        with self.lock:
            spare = self._budget_bytes - self.committed() + sum(s.size for s in self._idle(None))
            if self._others(uid):
                spare = min(spare, self.share_bytes - self.committed(uid) + sum(s.size for s in self._idle(uid)))
        return max(0, min(spare, self._room(0)))

    def _others(self, uid: int) -> bool:
        """Does another user train here, or was a request within his share refused a moment ago? What one has mapped by then cannot
        be taken back for the other (D20)."""
        since = time.monotonic() - LACK_S
        lack = any(at > since for other, at in self._lacking.items() if other != uid)
        return lack or any(other != uid for other in self.users())

    def _make_room(self, size: int, limit: int, uid: int | None, asker: int) -> None:
        over = self.committed(uid) + size - limit
        idle = self._idle(uid)
        missing = over - sum(s.size for s in idle)
        if missing > 0:
            whose = "memory budget" if uid is None else f"others train here or lack memory: the share of uid {uid}"
            raise NoMemory(
                f"{whose} of {format_bytes(limit)} has no room for {format_bytes(size)}",
                where=f"{format_bytes(missing)} missing, held by {self._holders(asker)}",
                hint="raise memory_budget, or use fewer copies or own slots",
            )
        for segment in idle:
            if over <= 0:
                break
            over -= segment.size
            self.drop(segment)

    def _holders(self, asker: int) -> str:
        """Who has the memory: his own jobs by name, other users' together (P13)."""
        held: dict[str, int] = {}
        for s in self.segments.values():
            name = f"job {s.tenant.job}" if s.tenant.uid == asker else "other users"
            held[name] = held.get(name, 0) + s.size
        most = sorted(held, key=lambda name: -held[name])[:HOLDERS_SHOWN_MAX]
        return ", ".join(f"{name}: {format_bytes(held[name])}" for name in most) or "nobody"

    def _admit(self, size: int, uid: int) -> None:
        """The machine and our cgroups must have room besides what other threads are touching right now."""
        room = self._room(size)
        if room < size and self.trim():
            wait(list(self._dying), REAP_TIMEOUT_S)
            room = self._room(size)
        if room < size:
            self.on_short(uid, size)
            now, reserve = headroom(), format_bytes(self._reserve_bytes)
            raise NoMemory(
                f"the machine has no room for {format_bytes(size)}",
                where=f"{now.limited_by} leaves {format_bytes(now.nbytes)}, of which {reserve} stay free",
                hint="raise the cgroup's limit or lower memory_budget",
            )

    def _room(self, size: int) -> int:
        now = headroom()
        reserve = self._reserve_bytes * (2 if now.kills_group else 1)  # there the OOM killer takes us along
        with self.lock:
            others = sum(nbytes for _, nbytes in self._pending.values()) - size
        return now.nbytes - reserve - others

    # --- going --------------------------------------------------------------------------------------
    def trim(self) -> int:
        """Give segments without a slot back. Returns their bytes."""
        with self.lock:
            idle = self._idle(None)
            for segment in idle:
                self.drop(segment)
            return sum(segment.size for segment in idle)

    def _idle(self, uid: int | None) -> list[Segment]:
        return [s for s in self.segments.values() if not s.slots and uid in (None, s.tenant.uid)]

    def drop(self, segment: Segment) -> None:
        """The keeper forgets it and its pages go back to the machine, in a thread: that takes a second per 10 GiB."""
        with self.lock:
            if self.segments.pop(segment.name, None) is None:
                return
            failpoint("arena.drop")
            self.keeper.remove(segment.name)
            try:
                future = self._reaper.submit(segment.destroy)
            except OSError:  # no thread: whoever wants room waits for it here
                future = here(segment.destroy)
            self._dying[future] = segment.size
        future.add_done_callback(self._reaped)

    def _reaped(self, future: Future[None]) -> None:
        with self.lock:
            self._dying.pop(future, None)
        if (error := future.exception()) is not None:
            log.error("a retired segment's pages stay until its mappers are gone: %s", error)

    def ready(self) -> None:
        """Raises OSError: no thread could be started."""
        self._reaper.ready(1)

    def close(self) -> None:
        self._reaper.shutdown(wait=True)


def _first() -> int:
    """Of a pool that begins now."""
    return int(time.time()) << 16


def _newest() -> int:
    """No daemon has given a higher number by now, unless the clock was set back by more than a day."""
    return _first() + (CLOCK_BACK_S << 16)


def number_of(name: str) -> int:
    return int(name.split("-")[1], 16)
