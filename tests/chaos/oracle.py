"""What must be restored, from the trainers' own records alone (P1, P2, P3).

It knows which state each start of the job (*generation*) made at each step, by digests of its own, what levels the ranks were
told, and which failure domains were lost since. It knows nothing of the protocol. A snapshot is (generation, step).

What is due: a snapshot that was told at level L, through its handle or as the answer of wait(), survives the loss of any L domains,
so after the loss of n distinct ones it is due while L - n >= 0; one that was told durable is due for ever. A restore must give the
newest of the lineage that is due, or a newer one, every part with the digest that its maker wrote down.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.state import EVERYTHING

Made = tuple[int, int]  # generation, step
RECENT_MAX = 500  # lines kept for the message of a failure
NO_DAEMON = "no daemon"  # the mode of a restore with allow_fresh=True that none answered
DEGRADED = re.compile(r"protected (\d+)/\d+, degraded")


class Broken(AssertionError):
    """A promise is broken."""


@dataclass
class Told:
    """What ranks were told of one snapshot: the highest level, and the domains lost since that was first told."""

    level: int
    lost: set[str] = field(default_factory=set)
    durable: bool = False

    @property
    def left(self) -> int:
        """Losses that memory still survives; below 0: nothing is owed from there."""
        return self.level - len(self.lost)

    @property
    def due(self) -> bool:
        return self.durable or self.left >= 0


@dataclass
class Verdict:
    """Of one restore. ``owed``: the newest snapshot that was due; None: nothing was."""

    restored: Made | None
    owed: Made | None
    newest_made: int  # step that all ranks of the last generation had made
    took_s: float
    error: str = ""

    @property
    def gap(self) -> int:
        """Steps of training that are lost."""
        return self.newest_made - (self.restored[1] if self.restored is not None else 0)


class Oracle:
    """``tolerates``: how many domains may be lost at once by the policy of the job."""

    def __init__(self, tolerates: int) -> None:
        self.tolerates = tolerates
        self.worlds: dict[int, int] = {}
        self.parents: dict[int, Made | None] = {}  # of generations that restored on some rank
        self.apart: set[int] = set()  # of these no daemon was told when they began: they take effect with their first snapshot
        self.made: dict[Made, dict[str, str]] = {}
        self.makers: dict[Made, set[int]] = {}
        self.skipped: set[Made] = set()
        self.told: dict[Made, Told] = {}
        self.told_to: set[tuple[Made, int]] = set()  # which rank has been told a level of it
        self.outcomes: dict[
            int, dict[int, dict[str, Any]]
        ] = {}  # generation -> rank -> how its restore ended
        self.recent: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=RECENT_MAX)
        self.slowest_s = 0.0
        self.acknowledged = 0

    # --- what happened ------------------------------------------------------------------------------------------
    def started(self, generation: int, world: int) -> None:
        self.worlds[generation] = world
        self.outcomes[generation] = {}

    def lost(self, domains: set[str]) -> None:
        for told in self.told.values():
            told.lost |= domains

    def heard(self, generation: int, rank: int, fact: dict[str, Any], lost: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """One line of a rank's record. ``lost``: domains that may have been lost before it was written: it may not know."""
        kind = fact["k"]
        self.recent.append(
            (generation, rank, {name: value for name, value in fact.items() if name != "digests"})
        )
        if kind in ("restored", "refused"):
            self.outcomes[generation][rank] = fact
            if kind == "restored" and fact.get("mode") == NO_DAEMON:
                self.apart.add(generation)
            elif kind == "restored":
                self.parents[generation] = (
                    None if fact["step"] is None else (fact["made"][0], fact["made"][1])
                )
        elif kind == "made":
            self._made((generation, fact["step"]), rank, fact["digests"])
        elif kind == "called" and fact["status"].startswith(("skipped", "failed")):
            self._skipped((generation, fact["step"]))
        elif kind == "waiting":  # what had been skipped is taken now
            self.skipped.discard((generation, fact["step"]))
        elif kind == "level":
            self._told((generation, fact["step"]), rank, fact, lost)
        elif kind == "waited":
            self._waited((generation, fact["step"]), fact["status"], lost)
        elif kind == "slow":
            self.slowest_s = max(self.slowest_s, fact["took"])

    def _made(self, made: Made, rank: int, digests: dict[str, str]) -> None:
        known = self.made.setdefault(made, {})
        for part, digest in digests.items():
            if known.setdefault(part, digest) != digest:
                raise AssertionError(f"the harness itself: ranks made different {part} of {made}")
        self.makers.setdefault(made, set()).add(rank)

    def _skipped(self, made: Made) -> None:
        """Each rank's own word; others may have captured it, but the snapshot can never be whole."""
        if made in self.told:
            raise Broken(f"P2 {made} was told at level {self.told[made].level}, but a rank skipped it")
        self.skipped.add(made)

    def _told(self, made: Made, rank: int, fact: dict[str, Any], lost: set[str]) -> None:
        """A step may be captured twice, when a rank that waits asks again, and a rank may write the end of the first try down after
        another has that of the second: what is void after a level is what the same rank was told so."""
        known = self.told.get(made)
        if fact["void"]:
            if known is not None and not known.lost and (made, rank) in self.told_to:
                raise Broken(
                    f"P2 {made} was told at level {known.level}, then void ({fact['void']}) without any loss"
                )
            return
        if fact["level"] < 0 and not fact["durable"]:
            return
        self._promised(made, fact["level"], fact["durable"], lost)
        self.told_to.add((made, rank))

    def _promised(self, made: Made, level: int, durable: bool, lost: set[str]) -> None:
        known = self.told.get(made)
        if made in self.skipped:
            raise Broken(f"P2 {made} is told at level {level}, but a rank skipped it")
        if len(self.makers.get(made, ())) < self.worlds[made[0]]:
            raise Broken(f"P2 {made} is told at level {level}, but not every rank has come to it")
        if made[0] in self.apart:
            self.parents.setdefault(made[0], None)
        if known is None or level - len(lost) >= known.left:
            self.acknowledged += known is None
            self.told[made] = Told(level, set(lost), known is not None and known.durable)
        self.told[made].durable |= durable

    def _waited(self, made: Made, status: str, lost: set[str]) -> None:
        """P2: what wait() answers binds as a level does. The rank does not count as told: what it writes down of the handle after
        this may be of a first try, which was void."""
        degraded = DEGRADED.fullmatch(status)
        if status == "durable":
            self._promised(made, -1, True, lost)
        elif status == "protected":  # at what the policy wants, as far as the domains of this start can give it
            self._promised(made, min(self.tolerates, self.worlds[made[0]] - 1), False, lost)
        elif status == "sealed" or degraded:
            self._promised(made, int(degraded[1]) if degraded else 0, False, lost)

    # --- what is due --------------------------------------------------------------------------------------------
    def head(self, before: int) -> int | None:
        """The newest generation before this one that took effect: some rank had restored."""
        return max((g for g in self.parents if g < before), default=None)

    def lineage(self, head: int | None) -> list[tuple[int, int | None]]:
        """(generation, its newest step that belongs to the lineage; None: all), newest generation first."""
        found: list[tuple[int, int | None]] = []
        at, upto = head, None
        while at is not None:
            found.append((at, upto))
            parent = self.parents.get(at)
            at, upto = (None, None) if parent is None else parent
        return found

    def belongs(self, made: Made, head: int | None) -> bool:
        return any(made[0] == g and (upto is None or made[1] <= upto) for g, upto in self.lineage(head))

    def owed(self, before: int) -> Made | None:
        """The newest snapshot that a restore of generation ``before`` must find, or one newer than it."""
        head = self.head(before)
        due = [made for made, told in self.told.items() if told.due and self.belongs(made, head)]
        return max(due, key=lambda made: made[::-1], default=None)

    def may_begin_anew(self, before: int) -> bool:
        """Nothing is owed, or a start that no daemon was told of may have left it behind meanwhile, in the background."""
        head = self.head(before) or 0
        return self.owed(before) is None or any(head < generation < before for generation in self.apart)

    def newest_made(self, before: int) -> int:
        head = self.head(before)
        complete = [
            m for m, makers in self.makers.items() if m[0] == head and len(makers) == self.worlds[m[0]]
        ]
        return max((step for _, step in complete), default=0)

    def level_of(self, generation: int) -> int:
        """The highest level that any rank of this start was told."""
        return max((told.level for made, told in self.told.items() if made[0] == generation), default=-1)

    # --- judging ------------------------------------------------------------------------------------------------
    def done(self, generation: int) -> bool:
        return len(self.outcomes[generation]) == self.worlds[generation]

    def judge(self, generation: int, *, crashes: bool = False) -> Verdict:
        """Raises Broken for whatever must not be; a refusal or a fresh start although something was owed is ``error``.
        ``crashes``: daemons may have died in its last moment: then some ranks heard that all is well, and others cannot."""
        outcomes = self.outcomes[generation]
        kinds = {outcome["k"] for outcome in outcomes.values()}
        took = max(outcome["took"] for outcome in outcomes.values())
        verdict = Verdict(None, self.owed(generation), self.newest_made(generation), took)
        if kinds == {"restored", "refused"} and crashes:
            verdict.error = "refused on some ranks: their daemon died"
            return verdict
        if kinds == {"restored", "refused"}:
            raise Broken(f"D11 some ranks of start {generation} restored and others did not: {outcomes}")
        if kinds == {"refused"}:
            verdict.error = "" if self.may_begin_anew(generation) else f"refused: {outcomes[0]['error']}"
            return verdict
        found = {(outcome["step"], *outcome["made"]) for outcome in outcomes.values()}
        if len(found) != 1:
            raise Broken(f"P1 ranks of start {generation} restored different snapshots: {found}")
        step, *made = found.pop()
        if step is None:
            verdict.error = "" if self.may_begin_anew(generation) else "a fresh start"
            return verdict
        verdict.restored = (made[0], made[1])
        self._whole(generation, step, verdict.restored)
        if verdict.owed is not None and verdict.owed[::-1] > verdict.restored[::-1]:
            verdict.error = f"{verdict.restored} was restored"
        return verdict

    def _whole(self, generation: int, step: int, made: Made) -> None:
        """P1: one snapshot that was captured, of the lineage, every part bit by bit."""
        if step != made[1]:
            raise Broken(f"P1 start {generation} was told step {step}, and its state is of {made}")
        if made in self.skipped or made not in self.made:
            raise Broken(f"P1 start {generation} restored {made}, which was not captured")
        if not self.belongs(made, self.head(generation)):
            lineage = self.lineage(self.head(generation))
            before = {g: outcomes for g, outcomes in self.outcomes.items() if made[0] <= g < generation}
            raise Broken(f"P1 start {generation} restored {made}, which is not of its lineage {lineage}; outcomes: {before}")
        restored: dict[str, str] = {}
        for outcome in self.outcomes[generation].values():
            restored |= outcome["digests"]
            wrong = [
                part for part, digest in outcome["digests"].items() if self.made[made].get(part) != digest
            ]
            if wrong:
                raise Broken(f"P1 start {generation} restored other bytes than {made} had in {wrong}")
        if restored.keys() != EVERYTHING:
            raise Broken(f"P1 start {generation} restored no {sorted(EVERYTHING - restored.keys())}")
