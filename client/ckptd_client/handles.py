"""What snapshot() returns: a handle whose status is a fact at the moment it is read (P2)."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.wire.rank import AskHealth, Level, WaitFor

if TYPE_CHECKING:
    from ckptd_client.link import Link

HANDLES_KEPT_MAX = 256
SILENT_AFTER_S = 15.0  # a daemon that answers no question, or is away, for this long is not waited for
ASK_EVERY_S = 2.0  # a daemon that says nothing is asked for a word, and in a wait for what is waited for
STEP_MAX = 1 << 53  # what JSON holds exactly
LEVELS = ("sealed", "protected", "durable")
ASKED_AT_ONCE = 16  # as many as the daemon remembers
HELD = ("captured", "sealed", "protected")  # begin what is said of snapshots that are in memory alone
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
    ..." and "superseded: ..." with the last level but durable while the daemon is away or silent, and when its epoch is over; or
    "skipped: ...", "void: ...", "failed: ..."."""

    step: int
    _status: str
    _wait: Callable[[Handle, str, float | None], str]
    grant: int = 0  # under which it was captured
    slot: int = -1  # into which
    away: Callable[[Handle], bool] = lambda handle: False  # has the daemon been away for long, or not said what it knows of this?
    released: bool = False  # its slot is another snapshot's now
    left: bool = False  # its epoch is over
    _told: Level | None = None
    best: int = -1  # highest level so far: what was sealed once and is nowhere was released, or lost
    _later: Handle | None = None  # of the same step, captured by a wait after this one was void

    @property
    def status(self) -> str:
        if self._later is not None:
            return self._later.status
        told, text = self._told, self._status
        if told is not None:
            fell = told.level == 0 < self.best and not (told.void or told.durable)
            text = f"protected 0/{told.wanted}, degraded" if fell else describe(told)
        if not text.startswith(HELD):
            return text
        if self.released:
            return RELEASED
        why = "superseded" if self.left else "unreachable" if self.away(self) else ""
        return f"{why}: {text}, as far as the daemon had said" if why else text

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

    @property
    def is_over(self) -> bool:
        """Nothing more is said of it."""
        told = self._told
        if told is not None and (told.void or told.durable):
            return True
        return self.released or self.left or not self._status.startswith(("capturing", *HELD))

    def became(self, status: str) -> None:
        self._status = status

    def goes_on_as(self, later: Handle) -> None:
        """From now on this one tells what becomes of ``later``, of the same step."""
        assert later.step == self.step, "a handle is of one step"
        self._later = later

    def told(self, level: Level) -> None:
        self.best = max(self.best, 0 if level.durable else level.level)
        self._told = level

    def __repr__(self) -> str:
        return f"<snapshot {self.step}: {self.status}>"


class Handles:
    """Those of captured steps of this epoch, the newest of which are told what becomes of them. The session locks."""

    def __init__(self) -> None:
        self._by_step: dict[int, Handle] = {}
        self._doubted: dict[int, Handle] = {}  # by step: those of which the daemon that is here now has said nothing yet
        self._back_at = self._asked_at = 0.0  # since when that one is here; when it was asked of them

    def doubt(self) -> None:
        """The daemon was away: what became of those that are not durable it may not know, or not say by itself."""
        self._back_at = time.monotonic()
        open_ = {step: handle for step, handle in self._by_step.items() if handle.taken and handle.grant}
        self._doubted = {step: handle for step, handle in open_.items() if handle.fact is None or not handle.fact.durable}

    def ask(self, link: Link) -> None:
        """What became of them, each ASK_EVERY_S until it says so."""
        now = time.monotonic()
        if self._doubted and now - self._asked_at > ASK_EVERY_S:
            self._asked_at = now
            for step in [*self._doubted][:ASKED_AT_ONCE]:
                handle = self._doubted[step] = self._doubted.pop(step)  # the others first, next time
                link.send_or_drop(WaitFor(step, handle.grant, "sealed"))

    def is_unsure(self, handle: Handle, link: Link, lost_at: float) -> bool:
        """Have the daemon's words of this one been no facts for longer than a daemon takes to start again? One that says nothing is
        asked for a word."""
        now = time.monotonic()
        if link.up and now - link.heard_at > ASK_EVERY_S and not link.quiet_s:
            link.send_or_drop(AskHealth(0))
        self.ask(link)
        unsaid_since = self._back_at if self._doubted.get(handle.step) is handle else now
        return now - min(lost_at or now, unsaid_since, now - link.quiet_s) > SILENT_AFTER_S

    def follow(self, handle: Handle) -> None:
        """Of more than so many the oldest are told nothing more, those last of which there is still something to say (P2)."""
        self._by_step[handle.step] = handle
        while len(self._by_step) > HANDLES_KEPT_MAX:
            del self._by_step[min(self._by_step, key=lambda step: (not self._by_step[step].is_over, step))]

    def of(self, step: int) -> Handle | None:
        return self._by_step.get(step)

    def granted(self, slot: int, grant: int) -> None:
        """What lay in that slot is gone, unless it is durable: a daemon frees none before there is something newer."""
        newest = self._newest()
        for handle in self._by_step.values():
            handle.released |= handle.slot == slot and handle.grant != grant and handle.step < newest

    def hear(self, handle: Handle, message: Level) -> bool:
        """Is this about what the handle is of, and news?"""
        if handle.grant == message.grant:
            self._doubted.pop(message.step, None)
        if handle.grant != message.grant or not handle.taken:
            # Another rank here has taken that step under another grant, or we had; or why it will not be has been said, and who is
            # asked later knows only that nobody holds it.
            return False
        sealed, newest = handle.best >= 0, self._newest()
        if message.void and sealed and handle.step >= newest and self._open_after(handle):
            self._doubted[handle.step] = handle  # it may have made room for one of which nothing has been heard yet
            return False
        if message.void == RELEASED or (message.void and sealed and handle.step < newest):
            handle.released = True  # nor does a daemon that began anew since know that it was there
            return False
        handle.told(message)
        return True

    def _open_after(self, handle: Handle) -> bool:
        """Is there a newer one of which nobody has said yet what becomes of it?"""
        later = (other for step, other in self._by_step.items() if step > handle.step)
        return any(other.taken and other.best < 0 for other in later)

    def _newest(self) -> int:
        return max((step for step, handle in self._by_step.items() if handle.best >= 0), default=-1)

    def clear(self) -> None:
        """Nobody is told any more what becomes of them."""
        for handle in self._by_step.values():
            handle.left = True
        self._by_step.clear()
        self._doubted.clear()


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
