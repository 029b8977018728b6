"""How far protection goes down when there is no memory for more, and up again (P8): a state of the job, with hysteresis.

fewer copies -> parity -> local only; the last level, skipping snapshots, is taken by whoever has no slot for one. A level is
left downward when some node has been short of memory on it for ``DOWN_S``; upward it is tried after ``UP_S`` without
shortage, and a try that fails doubles the wait before the next one. A try has held when a snapshot got all that its level wants, be
it one that was there before; while nothing is made, nothing is proven.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas

DOWN_S = 5.0
UP_S = 60.0
UP_MAX_S = 1800.0
PARITY_GROUP_MAX = 8  # nodes that share parity, where the policy itself names no group


def levels(policy: Redundancy, nodes: Collection[NodeInfo]) -> tuple[Redundancy, ...]:
    """From what is wanted down to local only; each takes less memory of others than the one before."""
    domains = len({node.domain for node in nodes})
    found: list[Redundancy] = [policy]
    if isinstance(policy, Replicas):
        found += [Replicas(copies) for copies in range(policy.copies - 1, 0, -1)]
        if policy.copies and domains > 2:  # of two, parity is a copy
            found.append(Parity(min(domains, PARITY_GROUP_MAX) - 1, 1))
    if policy.tolerates:
        found.append(Replicas(0))
    return tuple(found)


class Degradation:
    """``now`` is whatever clock its caller has, in seconds."""

    def __init__(self, steps: tuple[Redundancy, ...], now: float) -> None:
        assert steps, "there is always the wanted level"
        self.levels, self.at = steps, 0
        self._short_since: float | None = None
        self._changed_at = self._shortage_at = now
        self._patience = UP_S
        self.trying = self._proven = False  # the newest change was upward, and is not believed yet; a snapshot had all of it

    @property
    def redundancy(self) -> Redundancy:
        return self.levels[self.at]

    def held(self) -> None:
        """A snapshot got in this level's time what the level wants."""
        self._proven = True

    def look(self, short: bool, now: float) -> bool:
        """Is any node short of memory now? True when the level changed."""
        if not short:
            self._short_since = None
            return self._maybe_up(now)
        self._shortage_at = now
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since < DOWN_S or self.at == len(self.levels) - 1:
            return False
        if self.trying:
            self._patience = min(2 * self._patience, UP_MAX_S)
        self._move(self.at + 1, now)
        self.trying = False
        return True

    def _maybe_up(self, now: float) -> bool:
        if now - max(self._changed_at, self._shortage_at) < self._patience:
            return False
        if self.trying:
            if not self._proven:
                return False
            self._patience, self.trying = UP_S, False
        if self.at == 0:
            return False
        self._move(self.at - 1, now)
        self.trying = True
        return True

    def _move(self, to: int, now: float) -> None:
        self.at, self._changed_at, self._short_since, self._proven = to, now, None, False
