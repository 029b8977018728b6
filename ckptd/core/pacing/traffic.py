"""When this node moved bytes for snapshots, so that a training step can be told from one with traffic beside it."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

KEPT_S = 600.0  # how long a step may last and still be judged
INTERVALS_MAX = 4096
GUARD_S = 0.1  # after the last byte was handed to the kernel, until it has left the machine
COVERED_MIN = 0.1  # a step with traffic for less of its time is no evidence of what traffic costs
METER_S = 0.25  # throughput is measured over at least so long
METER_SHORT_S = 0.05  # or over a transfer that ended before
LINE_HALF_LIFE_S = 4 * 3600.0  # of the fastest throughput seen: a line may become slower

Kind = Literal["loaded", "quiet", "unclear"]

UNDISTURBED, CAPTURED, WAITED = 0.0, 1.0, 2.0  # of a row of steps: what we did beside it, in the rank's own process


class Intervals:
    """Times at which something was under way. What follows within the tail of the one before is one interval with it."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def add(self, begin: float, end: float) -> None:
        """``begin`` grows from call to call, or lies inside the newest interval."""
        if self._ends and begin <= self._ends[-1]:
            self._ends[-1] = max(self._ends[-1], end)
            return
        self._begins.append(begin)
        self._ends.append(end)
        if len(self._ends) > INTERVALS_MAX or self._ends[0] < begin - KEPT_S:
            drop = max(len(self._ends) - INTERVALS_MAX, bisect_left(self._ends, begin - KEPT_S))
            del self._begins[:drop], self._ends[:drop]

    def covered(self, begin: float, end: float) -> float:
        """Seconds of [begin, end] that lie in an interval."""
        first = bisect_left(self._ends, begin)
        last = bisect_left(self._begins, end)
        return sum(
            max(0.0, min(end, self._ends[i]) - max(begin, self._begins[i])) for i in range(first, last)
        )

    def touches(self, begin: float, end: float) -> bool:
        first = bisect_left(self._ends, begin)
        return first < len(self._ends) and self._begins[first] <= end


class Traffic:
    """``line_bytes_s``: the fastest that bytes went lately; 0 before anything was measured. Times: seconds of one clock."""

    def __init__(self) -> None:
        self._sent, self._received = Intervals(), Intervals()
        self._under_way: list[float] = []  # when each send began that has not returned
        self.line_bytes_s = 0.0
        self._peak_at = 0.0
        self._meter_from, self._meter_end, self._meter_until, self._meter_bytes = 0.0, 0.0, 0.0, 0

    def began(self, now: float) -> None:
        """A send was let go."""
        if not self._under_way and now > self._meter_until:
            self._measure(METER_SHORT_S)
            self._meter_from, self._meter_bytes = now, 0
        self._under_way.append(now)
        self._sent.add(min(self._under_way), now)

    def ended(self, now: float, nbytes: int, tail_s: float) -> None:
        """It returned. ``tail_s``: the next one is expected by then, if there is one."""
        if self._under_way:
            self._sent.add(min(self._under_way), now + tail_s)
            self._under_way.pop()
        self._meter_bytes += nbytes
        self._meter_until = max(self._meter_until, now + tail_s)
        self._meter_end = now
        if now - self._meter_from >= METER_S:
            self._measure(METER_S)
            self._meter_from, self._meter_bytes = now, 0

    def received(self, begin: float, end: float) -> None:
        self._received.add(begin, end)

    def kind(self, begin: float, end: float) -> Kind:
        """Of a step between these times. Quiet: nothing moved here. Loaded: we sent during a good part of it."""
        if self._under_way:
            self._sent.add(min(self._under_way), max(end, min(self._under_way)))
        if self._sent.covered(begin, end) >= COVERED_MIN * (end - begin):
            return "loaded"
        since = begin - GUARD_S
        return "unclear" if self._sent.touches(since, end) or self._received.touches(since, end) else "quiet"

    def _measure(self, least_s: float) -> None:
        took = self._meter_end - self._meter_from
        if self._meter_bytes and took >= least_s:
            kept = 0.5 ** ((self._meter_end - self._peak_at) / LINE_HALF_LIFE_S)
            self.line_bytes_s = max(self.line_bytes_s * kept, self._meter_bytes / took)
            self._peak_at = self._meter_end
