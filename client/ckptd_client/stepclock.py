"""How long steps take, for the daemon's pacing: two readings of the clock per step, sent with the frame that goes anyway.

A step ends where the same optimizer begins its next one; a job without optimizers is measured from snapshot() to snapshot().
Steps shorter than ROW_S_MIN come several to a row. A row in which a capture ran is marked, and one in which training waited for
us by its own wish: what they took says nothing of what traffic costs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptd.core.pacing.slowdown import ROW_S_MIN
from ckptd.core.pacing.traffic import CAPTURED, UNDISTURBED, WAITED
from ckptd.core.pacing.windows import SPANS_MAX
from ckptd.wire.rank import TIMES_MAX

REPORT_S = 1.0  # a job that calls snapshot() rarely reports so often all the same
OTHERS_MAX = 1000  # steps of other optimizers in a row: the one we go by is not used any more
CALLS = -1  # the mark of steps that are counted by calls of snapshot()

Row = list[float]


class StepClock:
    """Of one client; the training thread's. ``each``: report after each step, as windows need it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.on = False
        self.each = False
        self._mark: int | None = None  # which optimizer ends a step
        self._others = 0
        self._began = 0.0  # of the row that is under way; 0: none is
        self._steps = 0
        self._disturbed = UNDISTURBED
        self._rows: deque[Row] = deque(maxlen=TIMES_MAX)  # older ones are dropped
        self._spans: list[list[float]] = []
        self._newest_spans: list[list[float]] = []
        self._told_at = 0.0

    def stepped(self, mark: int, busy: bool) -> bool:
        """An optimizer begins its step (or snapshot() was called: CALLS). ``busy``: a capture is under way. True: a report is
        due."""
        if not self.on or not self._counts(mark):
            return False
        now = self._clock()
        beside = CAPTURED if busy else UNDISTURBED
        self._disturbed = max(self._disturbed, beside)
        if self._began:
            self._steps += 1
            if now - self._began >= (0.0 if self.each else ROW_S_MIN):
                self._end_row(now)
        if not self._began:
            self._began, self._steps, self._disturbed = now, 0, beside
        return bool(self._rows) and (self.each or now - self._told_at >= REPORT_S)

    def captures(self) -> None:
        """We copy beside the row under way."""
        self._disturbed = max(self._disturbed, CAPTURED)

    def waits(self) -> None:
        """Training asked to wait for us: the row under way is no evidence of anything."""
        self._disturbed = WAITED

    def report(self) -> tuple[list[Row] | None, list[Row] | None]:
        """(rows, spans of the newest) since the last one; None where there is none."""
        if not self._rows:
            return None, None
        rows, self._told_at = list(self._rows), self._clock()
        self._rows.clear()
        return rows, self._newest_spans or None

    def forget(self) -> None:
        """Another daemon, another epoch: begin anew."""
        self._rows.clear()
        self._began, self._mark, self._spans, self._newest_spans = 0.0, None, [], []

    @contextmanager
    def communication(self) -> Iterator[None]:
        """The wire is training's for as long as this lasts."""
        begin = self._clock()
        try:
            yield
        finally:
            if self.on and self._began:
                self._add_span(begin - self._began, self._clock() - self._began)

    def _add_span(self, begin: float, end: float) -> None:
        if begin < 0:
            return
        if len(self._spans) >= SPANS_MAX:
            self._spans[-1][1] = end  # the last ones are taken as one
        else:
            self._spans.append([begin, end])

    def _end_row(self, now: float) -> None:
        self._rows.append([self._began, now, float(self._steps), self._disturbed])
        self._newest_spans, self._spans = self._spans, []
        self._began = 0.0

    def _counts(self, mark: int) -> bool:
        """Does a step end here? The first optimizer seen says so, as long as it is used; calls only while there is none."""
        if mark == self._mark:
            self._others = 0
            return True
        self._others += mark != CALLS
        if self._mark is None or (self._mark == CALLS and mark != CALLS) or self._others > OTHERS_MAX:
            self._mark, self._others, self._began = mark, 0, 0.0
            return True
        return False
