"""What one rank's steps take without our traffic beside them, and with it.

Medians over rows (a row is one step, or several short ones together): an evaluation, a garbage collection or a slow batch is
one row among many and moves neither. Rows that a capture or a wait of ours disturbed do not come here at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from ckptd.core.traffic import Kind

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


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass
class StepTimes:
    """Of one rank. Seconds per step."""

    quiet: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINE_ROWS_MAX))
    loaded: deque[float] = field(default_factory=lambda: deque(maxlen=EVIDENCE_ROWS_MAX))
    fresh: int = 0  # loaded rows since the last decision
    seen: int = 0

    def add(self, kind: Kind, step_s: float) -> None:
        self.seen += 1
        if self.seen <= WARMUP_ROWS:
            return
        if kind == "quiet":
            self.quiet.append(step_s)
            self._look_for_change()
        elif kind == "loaded":
            self.loaded.append(step_s)
            self.fresh += 1

    def forget_loaded(self) -> None:
        """They were made at another rate."""
        self.loaded.clear()
        self.fresh = 0

    @property
    def baseline_s(self) -> float | None:
        """Median step without traffic; None: too few were seen."""
        return median(self.quiet) if len(self.quiet) >= BASELINE_ROWS_MIN else None

    @property
    def slowdown(self) -> float | None:
        """Median step with traffic over the baseline, less one; None: not known yet."""
        baseline = self.baseline_s
        if baseline is None or len(self.loaded) < EVIDENCE_ROWS_MIN:
            return None
        return median(self.loaded) / baseline - 1.0

    def _look_for_change(self) -> None:
        if len(self.quiet) < BASELINE_ROWS_MIN + CHANGE_ROWS:
            return
        rows = list(self.quiet)
        before, newest = sorted(rows[:-CHANGE_ROWS]), rows[-CHANGE_ROWS:]
        tail = int(len(before) * CHANGE_TAIL)
        low, high = before[tail], before[-1 - tail]
        if min(newest) > high or max(newest) < low:
            self.quiet = deque(newest, maxlen=BASELINE_ROWS_MAX)
            self.forget_loaded()


@dataclass
class Cadence:
    """How often snapshot() is called. A job that calls it at each step wants as many as there can be; one that calls it now and
    then wants each of them."""

    calls: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=9))  # (step, seconds)

    def called(self, step: int, now: float) -> None:
        if self.calls and step <= self.calls[-1][0]:
            if step == self.calls[-1][0]:
                return
            self.calls.clear()  # another epoch
        self.calls.append((step, now))

    @property
    def seconds(self) -> float | None:
        """Between two calls; None: at each step, or not known."""
        rows = list(self.calls)
        pairs = list(pairwise(rows))
        if len(pairs) < 2 or median(b[0] - a[0] for a, b in pairs) <= 1:
            return None
        return median(b[1] - a[1] for a, b in pairs)
