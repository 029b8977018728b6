"""Many boxes of many tensors, and which of them meet many wanted ones: in columns, where an object per pair would take longer than
the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.box import Box, Span, disjoint
from ckptd.core.state_map.columns import Flags, Ints

PAIRS_AT_ONCE = 1 << 20  # of a wanted and a stored box that are compared in one go; some 100 MB
LINE_MAX = 1 << 62

Number = Callable[[str, int], int | None]


class Meetings(NamedTuple):
    """Row by row: the wanted box, the stored one, and what both have, which is not empty."""

    want: Ints
    row: Ints
    offsets: Ints
    sizes: Ints


class BoxIndex:
    """``first``: of each tensor's rows among ``offsets`` and ``sizes``, and the end. Rows of a tensor are sorted by offsets; there
    is a column per dimension, what a tensor does not have of them is 0 and 1. ``number``: of a tensor by its key and how
    many dimensions it has, None: not here."""

    def __init__(self, number: Number, first: Ints, offsets: Ints, sizes: Ints) -> None:
        assert offsets.shape == sizes.shape and len(offsets) == first[-1], "a row per box"
        self.number, self.first = number, first
        self._offsets, self._sizes = offsets, sizes

    @staticmethod
    def of(boxes: Mapping[str, Sequence[Box]]) -> BoxIndex:
        ordered = [sorted(found, key=lambda box: box.offsets) for found in boxes.values()]
        numbers = {(key, len(found[0].sizes)): at for at, (key, found) in enumerate(boxes.items()) if found}
        first = np.cumsum([0, *map(len, ordered)])
        return BoxIndex(lambda *asked: numbers.get(asked), first, *columns_of([box for found in ordered for box in found]))

    @staticmethod
    def numbered(numbers: Ints, count: int, offsets: Ints, sizes: Ints) -> BoxIndex:
        """``numbers``: of each row's tensor, ascending, below ``count``. Tensors are asked for by their numbers alone."""
        return BoxIndex(lambda key, dims: None, np.searchsorted(numbers, np.arange(count + 1)), offsets, sizes)

    def named(self, number: Number) -> BoxIndex:
        """The same boxes under other keys."""
        assert len(self.apart) == len(self.first) - 1, "looked at once, for all"
        other = copy(self)
        other.number = number
        return other

    def box(self, row: int, dims: int) -> Box:
        return Box(tuple(self._offsets[row, :dims].tolist()), tuple(self._sizes[row, :dims].tolist()))

    @cached_property
    def apart(self) -> Flags:
        """Of which tensors no two boxes have an element in common."""
        return self._compare()

    def _compare(self) -> Flags:
        """Those that are cut along one dimension are looked at together. In the others all begin at the same place, and so
        overlap."""
        counts = np.diff(self.first)
        apart: Flags = counts < 2
        if apart.all():
            return apart
        differs = self._extent(np.minimum, self._offsets) != self._extent(np.maximum, self._offsets)
        cuts = differs.sum(1)
        dim = differs.argmax(1)[self._tensor][:, None] if differs.shape[1] else np.empty((0, 0), np.int64)
        if cuts.max(initial=0) > 0:
            at = np.take_along_axis(self._offsets, dim, 1)[:, 0]
            order = np.lexsort((at, self._tensor))
            at, tensor = at[order], self._tensor[order]
            end = at + np.take_along_axis(self._sizes, dim, 1)[order, 0]
            meet = (end[:-1] > at[1:]) & (tensor[:-1] == tensor[1:])
            apart |= (cuts == 1) & ~np.isin(np.arange(len(counts)), tensor[:-1][meet])
        for number in np.flatnonzero(~apart & (cuts > 1)).tolist():
            rows = range(int(self.first[number]), int(self.first[number + 1]))
            apart[number] = disjoint([self.box(row, self._offsets.shape[1]) for row in rows])
        return apart

    def meetings(self, numbers: Ints, offsets: Ints, sizes: Ints) -> Iterator[Meetings]:
        """Of the wanted boxes, one per row; ``numbers``: of their tensors, below 0: none. By want, some of them after the other."""
        begin, counts = self._near(numbers, offsets, sizes)
        ends = np.cumsum(counts)
        at = 0
        while at < len(counts):
            before = int(ends[at - 1]) if at else 0
            stop = max(at + 1, int(np.searchsorted(ends, before + PAIRS_AT_ONCE, "right")))
            part = np.arange(at, stop)
            want = np.repeat(part, counts[part])
            within = np.arange(len(want)) - np.repeat(ends[part] - counts[part] - before, counts[part])
            yield self._meet(want, begin[want] + within, offsets, sizes)
            at = stop

    @cached_property
    def _tensor(self) -> Ints:
        """Of each row."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def _extent(self, least_or_most: np.ufunc, columns: Ints) -> Ints:
        """One row per tensor, zeros for those that have none."""
        some = np.flatnonzero(np.diff(self.first))
        found = np.zeros((len(self.first) - 1, columns.shape[1]), np.int64)
        if len(some):
            found[some] = least_or_most.reduceat(columns, self.first[some], axis=0)
        return found

    def _near(self, numbers: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """First and number of the rows that may meet each wanted box: those of its tensor, and where that makes very many pairs
        only those near it in the first dimension, by which they are sorted."""
        if len(self.first) == 1:  # nothing is stored
            return np.zeros_like(numbers), np.zeros_like(numbers)
        known = np.maximum(numbers, 0)
        begin, end = (np.where(numbers < 0, 0, self.first[known + after]) for after in (0, 1))
        if int((end - begin).sum()) > PAIRS_AT_ONCE and offsets.shape[1] and self._offsets.shape[1]:
            step = 1 + int((self._offsets[:, 0] + self._sizes[:, 0]).max())
            if step < LINE_MAX // len(self.first):
                line = self._tensor * step + self._offsets[:, 0]
                longest = self._extent(np.maximum, self._sizes)[known, 0]
                low = known * step + np.clip(offsets[:, 0] - longest + 1, 0, step)
                high = known * step + np.clip(offsets[:, 0] + sizes[:, 0], 0, step)
                begin = np.maximum(begin, np.searchsorted(line, low))
                end = np.maximum(begin, np.minimum(end, np.searchsorted(line, high)))
        return begin, end - begin

    def _meet(self, want: Ints, row: Ints, offsets: Ints, sizes: Ints) -> Meetings:
        at, its_at = _as_wide(offsets[want], self._offsets[row], 0)
        size, its_size = _as_wide(sizes[want], self._sizes[row], 1)
        start = np.maximum(at, its_at)
        length = np.minimum(at + size, its_at + its_size) - start
        meets = (length > 0).all(1)
        return Meetings(want[meets], row[meets], start[meets], length[meets])


def columns_of(boxes: Sequence[Span]) -> tuple[Ints, Ints]:
    """Offsets and sizes, one column per dimension."""
    dims = np.array([len(sizes) for _, sizes in boxes], np.int64)
    inside = np.arange(int(dims.max(initial=0))) < dims[:, None]
    offsets, sizes = np.zeros(inside.shape, np.int64), np.ones(inside.shape, np.int64)
    offsets[inside] = list(chain.from_iterable(at for at, _ in boxes))
    sizes[inside] = list(chain.from_iterable(size for _, size in boxes))
    return offsets, sizes


def _as_wide(mine: Ints, its: Ints, missing: int) -> tuple[Ints, Ints]:
    width = max(mine.shape[1], its.shape[1])
    pads = (((0, 0), (0, width - columns.shape[1])) for columns in (mine, its))
    mine, its = (np.pad(c, p, constant_values=missing) if p[1][1] else c for c, p in zip((mine, its), pads, strict=True))
    return mine, its
