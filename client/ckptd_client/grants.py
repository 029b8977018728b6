"""Grants at hand: which snapshots this rank may take (design D9). Values and decisions only; the session locks."""

from __future__ import annotations

import math
from dataclasses import dataclass

STANDS_S = 1.0


@dataclass(frozen=True)
class Grant:
    slot: int
    number: int
    from_step: int
    came_at: int = -1  # newest step called when it came


class Grants:
    def __init__(self) -> None:
        self._untaken: list[Grant] = []
        self._overdue: set[int] = set()
        self.newest = 0  # that ever came
        self._taken, self._taken_at = -1, -1  # the newest grant that was taken, and for which step
        self._again, self._known = -1, 0  # the step whose grant was given up for another one, and the newest grant then
        self._later_since = math.inf  # there is one that came since, for a later step
        self._refused, self._why = -1, ""  # the step that this rank will deliver under no grant

    def __len__(self) -> int:
        return len(self._untaken)

    @property
    def overdue(self) -> bool:
        return bool(self._overdue)

    def arrive(self, grant: Grant, called: int, passed: int) -> bool:
        """False: too late, the first step >= from_step that no earlier grant took is over here, and every rank must take that.

        ``called``: newest step of a snapshot(); ``passed``: newest that no grant took and whose state is gone. Between the two
        there may be one step that can yet be taken under this grant, but no later one.
        """
        self.newest = max(self.newest, grant.number)
        if grant.from_step <= (passed if grant.number > self._taken else called):
            return False
        if grant.from_step <= called and not self.took(called):
            self._overdue.add(grant.number)
        self._untaken.append(grant)
        self._untaken.sort(key=lambda g: g.number)
        return True

    def expire(self) -> list[int]:
        """The step called last is over: the numbers of grants that were for it alone."""
        gone = sorted(self._overdue)
        for number in gone:
            self.take_back(number)
        return gone

    def later_than(self, step: int) -> int | None:
        """The first step that the next grant is good for, where that lies beyond ``step``."""
        return min((grant.from_step for grant in self._untaken if grant.from_step > step), default=None)

    def take(self, step: int) -> Grant | None:
        """The earliest grant for this step, now taken."""
        for index, grant in enumerate(self._untaken):
            if grant.from_step <= step:
                self._overdue.clear()  # The others are for the next step now.
                self._taken, self._taken_at = grant.number, step
                return self._untaken.pop(index)
        return None

    @property
    def taken(self) -> tuple[int, int]:
        """The newest grant that was taken, and for which step; -1: that is to be said anew."""
        return self._taken, self._taken_at

    def took(self, step: int) -> bool:
        """Did a grant take this step, the newest of which that can be said?"""
        return 0 <= step == self._taken_at

    def void(self, number: int) -> None:
        """What was captured under this grant is void."""
        if number == self._taken:
            self._taken_at = -1

    def give_up(self, number: int, step: int) -> None:
        """The grant that was taken, as this step is to be taken under another one."""
        self.void(number)
        self._again, self._known, self._later_since = step, self.newest, math.inf

    def passed_over(self, step: int, now: float) -> bool:
        """Was this step's grant given up, and what came since is for later ones? Then the other ranks had taken it and went on, and
        wait for this one, or soon will. A grant that was on its way when that one was given up is taken back within STANDS_S."""
        later = step == self._again and any(g.number > self._known and g.from_step > step for g in self._untaken)
        self._later_since = min(self._later_since, now) if later else math.inf
        return now - self._later_since >= STANDS_S

    def refuse(self, step: int, why: str) -> Grant | None:
        """This rank delivers nothing of this step; its grant, if that is here already. ``refusal`` tells of those that come."""
        self._refused, self._why = step, why
        return self.take(step)

    def refusal(self, grant: Grant) -> str:
        """Why this rank will not deliver under it. "": it may."""
        return self._why if self.refuses(grant.from_step) else ""

    def refuses(self, step: int) -> bool:
        return step <= self._refused

    def take_back(self, number: int) -> bool:
        """True: it was here, untaken."""
        before = len(self._untaken)
        self._untaken = [grant for grant in self._untaken if grant.number != number]
        self._overdue.discard(number)
        return len(self._untaken) < before

    def clear(self) -> list[int]:
        """The numbers of those that were here, untaken."""
        gone = [grant.number for grant in self._untaken]
        self._untaken.clear()
        self._overdue.clear()
        self._taken = self._taken_at = -1
        return gone
