"""One token bucket for everything that this node sends or writes beside training: the shell around core/pacing/slowdown.py.

Threads wait here without the interpreter's lock, in bounded slices, and can be called off. Restores are never paced. While a
replica waits a flush gets what is left, but never nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ckptd.core.pacing.bucket import BURST_S, SLICE_BYTES_MAX, Bucket
from ckptd.core.pacing.slowdown import (
    AT_DEADLINE,
    NO_STEPS,
    OFF,
    STATES,
    WINDOWS,
    Demand,
    Order,
    Pacing,
    needed_bytes_s,
)
from ckptd.core.pacing.traffic import CAPTURED, KEPT_S, WAITED, Traffic
from ckptd.core.pacing.windows import Schedule, Span
from ckptd.protect.steprows import Row, check

Mode = Literal["off", "aimd", "windows"]
Kind = Literal["protect", "flush"]
Stopped = Callable[[], bool]

MOMENT_S = 0.001  # the shortest wait
WAIT_S = 0.1  # one slice of waiting: how soon a cancel is noticed
FLUSH_PATIENCE_S = 0.5  # a flush that waited so long gets a slice even while replicas wait
KEEPALIVE_S = (
    5.0  # a stream may be held back for so long, then a little goes: its receiver gives it up after 20 s
)
KEEPALIVE_BYTES = 4 * 1024
ORDER_S = 0.1  # floor, deadlines and holds are looked at so often
RECEIVED_S = 0.2  # bytes are heard of so late (wire.bulk.POLL_S)
TAIL_S = 0.05  # the next send of a transfer is expected within it, at least
CLOCK_S_MAX = 5.0  # a step that ended so far in the future was measured on another clock; one of long ago cannot be judged
WINDOWS_LINE_MIN = 1 << 20  # bytes/s: without a measured line windows could not be filled


class Pacer:
    """``clock``: the monotonic one that ranks report with; ``wall``: unix time."""

    def __init__(
        self,
        mode: Mode = "off",
        pacing: Pacing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.mode = mode
        self.pacing = pacing or Pacing()
        self._clock, self._wall = clock, wall
        self._changed = threading.Condition()
        self._bucket, self._traffic = Bucket(clock()), Traffic()
        self._order = Order(None, False, OFF if mode == "off" else NO_STEPS)
        self._order_at, self._burst_s = -math.inf, BURST_S
        self._transfers: set[Transfer] = set()
        self._waiting = 0  # replicas that wait for tokens
        self._schedules: dict[str, Schedule] = {}
        self.throttled_s: dict[Kind, float] = {"protect": 0.0, "flush": 0.0}
        self.sent_bytes: dict[Kind, int] = {"protect": 0, "flush": 0}
        self.on_state: Callable[[str, str], None] = lambda before, now: None

    # --- what goes out ------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def transfer(
        self, kind: Kind, nbytes: int, within_s: float, gone: Callable[[], bool] = lambda: False
    ) -> Iterator[Transfer]:
        """``nbytes`` are to leave within so many seconds; the deadline is kept whatever it costs training. ``gone``: what was to
        be sent is not there any more, so ``take`` allows nothing."""
        transfer = Transfer(self, kind, nbytes, self._clock() + within_s, gone)
        with self._changed:
            self._transfers.add(transfer)
            self._look(at_once=True)
        try:
            yield transfer
        finally:
            with self._changed:
                self._transfers.discard(transfer)

    def take(self, transfer: Transfer, nbytes: int, stopped: Stopped) -> int:
        """How many of them may go now, at least one; 0: ``stopped``. Waits until then."""
        if self.mode == "off":
            return 0 if transfer.gone() else nbytes
        since = self._clock()
        with self._changed:
            protects = transfer.kind == "protect"
            self._waiting += protects
            try:
                return self._take(transfer, nbytes, stopped, since)
            finally:
                self._waiting -= protects
                self.throttled_s[transfer.kind] += self._clock() - since

    def _take(self, transfer: Transfer, nbytes: int, stopped: Stopped, since: float) -> int:
        while not transfer.gone():
            now = self._clock()
            self._look()
            wanted, pause = self._room(now, nbytes)
            if pause <= 0 and not self._yields(transfer, now - since):
                pause = self._bucket.take(now, wanted)
                if pause <= 0:
                    self._let_go(now, wanted)
                    return wanted
            if now - since >= KEEPALIVE_S and transfer.kind == "protect":
                self._bucket.charge(KEEPALIVE_BYTES)
                transfer.trickles = True
                return min(nbytes, KEEPALIVE_BYTES)
            if stopped():
                return 0
            self._changed.wait(min(max(pause, MOMENT_S), WAIT_S))
        return 0

    def _room(self, now: float, nbytes: int) -> tuple[int, float]:
        """(how much may go as one piece as far as holds and windows are concerned, else seconds until it may)."""
        wanted = self._bucket.slice(nbytes)
        if self._order.held:
            return 0, WAIT_S
        schedule = self._schedule(now) if self._order.state == WINDOWS else None
        if schedule is None:
            return wanted, 0.0
        allowed, pause = schedule.allows(now, self._line())
        return min(wanted, allowed, SLICE_BYTES_MAX), pause

    def _yields(self, transfer: Transfer, waited_s: float) -> bool:
        late = self._order.state == AT_DEADLINE
        return transfer.kind == "flush" and self._waiting > 0 and waited_s < FLUSH_PATIENCE_S and not late

    def _let_go(self, now: float, nbytes: int) -> None:
        self._traffic.began(now)
        schedule = self._schedule(now) if self._order.state == WINDOWS else None
        if schedule is not None:
            schedule.took(now, nbytes)

    def sent(self, transfer: Transfer, nbytes: int) -> None:
        """What ``take`` allowed has gone, or has failed to."""
        with self._changed:
            self.sent_bytes[transfer.kind] += nbytes
            if self.mode == "off":
                return
            transfer.left = max(0, transfer.left - nbytes)
            if transfer.trickles:
                transfer.trickles = False
                return
            self._traffic.ended(self._clock(), nbytes, self._tail_s())

    def received(self) -> None:
        """Bytes of somebody else's replica have landed here: such a step is no baseline."""
        if self.mode != "off":
            with self._changed:
                now = self._clock()
                self._traffic.received(now - RECEIVED_S, now + TAIL_S)

    def _tail_s(self) -> float:
        rate = self._bucket.rate
        return TAIL_S if rate is None else max(TAIL_S, 2.0 * self._bucket.slice(1 << 30) / rate)

    # --- what ranks say -----------------------------------------------------------------------------------------
    def stepped(self, who: str, rows: Sequence[Row], spans: Sequence[Row] = ()) -> None:
        """A rank's steps since its last report, and where in the newest one it communicated. Raises ValueError for rows that no
        client sends."""
        check(rows, spans)
        if self.mode == "off":
            return
        with self._changed:
            now = self._clock()
            for begin, end, steps, disturbed in rows:
                if now - KEPT_S < end <= now + CLOCK_S_MAX and disturbed < WAITED:
                    kind, line = self._traffic.kind(begin, end), self._traffic.line_bytes_s
                    self.pacing.step(
                        who, kind, (end - begin) / steps, now, line, captured=disturbed >= CAPTURED
                    )
            if rows and self.mode == "windows":
                self._observe(who, rows[-1], spans)
            self._look(at_once=True)

    def waits(self) -> None:
        """A rank waits for a copy or a flush, so no step of its is slowed down: nothing is held back until ``trains``."""
        with self._changed:
            self.pacing.pause()
            self._look(at_once=True)

    def trains(self) -> None:
        """A rank called snapshot(): at once, or the copies that this begins would run free until its first step is told."""
        with self._changed:
            self.pacing.goes_on(self._clock())
            self._look(at_once=True)

    def forget(self, who: str) -> None:
        """The rank is gone, or begins anew. A name that ends in "/" means all below it."""
        with self._changed:
            for rank in [
                rank
                for rank in self.pacing.ranks
                if rank == who or (who.endswith("/") and rank.startswith(who))
            ]:
                self.pacing.forget(rank)
                self._schedules.pop(rank, None)

    def _observe(self, who: str, row: Row, spans: Sequence[Row]) -> None:
        begin, end, steps, _ = row
        if steps == 1 and spans:
            pairs: list[Span] = [(span[0], span[1]) for span in spans]
            self._schedules.setdefault(who, Schedule()).observe(begin, end - begin, pairs)

    # --- what holds ---------------------------------------------------------------------------------------------
    def look(self, *, at_once: bool = False) -> None:
        """Now and then, when nothing moves either."""
        with self._changed:
            self._look(at_once=at_once)

    def _look(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if self.mode == "off" or (now - self._order_at < ORDER_S and not at_once):
            return
        self._order_at, before = now, self._order
        demands = [Demand(transfer.left, transfer.deadline) for transfer in self._transfers]
        order = self.pacing.order(now, self._wall(), needed_bytes_s(demands, now))
        if self._fits_windows(order, now):
            order = Order(order.rate, order.held, WINDOWS)
        self._order = order
        burst_s = BURST_S if order.state != WINDOWS else max(BURST_S, self.pacing.baseline_s or 0.0)
        if (order.rate, burst_s) != (self._bucket.rate, self._burst_s):
            self._burst_s = burst_s
            self._bucket.set(now, order.rate, burst_s)
            self._changed.notify_all()
        if order.state != before.state:
            self.on_state(before.state, order.state)

    def _fits_windows(self, order: Order, now: float) -> bool:
        """Are there windows to keep to, and is there time to?"""
        schedule = self._schedule(now)
        if schedule is None or order.held or order.state in (AT_DEADLINE, NO_STEPS):
            return False
        demands = [Demand(transfer.left, transfer.deadline) for transfer in self._transfers]
        return schedule.capacity_bytes_s(self._line()) >= needed_bytes_s(demands, now)

    def _schedule(self, now: float) -> Schedule | None:
        """Of the rank with the least room."""
        known = [schedule for schedule in self._schedules.values() if schedule.known(now)]
        return min(known, key=lambda schedule: schedule.capacity_bytes_s(1.0), default=None)

    def _line(self) -> float:
        return max(self._traffic.line_bytes_s, float(WINDOWS_LINE_MIN))

    # --- reading ------------------------------------------------------------------------------------------------
    @property
    def state(self) -> str:
        assert self._order.state in STATES
        return self._order.state

    @property
    def paced(self) -> bool:
        """Is there a limit, or a hold, or a window to wait for?"""
        return self._order.rate is not None or self._order.held or self._order.state == WINDOWS

    @property
    def rate(self) -> float | None:
        """Bytes per second in force; None: no limit."""
        return 0.0 if self._order.held else self._order.rate

    def report(self) -> dict[str, Any]:
        """As observe.report.PacingReport has it."""
        with self._changed:
            pacing, rate = self.pacing, self.rate
            return {
                "mode": self.mode,
                "state": self.state,
                "rate_bytes_s": rate,
                "line_bytes_s": self.line_bytes_s,
                "slowdown": pacing.slowdown,
                "captures": pacing.captures,
                "step_s": pacing.baseline_s,
                "overhead_max": pacing.overhead_max,
                "throttled_s": dict(self.throttled_s),
                "sent_bytes": dict(self.sent_bytes),
            }

    @property
    def line_bytes_s(self) -> float:
        return self._traffic.line_bytes_s


class Transfer:
    """What a sender carries along. ``take`` before each piece, ``sent`` after it."""

    def __init__(
        self, pacer: Pacer, kind: Kind, nbytes: int, deadline: float, gone: Callable[[], bool]
    ) -> None:
        self._pacer, self.kind, self.left, self.deadline, self.gone = pacer, kind, nbytes, deadline, gone
        self.trickles = False

    def take(self, nbytes: int, stopped: Stopped) -> int:
        return self._pacer.take(self, nbytes, stopped)

    def sent(self, nbytes: int) -> None:
        self._pacer.sent(self, nbytes)
