"""What is wrong now, since when, how often; and plain facts. ``ok`` is what a load balancer or a person asks first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptd.observe.report import HealthReport, ProblemReport
from ckptd.observe.sight import ALL, Sight

EVENT_TTL_S = 600.0  # a thing that happened once (a quarantine) stays visible this long
PROBLEMS_MAX = 256  # kept at once; the oldest go first


@dataclass(frozen=True, slots=True)
class Problem:
    """``first``/``last``: unix times it was reported; ``until``: when it goes by itself (None: when cleared)."""

    kind: str
    text: str
    job: str
    first: float
    last: float
    count: int = 1
    serious: bool = True  # False: visible, but the node still counts as healthy
    until: float | None = None

    def report(self) -> ProblemReport:
        return {
            "kind": self.kind,
            "text": self.text,
            "job": self.job,
            "first": self.first,
            "last": self.last,
            "count": self.count,
            "serious": self.serious,
        }


class Health:
    """Problems by (kind, job, which). Used from the daemon's event loop only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._problems: dict[tuple[str, str, str], Problem] = {}
        self.facts: dict[str, object] = {}

    def report(self, kind: str, text: str, *, job: str = "", which: str = "", serious: bool = True) -> bool:
        """A condition that holds until ``clear``; ``which`` tells two of one kind apart. True: it is new."""
        return self._put(kind, text, job, which, serious, None)

    def event(
        self, kind: str, text: str, *, job: str = "", which: str = "", serious: bool = True, ttl_s: float = EVENT_TTL_S
    ) -> bool:
        """Something that happened; it is shown for ``ttl_s`` seconds after its last time. True: it is new."""
        return self._put(kind, text, job, which, serious, self._clock() + ttl_s)

    def clear(self, kind: str, *, job: str = "", which: str = "") -> bool:
        """The condition does not hold any more. True: it had been there."""
        return self._problems.pop((kind, job, which), None) is not None

    def has(self, kind: str, *, job: str = "") -> bool:
        """Does a condition of this kind hold now, for any ``which``?"""
        self._expire()
        return any(key[:2] == (kind, job) for key in self._problems)

    def forget(self, job: str) -> None:
        """The job is gone, and what was wrong with it."""
        self._problems = {key: value for key, value in self._problems.items() if key[1] != job}

    def problems(self, sight: Sight = ALL) -> list[Problem]:
        """Serious ones first, then newest first."""
        self._expire()
        seen = [p for p in self._problems.values() if sight.sees(p.job)]
        return sorted(seen, key=lambda p: (not p.serious, -p.last))

    @property
    def ok(self) -> bool:
        return self.seems_ok(ALL)

    def seems_ok(self, sight: Sight) -> bool:
        return not any(p.serious for p in self.problems(sight))

    def to_dict(self, sight: Sight = ALL, facts: Mapping[str, object] | None = None) -> HealthReport:
        """For /healthz, /status and wire.rank.Health."""
        problems = [p.report() for p in self.problems(sight)]
        return {"ok": self.seems_ok(sight), "problems": problems, "facts": {**self.facts, **(facts or {})}}

    def _put(self, kind: str, text: str, job: str, which: str, serious: bool, until: float | None) -> bool:
        now, key = self._clock(), (kind, job, which)
        old = self._problems.pop(key, None)
        if old is None:
            self._problems[key] = Problem(kind, text, job, now, now, 1, serious, until)
            self._shrink()
            return True
        self._problems[key] = replace(
            old, text=text, last=now, count=old.count + 1, serious=serious, until=until
        )
        return False

    def _shrink(self) -> None:
        while len(self._problems) > PROBLEMS_MAX:
            self._problems.pop(next(iter(self._problems)))

    def _expire(self) -> None:
        now = self._clock()
        gone = [key for key, p in self._problems.items() if p.until is not None and p.until <= now]
        for key in gone:
            del self._problems[key]
