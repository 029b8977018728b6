"""The cables between nodes, the same for all jobs: partitions, losses in one direction, clogs, links that are slow for bulk."""

from __future__ import annotations

Way = tuple[str, str]  # from a node to a node


class Links:
    def __init__(self) -> None:
        self.side: dict[str, int] = {}  # nodes on different sides do not reach each other
        self.deaf: set[Way] = set()  # what the first says, the second does not hear
        self.clogged: dict[Way, float] = {}  # delivers nothing until then, and then everything
        self.slow: dict[Way, float] = {}  # bulk takes so many times longer

    def heal(self) -> None:
        self.side = {}
        self.deaf.clear()

    def calm(self) -> None:
        self.heal()
        self.clogged.clear()
        self.slow.clear()

    def carries(self, a: str, b: str) -> bool:
        """Does a message from a come to b (sooner or later)?"""
        return a == b or (self.side.get(a, 0) == self.side.get(b, 0) and (a, b) not in self.deaf)

    def reaches(self, a: str, b: str) -> bool:
        """A connection: both ways."""
        return self.carries(a, b) and self.carries(b, a)

    def wait(self, a: str, b: str, now: float) -> float:
        """Seconds that what a says to b is held up."""
        return max(0.0, self.clogged.get((a, b), 0.0) - now) if self.clogged else 0.0

    def beats(self, a: str, b: str, now: float) -> bool:
        """Do heartbeats come, and their answers?"""
        return self.reaches(a, b) and not self.wait(a, b, now) and not self.wait(b, a, now)
