"""What a life is told, and what it says: one line of JSON per fact, in a file outside of the file system under test."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from ckptd.core.ids import EpochRecord, SnapshotId
from tests.power.disk import NO_LOG_FLUSH

KEEP_LAST = 2
BEGINNINGS = ("claiming", "persisting", "begin", "retaining")


class Note(msgspec.Struct, omit_defaults=True):
    """``what``: claiming, claimed, persisting, persisted, named, begin, written, committed, retaining, cut, counts;
    broken: a promise, as the life itself saw; wrong: anything else that ended it."""

    what: str
    snapshot: SnapshotId | None = None
    content: int = 0  # the seed its bytes were made of
    attempt: str = ""
    record: EpochRecord | None = None
    reports: tuple[bytes, ...] = ()
    keep: bool = False
    text: str = ""
    counts: dict[str, int] = {}


class Life(msgspec.Struct, omit_defaults=True):
    """One start of everything, until the power goes."""

    seed: int
    mount: str
    log: str
    point: str = ""  # where the power goes ("": at the end)
    nth: int = 1
    delay_s: float = 0.0  # or so long after the start (0: not)
    flags: int = NO_LOG_FLUSH
    mutant: str = ""
    goes_on: Note | None = (
        None  # only the storage lost its power: the same epoch, and this attempt is to be committed
    )
    tidy: bool = False  # no cut; clean up, so that litter shows


class Notebook:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()

    def write(self, note: Note) -> None:
        with self._lock:
            os.write(self._fd, msgspec.json.encode(note) + b"\n")


def read_notes(path: Path) -> list[Note]:
    """Without what was acknowledged after the cut: XFS lets the fsync of a directory succeed once its log is shut."""
    if not path.exists():
        return []
    notes = [msgspec.json.decode(line, type=Note) for line in path.read_bytes().splitlines()]
    cut = next((at for at, note in enumerate(notes) if note.what == "cut"), len(notes))
    return notes[: cut + 1] + [note for note in notes[cut:] if note.what in BEGINNINGS]
