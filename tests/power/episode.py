"""An episode: one fresh file system and a row of lives on it, each ended by a power cut, all of it made of one seed.

What a life reaches at which instant is up to threads and disk, so a seed gives the same plan, not the same nanosecond.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.power.disk import LOG_FLUSH, MKFS, NO_LOG_FLUSH, Disk, memory_at, private_mounts
from tests.power.mutants import NEAR
from tests.power.notes import Life, Note, read_notes
from tests.power.oracle import Oracle
from tests.power.promises import Broken, Failed, expect
from tests.power.trap import CUT
from tests.power.zygote import Zygote

LIVES = 6  # power cuts per episode
NAMED, CALLS, TIMES = 4, 3, 2  # of 9 cuts: at failpoints and acknowledgements, at system calls, at some time
APART = 101  # seeds between two kinds of file system, so that they go through the points in another order
STRIDE = 17  # from one system call to the next: neighbours are alike
REACHED = 0.8  # of what the first lives passed; a point that is not reached is a cut at the end
GOES_ON = 0.4  # of those lives that left a written attempt
PROMISES = ("persist.", "acknowledged ")
CENSUS_SEED = 1 << 40


@dataclass(frozen=True)
class Census:
    """What a life passes, and how often, and how long it takes: the first one on a file system, and later ones."""

    counts: tuple[dict[str, int], dict[str, int]]
    took_s: tuple[float, float]


@dataclass(frozen=True)
class Cut:
    seed: int
    number: int
    where: str
    flags: int
    broken: str = ""
    failed: bool = False  # so it says, and it was no promise: the life went wrong before the power did


@dataclass
class Outcome:
    cuts: list[Cut] = field(default_factory=list)
    there: int = 0  # unacknowledged snapshots that survived
    not_there: int = 0

    @property
    def broken(self) -> list[Cut]:
        """Promises, and lives that failed by themselves: of the code as it is neither may be."""
        return [cut for cut in self.cuts if cut.broken]

    @property
    def failed(self) -> list[Cut]:
        """No power cut shows these, but for what an earlier one may have left behind."""
        return [cut for cut in self.cuts if cut.failed]

    @property
    def shown(self) -> list[Cut]:
        """Promises that do not hold."""
        return [cut for cut in self.cuts if cut.broken and not cut.failed]


class Bench:
    """The zygote and a folder for one kind of file system. ``with Bench(...) as bench``."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        self._census: Census | None = None
        self._open = ExitStack()

    def __enter__(self) -> Bench:
        """Raises NoDisk."""
        with ExitStack() as opened:
            opened.enter_context(private_mounts())
            opened.enter_context(memory_at(self.place))
            self.zygote = Zygote()
            opened.callback(self.zygote.close)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def census(self) -> Census:
        """Two lives of the code as it is, cut at their end."""
        if self._census is None:
            with self.disk() as disk:
                counts, took_s = [], []
                for number in range(2):
                    life, began_s = self.life(disk, CENSUS_SEED + number, number), time.monotonic()
                    assert self.zygote.live(life) == CUT, read_notes(Path(life.log))
                    took_s.append(time.monotonic() - began_s)
                    disk.reboot()
                    counts.append(read_notes(Path(life.log))[-2].counts)
            self._census = Census((counts[0], counts[1]), (took_s[0], took_s[1]))
        return self._census

    def named(self) -> set[str]:
        """The failpoints and acknowledgements that a life passes. After an episode."""
        assert self._census is not None
        return {name for counts in self._census.counts for name in counts if name.startswith(PROMISES)}

    @contextmanager
    def disk(self) -> Iterator[Disk]:
        with tempfile.TemporaryDirectory(dir=self.place) as folder:
            made = Disk(self.kind, Path(folder))
            try:
                yield made
            finally:
                made.close()

    def life(self, disk: Disk, seed: int, number: int, mutant: str = "") -> Life:
        return Life(seed, str(disk.mount), str(disk.image.with_name(f"life-{number}")), mutant=mutant)

    def episode(self, seed: int, lives: int = LIVES, mutant: str = "") -> Outcome:
        """Ends at the first promise that does not hold; its cut says which."""
        self.census()
        with self.disk() as disk:
            return _Episode(self, disk, seed, mutant).run(lives)


