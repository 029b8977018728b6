"""What a restore does without: copies and parity sets that were found damaged or gone, and those that could not be reached for
now."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.core.redundancy.parity_sets import ParitySet
from ckptd.protect.fetched import Fetched

Copy = tuple[str, int]  # (node, rank)


@dataclass
class LeftOut:
    """``hopeful`` below: as if who could not be reached were back."""

    lost: set[Copy] = field(default_factory=set)
    away: dict[Copy, str] = field(default_factory=dict)  # why
    lost_sets: set[ParitySet] = field(default_factory=set)  # what they brought did not match
    away_sets: dict[ParitySet, str] = field(default_factory=dict)
    ever_away: bool = False

    def note(self, node: str, rank: int, found: Fetched) -> None:
        """This copy was asked for, and did not come."""
        if found.away:
            self.ever_away = True
            self.away[node, rank] = f"{node}: {found.reason}"
        else:
            self.lost.add((node, rank))

    def copies(self, *, hopeful: bool = False) -> frozenset[Copy]:
        return frozenset(self.lost if hopeful else self.lost | self.away.keys())

    def parity_sets(self, *, hopeful: bool = False) -> frozenset[ParitySet]:
        return frozenset(self.lost_sets if hopeful else self.lost_sets | self.away_sets.keys())

    def reasons(self) -> list[str]:
        return sorted({*self.away.values(), *self.away_sets.values()})

    def ask_again(self) -> None:
        """Who could not be reached may be back."""
        self.away.clear()
        self.away_sets.clear()
