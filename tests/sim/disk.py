"""What a power cut takes: what was written and not synced, all of it or some. And a daemon's state directory on such a disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ckptd.core.ids import EpochRecord
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone

LOST_OF = 0.7  # of un-synced writes; the others happened to reach the medium
RETRY_S = 5.0  # as the shell does it: an epoch that could not be written down is tried again


class Unsynced:
    """Writes that a power cut may undo. A token names one until it is synced."""

    def __init__(self) -> None:
        self._undo: dict[int, Callable[[], None]] = {}
        self._count = 0

    def wrote(self, undo: Callable[[], None]) -> int:
        self._count += 1
        self._undo[self._count] = undo
        return self._count

    def sync(self, token: int) -> bool:
        """False: it was taken by a power cut, the fsync fails."""
        return self._undo.pop(token, None) is not None

    def power_cut(self, rng: Random) -> int:
        """Undo some; none of them can be synced any more."""
        lost = [undo for undo in self._undo.values() if rng.random() < LOST_OF]
        self._undo.clear()
        for undo in lost:
            undo()
        return len(lost)


@dataclass(frozen=True)
class Written:
    """One job's file in the state directory."""

    record: EpochRecord | None = None
    ran: EpochRecord | None = None
    sealed: int = 0
    life: str = ""
    since: float = 0.0  # simulated seconds
    tombstone: Tombstone = NO_TOMBSTONE

    @property
    def number(self) -> int:
        return self.record.number if self.record is not None else 0


class StateFile:
    """Written beside the old one, synced, renamed, the directory synced: torn or lost before the rename is the old one."""

    def __init__(self) -> None:
        self.durable = Written()
        self.visible = Written()
        self.failing = (
            ""  # "EIO", "ENOSPC": nothing is written; "fsync": the directory's sync fails after the rename
        )

    def write(self, written: Written) -> bool:
        """False: the shell says so in health and tries again."""
        if self.failing in ("EIO", "ENOSPC"):
            return False
        self.visible = written
        if self.failing == "fsync":
            return False
        self.durable = written
        return True

    def cut(self, written: Written, rng: Random) -> None:
        """The daemon dies in the middle of a write."""
        if rng.random() < 0.5 and not self.failing:
            self.visible = written  # renamed
            if rng.random() < 0.5:
                self.durable = written

    def power_cut(self) -> None:
        self.visible = self.durable

    def replaced(self) -> None:
        """A new machine in its place."""
        self.durable = self.visible = Written()

    def mended(self) -> None:
        self.failing = ""