class _Episode:
    def __init__(self, bench: Bench, disk: Disk, seed: int, mutant: str) -> None:
        self.bench, self.disk, self.seed, self.mutant = bench, disk, seed, mutant
        self.chance = random.Random(f"{bench.kind} {seed}")
        self.oracle = Oracle()
        self.outcome = Outcome()
        self.left: Note | None = None  # an attempt that was written, not committed

    def run(self, lives: int) -> Outcome:
        for number in range(lives):
            self._one(number, self._planned(number))
            if self.outcome.broken:
                return self.outcome
        if not self.mutant:
            self._tidy(lives)
        seen = self.oracle.unacknowledged
        self.outcome.there, self.outcome.not_there = seen["there"], seen["not there"]
        return self.outcome

    def _planned(self, number: int) -> Life:
        life = self.bench.life(self.disk, self.chance.getrandbits(40), number, self.mutant)
        census, turn = self.bench.census(), min(number, 1)
        counts, fraction = census.counts[turn], self.chance.random()
        life.point = self._point(
            (list(MKFS).index(self.bench.kind) * APART + self.seed) * LIVES + number, counts
        )
        if life.point:
            life.nth = 1 + int(fraction * REACHED * counts[life.point])
        else:
            life.delay_s = fraction * census.took_s[turn]
        life.flags = self.chance.choice((NO_LOG_FLUSH, NO_LOG_FLUSH, LOG_FLUSH))
        if self.left is not None and self.chance.random() < GOES_ON:
            life.goes_on = self.left
        return life

    def _point(self, slot: int, counts: dict[str, int]) -> str:
        """Consecutive seeds go through the named points in turn, and through the system calls; "": at some time."""
        named = sorted(name for name in counts if name.startswith(PROMISES))
        calls = sorted(set(counts) - set(named))
        near = [name for name in sorted(counts) if self.mutant in NEAR and NEAR[self.mutant] in name]
        if near and slot % 2:
            return self.chance.choice(near)
        turn, at = divmod(slot, NAMED + CALLS + TIMES)
        if at < NAMED:
            return named[(turn * NAMED + at) % len(named)]
        if at < NAMED + CALLS:
            return calls[(turn * CALLS + at - NAMED) * STRIDE % len(calls)]
        return ""

    def _one(self, number: int, life: Life) -> None:
        status = self.bench.zygote.live(life)
        notes = read_notes(Path(life.log))
        where = next((note.text for note in notes if note.what == "cut"), f"no cut, exit status {status}")
        broken, failed = "", False
        try:
            self.disk.reboot()
            self.oracle.hear(notes)
            expect(status == CUT, f"the life ended with {status}", Failed)
            self.oracle.check(self.disk.mount)
        except Broken as error:
            broken, failed = str(error), isinstance(error, Failed)
        self.outcome.cuts.append(Cut(self.seed, number, where, life.flags, broken, failed))
        self.left = _left_over(notes)

    def _tidy(self, number: int) -> None:
        life = self.bench.life(self.disk, self.chance.getrandbits(40), number)
        life.tidy = True
        try:
            status = self.bench.zygote.live(life)
            self.oracle.hear(read_notes(Path(life.log)))
            expect(status == 0, f"cleaning up ended with {status}", Failed)
            self.oracle.check(self.disk.mount)
            self.oracle.check_tidy(self.disk.mount)
        except Broken as error:
            failed = isinstance(error, Failed)
            self.outcome.cuts.append(Cut(self.seed, number, "cleaning up", 0, str(error), failed))


def _left_over(notes: list[Note]) -> Note | None:
    done = {note.snapshot for note in notes if note.what == "committed"}
    written = [note for note in notes if note.what == "written" and note.snapshot not in done]
    return written[-1] if written else None
