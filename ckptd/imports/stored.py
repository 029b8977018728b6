"""Where a tensor of another program lies: boxes of it in files, mapped and never read whole."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, islice
from typing import Any

import numpy as np

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import PAIRS_MAX, Box, contains, intersect, split, uncovered
from ckptd.core.state_map.dtypes import FLOATS, ITEMSIZE, TORCH_NAMES
from ckptd.persist.strided import Elements, strides, window

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FILES_MAPPED_MAX = 256
COMPARED_ELEMENTS = 1 << 20  # of two copies at once
TORN = "the file is shorter than what its index says: it is torn, or was not written to its end"


@dataclass(frozen=True)
class Place:
    """A box of a tensor in a file, from byte ``at`` on; ``steps``: bytes between neighbours per dimension. dtype: as it lies there;
    wanted: what is made of it."""

    box: Box
    path: str
    at: int
    steps: tuple[int, ...]
    dtype: str
    wanted: str

    @staticmethod
    def packed(box: Box, path: str, at: int, dtype: str) -> Place:
        """In C order."""
        return Place(box, path, at, strides(box.sizes, ITEMSIZE[dtype]), dtype, dtype)

    def check(self) -> None:
        """Raises CkptdError: it leaves its file."""
        span = sum((size - 1) * step for size, step in zip(self.box.sizes, self.steps, strict=True))
        end = self.at + span + ITEMSIZE[self.dtype] if self.box.volume else self.at
        if self.at < 0 or any(step < 0 for step in self.steps) or end > os.path.getsize(self.path):
            raise CkptdError(TORN, where=self.path, hint="save it again, or import an older one")

    def values(self, inner: Box) -> Elements:
        """A box inside of it, as raw numbers of the wanted dtype's size."""
        unit = UNITS[ITEMSIZE[self.dtype]]
        whole: Elements = np.ndarray(self.box.sizes, unit, mapped(self.path), self.at, self.steps)
        found: Elements = np.asarray(whole[window(self.box, inner)])
        return found if self.dtype == self.wanted else _converted(found, self.dtype, self.wanted)


@dataclass(frozen=True)
class Stored:
    """A whole tensor. ``same``: equal for two names of one tensor; None: nothing is known of that."""

    dtype: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    same: Any = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).volume * ITEMSIZE[self.dtype]

    def check(self, key: str) -> None:
        """Raises CkptdError: a dtype that is not written, a box outside, a torn file, elements that two places say otherwise."""
        if self.dtype not in ITEMSIZE:
            raise CkptdError(f"dtype {self.dtype} is not known", where=key)
        for place in self.places:
            if not contains(Box.whole(self.shape), place.box):
                raise CkptdError(f"{place.box} leaves the shape {self.shape}", where=key)
            place.check()
        whole = Box.whole(self.shape)
        gaps = uncovered(whole, [place.box for place in self.places])
        if gaps and whole.volume:
            raise CkptdError(f"torn: {gaps[0]} of shape {self.shape} is in no file", where=key)
        if _volume(self.places) > whole.volume:  # nothing is lacking, so something is there twice
            self._check_copies(key)

    def _check_copies(self, key: str) -> None:
        """Which of two values is right nobody knows. The same box with the same bytes is a copy, as ranks write of what they all
        have, and harmless."""
        kept: dict[Box, Place] = {}
        for place in dict.fromkeys(self.places):
            first = kept.setdefault(place.box, place)
            if first is not place and not _same(first, place):
                raise _twice(key, first, place, "other values of it")
        if _volume(kept.values()) > Box.whole(self.shape).volume:
            places = [*kept.values()]
            pairs = islice(combinations(places, 2), PAIRS_MAX)
            one, other = next((pair for pair in pairs if intersect(pair[0].box, pair[1].box)), places[:2])
            raise _twice(key, one, other, "the same elements of it, and not as copies")

    def as_dtype(self, dtype: str) -> Stored:
        """Converted when it is written, where it is a floating point number."""
        if self.dtype not in FLOATS:
            return self
        moved = tuple(Place(p.box, p.path, p.at, p.steps, p.dtype, dtype) for p in self.places)
        return Stored(dtype, self.shape, moved, self.same)

    def read(self) -> Elements:
        """All of a small one. Raises CkptdError, as ``check`` does: what is in no file would be zeros."""
        self.check("a tensor among values")
        whole: Elements = np.zeros(self.shape, UNITS[ITEMSIZE[self.dtype]])
        for place in self.places:
            inner = intersect(place.box, Box.whole(self.shape))
            if inner is not None:
                whole[window(Box.whole(self.shape), inner)] = place.values(inner)
        return whole


@lru_cache(maxsize=FILES_MAPPED_MAX)
def mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _converted(values: Elements, dtype: str, wanted: str) -> Elements:
    import torch

    kinds = [getattr(torch, TORCH_NAMES[name]) for name in (dtype, wanted)]
    bits = torch.from_numpy(values.copy(order="C").reshape(-1).view(np.uint8))  # of a file: torch wants what may be written
    made = bits.view(kinds[0]).to(kinds[1]).view(torch.uint8).numpy()
    result: Elements = made.view(UNITS[ITEMSIZE[wanted]]).reshape(values.shape)
    return result


def _volume(places: Iterable[Place]) -> int:
    return sum(place.box.volume for place in places)


def _same(one: Place, other: Place) -> bool:
    """Two of one box, as they lie there: what is made of them may be equal where they are not."""
    a, b = (replace(place, wanted=place.dtype) for place in (one, other))
    return all(np.array_equal(a.values(part), b.values(part)) for part in split(one.box, COMPARED_ELEMENTS))


def _twice(key: str, one: Place, other: Place, what: str) -> CkptdError:
    of_one = f"one file holds {what}: {one.path}"
    text = of_one if one.path == other.path else f"two files hold {what}: {one.path} and {other.path}"
    return CkptdError(text, where=key, hint="which of them is right stands nowhere: leave the other one out, or save it again")


def joined(dtype: str, shape: Sequence[int], places: Sequence[Place]) -> Stored:
    return Stored(dtype, tuple(shape), tuple(places))
