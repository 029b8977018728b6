"""What ranks train, as bytes that name their ancestry. The trainers write them, the oracle knows them again; no code of the core.

The state of a job at one step is one row of bytes, drawn from (job, line of training, step); each logical tensor has its place
in it. A line of training (``Trail``) is named by what was really loaded when it began, so the bytes of two starts differ even
at equal steps, and a mixture of any two states is none that was ever trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

NAME_BYTES = 8
CACHED_MAX = 1024  # states


@dataclass(frozen=True, eq=False)
class Trail:
    """What one start of the job trains: its own steps, after those of ``parent``."""

    name: bytes  # NAME_BYTES
    world: int  # ranks
    parent: Origin | None  # what it loaded; None: it began anew


class Origin(NamedTuple):
    """One trained state."""

    trail: Trail
    step: int

    def continues(self, other: Origin) -> bool:
        """Was ``other`` trained on the way here? So does a state continue itself."""
        at: Origin | None = self
        while at is not None:
            if at.trail is other.trail:
                return other.step <= at.step
            at = at.trail.parent
        return False


def begin(job: str, attempt: str, world: int, parent: Origin | None) -> Trail:
    before = parent.trail.name + parent.step.to_bytes(8, "big") if parent is not None else b""
    named = hashlib.blake2b(f"{job} {attempt}".encode(), key=before, digest_size=NAME_BYTES)
    return Trail(named.digest(), world, parent)


class Tensor(NamedTuple):
    """``size`` elements of one byte, at ``base`` of the state's row."""

    key: str
    base: int
    size: int


class Model:
    """The tensors that the state of a job has at each step."""

    def __init__(self) -> None:
        self.all: dict[str, Tensor] = {}
        self.nbytes = 0
        for key, size in (("w", 24), ("norm", 4), ("b", 2)):
            self._add(key, size)

    def _add(self, key: str, size: int) -> None:
        self.all[key] = Tensor(key, self.nbytes, size)
        self.nbytes += size

    def tensors(self, step: int) -> tuple[Tensor, ...]:
        return tuple(self.all.values())

    def state(self, origin: Origin) -> bytes:
        """The whole row; what a step has no tensor for is never looked at."""
        return _row(origin.trail.name, origin.step, self.nbytes)


@lru_cache(maxsize=CACHED_MAX)
def _row(name: bytes, step: int, nbytes: int) -> bytes:
    return hashlib.shake_128(name + step.to_bytes(8, "big")).digest(nbytes)


def objects(origin: Origin, rank: int) -> bytes:
    """A rank's own objects: they say what they are of."""
    return b"".join((origin.trail.name, origin.step.to_bytes(8, "big"), rank.to_bytes(4, "big")))
