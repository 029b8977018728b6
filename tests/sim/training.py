"""What ranks train, as bytes that name their ancestry. The trainers write them, the oracle knows them again; no code of the core.

The state of a job at one step is one row of bytes, drawn from (job, line of training, step); each logical tensor has its place
in it. A line of training (``Trail``) is named by what was really loaded when it began, so the bytes of two starts differ even
at equal steps, and a mixture of any two states is none that was ever trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

CUT, COPIED, PLAIN, STAGE = KINDS = "cut", "copied", "plain", "stage"
BORN_OF = 0.4  # of the jobs have a few tensors that are born later,
MANY_OF = 0.02  # these very many at once
MANY = (800, 2500)
BORN_AT = range(1, 60)  # step

NAME_BYTES = 8
CACHED_MAX = 1024  # states


@dataclass(frozen=True, eq=False)
class Trail:
    """What one start of the job trains: its own steps, after those of ``parent``."""

    name: bytes  # NAME_BYTES
    world: int  # ranks
    parent: Origin | None  # what it loaded; None: it began anew
    attempt: str


class Origin(NamedTuple):
    """One captured state: by all ranks under one grant. What a step's second capture has differs from the first one's, as whoever
    takes a step again may have changed something since; a mixture of the two was never there."""

    trail: Trail
    step: int
    grant: int = 0

    def continues(self, other: Origin) -> bool:
        """Was ``other`` captured on the way here? So does a state continue itself."""
        at: Origin | None = self
        while at is not None:
            if at.trail is other.trail:
                return (other.step, other.grant) <= (at.step, at.grant)
            at = at.trail.parent
        return False


def begin(job: str, attempt: str, world: int, parent: Origin | None) -> Trail:
    before = parent.trail.name + _moment(parent) if parent is not None else b""
    named = hashlib.blake2b(f"{job} {attempt}".encode(), key=before, digest_size=NAME_BYTES)
    return Trail(named.digest(), world, parent, attempt)


class Tensor(NamedTuple):
    """``size`` elements of one byte, at ``base`` of the state's row."""

    key: str
    base: int
    size: int
    kind: str  # one of KINDS
    number: int  # among all of the model


class Model:
    """The tensors that the state of a job has at each step: some are born while it trains, now and then thousands at once.

    CUT: over all ranks, unevenly. COPIED: equal by contract, captured by f+1 ranks. PLAIN: a value that each rank has. STAGE: of
    one rank alone, as in a pipeline.
    """

    def __init__(self, rng: Random | None = None) -> None:
        self.all: dict[str, Tensor] = {}
        self.nbytes = 0
        for key, size, kind in (("w", 24, CUT), ("norm", 4, COPIED), ("b", 2, PLAIN)):
            self._add(key, size, kind)
        self._born: list[tuple[int, int]] = [(0, len(self.all))]  # from that step on there are so many
        if rng is not None:
            self._draw(rng)
        self._at: dict[int, tuple[Tensor, ...]] = {}

    def _draw(self, rng: Random) -> None:
        for _ in range(rng.choice([0, 0, 1, 3])):
            self._add(f"{len(self.all)}", rng.randint(1, 40), rng.choice(KINDS))
        self._born = [(0, len(self.all))]
        chance = rng.random()
        if chance < MANY_OF:
            steps, counts = [rng.choice(BORN_AT)], [rng.randint(*MANY)]
        else:
            steps = sorted(rng.choices(BORN_AT, k=rng.choice([1, 1, 2, 3]) if chance < BORN_OF else 0))
            counts = [rng.randint(1, 6) for _ in steps]
        for step, count in zip(steps, counts, strict=True):
            kinds = rng.choice([KINDS, (CUT,), (STAGE,)])
            for _ in range(count):
                self._add(f"{len(self.all)}", rng.randint(1, 8), kinds[rng.randrange(len(kinds))])
            self._born.append((step, len(self.all)))

    def _add(self, key: str, size: int, kind: str) -> None:
        self.all[key] = Tensor(key, self.nbytes, size, kind, len(self.all))
        self.nbytes += size

    def tensors(self, step: int) -> tuple[Tensor, ...]:
        count = max(count for born, count in self._born if born <= step)
        if count not in self._at:
            self._at[count] = tuple(self.all.values())[:count]
        return self._at[count]

    def state(self, origin: Origin) -> bytes:
        """The whole row; what a step has no tensor for is never looked at."""
        return _row(origin.trail.name + _moment(origin), self.nbytes)


@lru_cache(maxsize=CACHED_MAX)
def _row(name: bytes, nbytes: int) -> bytes:
    return hashlib.shake_128(name).digest(nbytes)


def _moment(origin: Origin) -> bytes:
    return origin.step.to_bytes(8, "big") + origin.grant.to_bytes(8, "big")


def objects(origin: Origin, rank: int) -> bytes:
    """A rank's own objects: they say what they are of."""
    return b"".join((origin.trail.name, _moment(origin), rank.to_bytes(4, "big")))
