"""What one rank's steps take without our traffic beside them, and with it.

Medians over rows (a row is one step, or several short ones together): an evaluation, a garbage collection or a slow batch is
one row among many and moves neither. Rows in which training waited for us by its own wish do not come here at all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from ckptd.core.pacing.traffic import Kind

WARMUP_ROWS = (
    5  # the first of a rank: compilation, caches, autotuning (CheckFreq, FAST '21, leaves out as many)
)
BASELINE_ROWS_MIN = 6
BASELINE_ROWS_MAX = 64  # slow drift is followed over so many quiet rows
CHANGE_ROWS = (
    5  # so many quiet rows in a row outside of what was usual: another regime, the old rows are forgotten
)
CHANGE_TAIL = 0.1  # outside: in the upper or lower tenth of the rows before
EVIDENCE_ROWS_MIN = 8
EVIDENCE_ROWS_MAX = 16
OFTEN_ROWS_MAX = 256  # over which it is counted how often a capture runs beside a step


@dataclass
class Rows:
    """Of one kind, without our traffic beside them and with it. Seconds per step."""

    quiet: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINE_ROWS_MAX))
    loaded: deque[float] = field(default_factory=lambda: deque(maxlen=EVIDENCE_ROWS_MAX))

    def add(self, kind: Kind, step_s: float) -> None:
        if kind == "quiet":
            self.quiet.append(step_s)
            self._look_for_change()
        elif kind == "loaded":
            self.loaded.append(step_s)

    @property
    def baseline_s(self) -> float | None:
        """Median without traffic; None: too few were seen."""
        return median(self.quiet) if len(self.quiet) >= BASELINE_ROWS_MIN else None

    @property
    def loaded_s(self) -> float | None:
        """Median with traffic; None: too few were seen."""
        return median(self.loaded) if len(self.loaded) >= EVIDENCE_ROWS_MIN else None

    @property
    def slowdown(self) -> float | None:
        baseline, loaded = self.baseline_s, self.loaded_s
        return loaded / baseline - 1.0 if baseline is not None and loaded is not None else None

    def _look_for_change(self) -> None:
        if len(self.quiet) < BASELINE_ROWS_MIN + CHANGE_ROWS:
            return
        rows = list(self.quiet)
        before, newest = sorted(rows[:-CHANGE_ROWS]), rows[-CHANGE_ROWS:]
        tail = int(len(before) * CHANGE_TAIL)
        low, high = before[tail], before[-1 - tail]
        if min(newest) > high or max(newest) < low:
            self.quiet = deque(newest, maxlen=BASELINE_ROWS_MAX)
            self.loaded.clear()


@dataclass
class StepTimes:
    """Of one rank. ``captured``: rows beside which a capture ran; they are compared with their like, so that a job that captures
    at each step is seen too."""

    plain: Rows = field(default_factory=Rows)
    captured: Rows = field(default_factory=Rows)
    fresh: int = 0  # loaded rows since the last decision
    seen: int = 0
    _captures: deque[bool] = field(default_factory=lambda: deque(maxlen=OFTEN_ROWS_MAX))

    def add(self, kind: Kind, step_s: float, *, captured: bool = False) -> None:
        self.seen += 1
        if self.seen <= WARMUP_ROWS:
            return
        self._captures.append(captured)
        rows = self.captured if captured else self.plain
        before = len(rows.loaded)
        rows.add(kind, step_s)
        if kind == "loaded":
            self.fresh += 1
        elif len(rows.loaded) < before:
            self.fresh = 0  # another regime

    def forget_loaded(self) -> None:
        """They were made at another rate."""
        for rows in (self.plain, self.captured):
            rows.loaded.clear()
        self.fresh = 0

    @property
    def often(self) -> float:
        """Beside which part of the rows a capture ran."""
        return sum(self._captures) / len(self._captures) if self._captures else 0.0

    @property
    def baseline_s(self) -> float | None:
        """Median step without traffic, and without a capture where such steps are known; None: too few were seen."""
        plain = self.plain.baseline_s
        return plain if plain is not None else self.captured.baseline_s

    @property
    def slowdown(self) -> float | None:
        """By traffic: median step with it over the one without, less one; None: not known yet. Of those rows that there are more
        of, if they tell."""
        more, fewer = (self.captured, self.plain) if self.often > 0.5 else (self.plain, self.captured)
        return more.slowdown if more.slowdown is not None else fewer.slowdown

    @property
    def captures(self) -> float:
        """What captures add to training, as a part of its time: how often one runs, times what it adds to a step. 0: not known."""
        baseline = self.plain.baseline_s
        if baseline is None:
            return 0.0
        pairs = (self.captured.baseline_s, baseline), (self.captured.loaded_s, self.plain.loaded_s)
        added = next((with_it - without for with_it, without in pairs if with_it is not None and without is not None), 0.0)
        return self.often * max(0.0, added) / baseline


@dataclass
class Cadence:
    """How often snapshot() is called. A job that calls it at each step wants as many as there can be; one that calls it now and
    then wants each of them."""

    calls: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=9))  # (step, seconds)

    def called(self, step: int, now: float) -> None:
        """``step``: more than the last one; an epoch has a Cadence of its own."""
        assert not self.calls or step > self.calls[-1][0]
        self.calls.append((step, now))

    @property
    def seconds(self) -> float | None:
        """Between two calls; None: at each step, or not known."""
        rows = list(self.calls)
        pairs = list(pairwise(rows))
        if len(pairs) < 2 or median(b[0] - a[0] for a, b in pairs) <= 1:
            return None
        return median(b[1] - a[1] for a, b in pairs)
