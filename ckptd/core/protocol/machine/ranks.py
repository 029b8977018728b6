"""The local ranks of the running epoch: how far each is and whether it is still there."""

from __future__ import annotations

from dataclasses import dataclass

FINISHED, CLEAN, DIED = "finished", "clean", "died"
SAID_GOODBYE = (FINISHED, CLEAN)  # the first without an exception


@dataclass
class Rank:
    rank: int
    step: int = -1  # newest step for which snapshot() was called
    asks: int | None = None
    left: str = ""  # FINISHED, CLEAN or DIED


class Ranks:
    def __init__(self) -> None:
        self.here: dict[int, Rank] = {}

    def attach(self, rank: int) -> Rank:
        """A rank that is here (again). What it had reached before stays known."""
        found = self.here.setdefault(rank, Rank(rank))
        found.left = ""
        return found

    def restart(self, ranks: tuple[int, ...]) -> None:
        """A new epoch: these ranks begin anew, all others are history."""
        self.here = {rank: Rank(rank) for rank in ranks}

    def alive(self, rank: int) -> Rank | None:
        found = self.here.get(rank)
        return found if found is not None and not found.left else None
