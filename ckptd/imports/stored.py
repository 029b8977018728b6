"""Where a tensor of another program lies: boxes of it in files, mapped and never read whole."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box, contains, intersect, uncovered
from ckptd.core.state_map.dtypes import FLOATS, ITEMSIZE, TORCH_NAMES
from ckptd.persist.strided import Elements, strides, window

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FILES_MAPPED_MAX = 256
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
        """Raises CkptdError: a dtype that is not written, a box outside, a torn file."""
        if self.dtype not in ITEMSIZE:
            raise CkptdError(f"dtype {self.dtype} is not known", where=key)
        for place in self.places:
            if not contains(Box.whole(self.shape), place.box):
                raise CkptdError(f"{place.box} leaves the shape {self.shape}", where=key)
            place.check()
        gaps = uncovered(Box.whole(self.shape), [place.box for place in self.places])
        if gaps and Box.whole(self.shape).volume:
            raise CkptdError(f"torn: {gaps[0]} of shape {self.shape} is in no file", where=key)

    def as_dtype(self, dtype: str) -> Stored:
        """Converted when it is written, where it is a floating point number."""
        if self.dtype not in FLOATS:
            return self
        moved = tuple(Place(p.box, p.path, p.at, p.steps, p.dtype, dtype) for p in self.places)
        return Stored(dtype, self.shape, moved, self.same)

    def read(self) -> Elements:
        """All of a small one."""
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


def joined(dtype: str, shape: Sequence[int], places: Sequence[Place]) -> Stored:
    return Stored(dtype, tuple(shape), tuple(places))
