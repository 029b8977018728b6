"""How fast this node may send beside training: additive increase, multiplicative decrease on the slow-down of its ranks' steps.

The measure is (median step with traffic) / (median step without) - 1 of the worst local rank. With what captures add to training
it is to be kept under ``overhead_max``: a capture is the caller's wish and is never held back, so traffic gets what it leaves.
Each node paces its own sends by its own ranks: a synchronous job slows everywhere alike, so the slow-down that node A's traffic
causes is seen, and answered, on A too. CheckFreq (FAST '21) measures the same ratio but only ever lowers its frequency; AIMD
finds the rate that a changed job allows. What no step time speaks for is not paced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.core.pacing.steptimes import EVIDENCE_ROWS_MIN, StepTimes
from ckptd.core.pacing.traffic import Kind

OVERHEAD_MAX = 0.02
FLOOR_BYTES_S = 128 * 1024
DEADLINE_S = 300.0  # of one copy
UNSEEN = 0.25  # of overhead_max is left to what costs each step alike, and so shows in no comparison of steps
TRAFFIC_MIN = 0.25  # of overhead_max is traffic's whatever captures cost: protection must come to an end
ENOUGH = 0.5  # of what traffic may cost: below it the rate grows
TOO_MUCH = 0.85  # of the same: above it the rate falls. Between them it stays; measured medians scatter
DECREASE = 0.75  # of the rate; more where the slow-down is far too large, as it is proportional to the rate or nearly so
DECREASE_MOST = 0.125
INCREASE = 1 / 512  # of the line, per decision
FASTER_EVERY = 4  # increases in a row: the next ones are twice as large, up to FASTER_MAX times
FASTER_MAX = 16
CEILING = 1.25  # times the fastest that bytes went: more would only delay the next decrease
WAIT_ROWS_MAX = 2 * EVIDENCE_ROWS_MIN  # of one rank, for the others' rows
ROWS_KEPT_S = 30.0  # without any step for longer than this nobody is slowed down
ROWS_KEPT_STEPS = 10
DEADLINE_LEFT_S_MIN = 1.0  # a deadline that has passed asks for all that is left within this

# Where traffic never ends by itself it is held back for one part in HOLD_PARTS of the time, on all nodes at once (their clocks
# agree to a fraction of a second), so that there is a baseline. Lengths are powers of two, so nodes whose steps differ a little
# still hold together.
HOLD_PARTS = 16
HOLD_PARTS_FIRST = 4  # as long as nothing is known
HOLD_ROWS = 7
HOLD_S_MIN, HOLD_S_MAX = 1.0, 16.0
HOLD_NEEDS_MAX = 0.5  # of the line: deadlines that ask for more do not allow a hold
ROW_S_MIN = 0.1  # shorter steps come several to a row

OFF, NO_STEPS, MEASURING, WITHIN, PACED, AT_FLOOR, AT_DEADLINE, HELD, WINDOWS = (
    "off", "no step times", "measuring", "within", "paced", "floor", "deadline", "held", "windows",
)  # fmt: skip
STATES = (OFF, NO_STEPS, MEASURING, WITHIN, PACED, AT_FLOOR, AT_DEADLINE, HELD, WINDOWS)


@dataclass(frozen=True)
class Order:
    """``rate``: bytes per second, None: as fast as it goes. ``held``: nothing now."""

    rate: float | None
    held: bool
    state: str


@dataclass(frozen=True)
class Demand:
    """What must have left by when (seconds of the clock that ``needed_bytes_s`` is asked with)."""

    nbytes: int
    deadline: float


def needed_bytes_s(demands: Iterable[Demand], now: float) -> float:
    """The least rate at which all of them, the most urgent first, leave in time."""
    ahead, needed = 0, 0.0
    for demand in sorted(demands, key=lambda demand: demand.deadline):
        ahead += demand.nbytes
        needed = max(needed, ahead / max(demand.deadline - now, DEADLINE_LEFT_S_MIN))
    return needed


class Pacing:
    """Of one node. ``rate`` is what the loop has found, before floor and deadlines; None: nothing speaks for a limit."""

    def __init__(self, overhead_max: float = OVERHEAD_MAX, floor_bytes_s: float = FLOOR_BYTES_S) -> None:
        self.overhead_max, self.floor_bytes_s = overhead_max, floor_bytes_s
        self.rate: float | None = None
        self.slowdown: float | None = None  # by traffic and captures, at the newest decision
        self.captures = 0.0  # the part of it that captures have
        self.ranks: dict[str, StepTimes] = {}
        self._increases = 0
        self._row_at, self._step_s, self._line = -math.inf, 0.0, 0.0
        self._quiet_rows = 0  # that came about by themselves since the newest hold
        self._hold_turn, self._hold_wanted = -1.0, False
        self._loaded = False  # there was traffic beside a step

    def step(
        self, who: str, kind: Kind, step_s: float, now: float, line_bytes_s: float, *, captured: bool = False
    ) -> bool:
        """A row of a rank's steps, ``step_s`` seconds each; ``captured``: a capture ran beside it. True: the rate was decided
        anew."""
        self._row_at, self._step_s, self._line = now, step_s, line_bytes_s
        self._quiet_rows += kind == "quiet"
        self._loaded |= kind == "loaded"
        self.ranks.setdefault(who, StepTimes()).add(kind, step_s, captured=captured)
        if not self._ripe():
            return False
        found = [rank.slowdown for rank in self.ranks.values() if rank.slowdown is not None]
        self.captures = max(rank.captures for rank in self.ranks.values())
        self.slowdown = max(found) + self.captures
        self._decide(max(found), line_bytes_s)
        return True

    def goes_on(self, now: float) -> None:
        """Training goes on, whatever can be told of its steps."""
        self._row_at = now

    def pause(self) -> None:
        """Training stands still, by its own word, until it goes on."""
        self._row_at = -math.inf

    def forget(self, who: str) -> None:
        self.ranks.pop(who, None)

    @property
    def for_traffic(self) -> float:
        """What traffic may cost."""
        return max((1 - UNSEEN) * self.overhead_max - self.captures, TRAFFIC_MIN * self.overhead_max)

    @property
    def baseline_s(self) -> float | None:
        """The longest of the ranks' median steps without traffic."""
        known = [rank.baseline_s for rank in self.ranks.values()]
        return max((seconds for seconds in known if seconds is not None), default=None)

    def order(self, now: float, wall: float, needed: float) -> Order:
        """What holds now. ``needed``: bytes per second that deadlines ask for. ``wall``: unix time."""
        if not self.ranks or now - self._row_at > max(ROWS_KEPT_S, ROWS_KEPT_STEPS * self._step_s):
            return Order(None, False, NO_STEPS)
        if self.rate is not None and needed > self.rate:
            return Order(needed, False, AT_DEADLINE)
        if self._holds(wall) and needed <= HOLD_NEEDS_MAX * self._line:
            return Order(self.rate, True, HELD)
        if self.rate is None:
            return Order(None, False, MEASURING if self.slowdown is None else WITHIN)
        over = self.slowdown is not None and self.slowdown > self.overhead_max
        return Order(self.rate, False, AT_FLOOR if over and self.rate <= self.floor_bytes_s else PACED)

    def _holds(self, wall: float) -> bool:
        """Is this the time for a look at steps without traffic, and was there none since the one before?"""
        length = hold_s(self._step_s)
        if not length or not self._loaded:
            return False
        parts = HOLD_PARTS if self.baseline_s is not None else HOLD_PARTS_FIRST
        turn, into = divmod(wall, parts * length)
        if turn != self._hold_turn:
            self._hold_turn, self._hold_wanted = turn, self._quiet_rows < HOLD_ROWS
        if into < 2 * length:
            self._quiet_rows = 0  # those of the hold itself do not count
        return self._hold_wanted and into < length

    def _ripe(self) -> bool:
        """Have the ranks whose baseline is known each had enough steps with traffic?"""
        fresh = [rank.fresh for rank in self.ranks.values() if rank.slowdown is not None]
        waiting = [rank.fresh for rank in self.ranks.values() if rank.baseline_s is not None]
        return bool(fresh) and (min(waiting) >= EVIDENCE_ROWS_MIN or max(fresh) >= WAIT_ROWS_MAX)

    def _decide(self, slowdown: float, line_bytes_s: float) -> None:
        for rank in self.ranks.values():
            rank.fresh = 0
        if slowdown > TOO_MUCH * self.for_traffic:
            self._slower(slowdown, line_bytes_s)
        elif self.rate is not None and slowdown < ENOUGH * self.for_traffic:
            faster = min(FASTER_MAX, 2 ** (self._increases // FASTER_EVERY))
            self._increases += 1
            grown = self.rate + line_bytes_s * INCREASE * faster
            self.rate = max(self.floor_bytes_s, min(grown, CEILING * line_bytes_s))

    def _slower(self, slowdown: float, line_bytes_s: float) -> None:
        self._increases = 0
        begin = self.rate if self.rate is not None else line_bytes_s
        factor = max(DECREASE_MOST, min(DECREASE, 2 * self.for_traffic / slowdown))
        self.rate = max(self.floor_bytes_s, begin * factor)
        for rank in self.ranks.values():
            rank.forget_loaded()


def hold_s(step_s: float) -> float:
    """How long traffic is held back for a look at steps without it; 0: steps are too long for that."""
    wanted = HOLD_ROWS * max(step_s, ROW_S_MIN)
    length = max(HOLD_S_MIN, float(2 ** math.ceil(math.log2(wanted))))
    return length if length <= HOLD_S_MAX else 0.0
