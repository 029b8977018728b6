"""How far ahead of the ranks to grant: measured in the steps they make while a grant is on its way (design D9, P14).

Too small, and a grant comes too late somewhere and is void everywhere; too large, and slots lie idle until its step comes.
"""

from __future__ import annotations

from collections import deque

GRANTS_SEEN = 16  # newest ones by which the next are measured
CYCLE_STEPS = 4  # that a slot is away in any case; what a void grant costs


class Margin:
    """``steps``: how many steps beyond the next one to grant; never more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._needs: deque[int] = deque(maxlen=GRANTS_SEEN)
        self.steps = 0

    def clear(self) -> None:
        self._needs.clear()
        self.steps = 0

    def saw(self, need: int) -> None:
        """A grant would have been in time on all ranks with this margin."""
        self._needs.append(max(0, need))
        floor = self._floor()
        self.steps = min(min(sorted(n for n in self._needs if n >= floor), key=self._cost), self._most)

    def _floor(self) -> int:
        """Half of the grants are in time, and two late ones in a row are believed: it never stays too small (P14)."""
        inner = sorted(self._needs)
        last = list(self._needs)[-2:]
        return max(inner[len(inner) // 2], min(last))

    def _cost(self, steps: int) -> float:
        """Steps for each grant that is in time, had this always been the margin."""
        in_time = sum(1 for need in self._needs if need <= steps)
        return (CYCLE_STEPS + steps) / in_time
