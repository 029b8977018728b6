"""What snapshot() returns: a handle whose status is a fact at the moment it is read (P2)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptd.wire.rank import Level

HANDLES_KEPT_MAX = 256
STEP_MAX = 1 << 53  # what JSON holds exactly
LEVELS = ("sealed", "protected", "durable")
RELEASED = "released: a newer snapshot took its place"
NOT_SAVED = "not saved"  # begins the reason of a rank that will not take part in this step, however often it is tried
BEHIND = "granted behind one that is void"  # begins a reason that is another step's


def describe(told: Level) -> str:
    """One line about a snapshot: "sealed", "protected", "protected 1/2, degraded", "durable", "void: ..."."""
    if told.void:
        return f"void: {told.void}"
    if told.durable:
        return "durable"
    if told.level < 0:
        return "captured"
    if told.wanted and told.level >= told.wanted:
        return "protected"
    return f"protected {told.level}/{told.wanted}, degraded" if told.level else "sealed"


def given_up(status: str) -> bool:
    """Is it of no use to try this step once more? What was granted behind one that some rank gave up is void with it, and was
    given up by nobody."""
    return NOT_SAVED in status and not status.startswith(f"void: {BEHIND}")


def reached(told: Level | None, level: str, attainable: int) -> bool:
    """``attainable``: the highest protection this job's failure domains allow."""
    if told is None or told.void:
        return False
    if told.durable:
        return True
    if level == "sealed":
        return told.level >= 0
    return level == "protected" and told.level >= max(0, min(told.wanted, attainable))


class Skip(Exception):
    """This snapshot will not be taken; the reason."""


class Thawed(Skip):
    """What was called frozen is not: from now on it is captured with everything else, by another plan."""


class Outgrown(Skip):
    """The slot that was granted is too small for the state; a larger one has been asked for."""


@dataclass(eq=False)
class Handle:
    """``status``: capturing, captured, sealed, protected, durable; "released: ..." when a newer one has its memory; "unreachable:
    ..." with the last level but durable while the daemon is away; or "skipped: ...", "void: ...", "failed: ..."."""

    step: int
    _status: str
    _wait: Callable[[Handle, str, float | None], str]
    grant: int = 0  # under which it was captured
    slot: int = -1  # into which
    away: Callable[[], bool] = lambda: False  # has the daemon been away for long?
    released: bool = False  # its slot is another snapshot's now
    _told: Level | None = None
    _best: int = -1  # highest level so far
    _later: Handle | None = None  # of the same step, captured by a wait after this one was void

    @property
    def status(self) -> str:
        if self._later is not None:
            return self._later.status
        told = self._told
        if told is None or told.void or told.durable or told.level < 0:
            return self._status if told is None else describe(told)
        if self.released:
            return RELEASED
        degraded = f"protected 0/{told.wanted}, degraded" if told.level == 0 < self._best else ""
        text = degraded or describe(told)
        return f"unreachable: {text}, as far as the daemon had said" if self.away() else text

    @property
    def fact(self) -> Level | None:
        """The daemon's newest word about it."""
        return self._told if self._later is None else self._later.fact

    @property
    def taken(self) -> bool:
        """False once it is clear that this snapshot will not exist."""
        return not self.status.startswith(("skipped", "failed", "void"))

    def wait(self, level: str = "protected", timeout: float | None = None) -> str:
        """Wait until the level is reached, and return the status then or at the timeout (seconds). ValueError: no such
        level."""
        return self._wait(self._later or self, level, timeout)

    def became(self, status: str) -> None:
        self._status = status

    def goes_on_as(self, later: Handle) -> None:
        """From now on this one tells what becomes of ``later``, of the same step."""
        assert later.step == self.step, "a handle is of one step"
        self._later = later

    def told(self, level: Level) -> None:
        self._best = max(self._best, level.level)
        self._told = level

    def __repr__(self) -> str:
        return f"<snapshot {self.step}: {self.status}>"


class Handles:
    """Those of captured steps of this epoch, the newest of which are told what becomes of them. The session locks."""

    def __init__(self) -> None:
        self._by_step: dict[int, Handle] = {}

    def follow(self, handle: Handle) -> None:
        self._by_step[handle.step] = handle
        while len(self._by_step) > HANDLES_KEPT_MAX:
            del self._by_step[min(self._by_step)]

    def of(self, step: int) -> Handle | None:
        return self._by_step.get(step)

    def granted(self, slot: int, grant: int) -> None:
        """What lay in that slot is gone, unless it is durable: a daemon frees none before there is something newer."""
        newest = self._newest()
        for handle in self._by_step.values():
            handle.released |= handle.slot == slot and handle.grant != grant and handle.step < newest

    def hear(self, handle: Handle, message: Level) -> bool:
        """Is this about what the handle is of, and news?"""
        if handle.grant != message.grant or not handle.taken:
            # Another rank here has taken that step under another grant, or we had; or why it will not be has been said, and who is
            # asked later knows only that nobody holds it.
            return False
        if message.void and reached(handle.fact, "sealed", 0) and handle.step < self._newest():
            handle.released = True  # nor does a daemon that began anew since know that it was there
            return False
        handle.told(message)
        return True

    def _newest(self) -> int:
        return max((step for step, handle in self._by_step.items() if reached(handle.fact, "sealed", 0)), default=-1)

    def clear(self) -> None:
        self._by_step.clear()


def step_of(step: Any) -> int:
    """Raises TypeError, ValueError."""
    number = operator.index(step)
    if not 0 <= number <= STEP_MAX:
        raise ValueError(f"a step is 0 to 2^53, not {number}")
    return number


def newest_of(levels: Mapping[int, Level]) -> dict[str, int]:
    """The newest step that is sealed, protected, durable; -1: none is."""
    newest = dict.fromkeys(("sealed", "protected", "durable"), -1)
    for step, told in sorted(levels.items()):
        if not told.void:
            newest["sealed"] = step if told.level >= 0 else newest["sealed"]
            newest["protected"] = step if told.level >= max(1, told.wanted) else newest["protected"]
            newest["durable"] = step if told.durable else newest["durable"]
    return newest
