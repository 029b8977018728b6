"""Of what a rank wants back: what is taken from where, where it lies then, and the moves of bytes that bring it into tensors.

All in columns: a restore of thousands of ranks into few is millions of pieces (P16). Tensors that are cut alike have the same
boxes: such a pair of boxes is a *form*, there once. A piece is a few numbers, and costs 40 bytes where an object would cost 400.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptd.core.state_map.box import Box, contains, runs, whole_from
from ckptd.core.state_map.columns import Column, Flags, Ints, pack, unpack

COLUMNS = ("want", "form", "segment", "at")  # of Placed
MOVES_MAX = 64  # of one piece: what lies in more runs of bytes is copied as a box
VOLUME_MAX = 1 << 58  # elements: nothing that large lies in a segment


class Form(NamedTuple):
    """A box of what is wanted, inside ``stored``, the box that is contiguous where it lies."""

    box: Box
    stored: Box


class Origin(NamedTuple):
    source: str  # OWN | PEER | PARITY | DURABLE of recovery.py
    node: str
    rank: int


class Piece(NamedTuple):
    """Fill ``box`` of the want from this copy. It lies inside ``stored``, the box that is contiguous at the source.

    durable: node is "", rank is the wanting one or the one that the want names, and fragment -1; the reader takes (key, box, rank).
    """

    want: int
    key: str
    box: Box
    source: str
    node: str
    rank: int
    fragment: int
    stored: Box
    nbytes: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """``want``: the caller's number for it. ``form``, ``origin``: numbers among ``forms`` and ``origins``. ``keys``: by want."""

    want: Ints
    form: Ints
    origin: Ints
    fragment: Ints
    nbytes: Ints
    forms: Sequence[Form]
    origins: Sequence[Origin]
    keys: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.want)

    def __iter__(self) -> Iterator[Piece]:
        columns = (self.want, self.form, self.origin, self.fragment, self.nbytes)
        for want, form, origin, fragment, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            (box, stored), (source, node, rank) = self.forms[form], self.origins[origin]
            yield Piece(want, self.keys[want], box, source, node, rank, fragment, stored, nbytes)

    def take(self, rows: Ints | Flags) -> Pieces:
        """These of them, in this order."""
        want, form, origin, fragment = self.want[rows], self.form[rows], self.origin[rows], self.fragment[rows]
        return Pieces(want, form, origin, fragment, self.nbytes[rows], self.forms, self.origins, self.keys)

    def by_origin(self, *sources: str) -> Iterator[tuple[Origin, Pieces]]:
        """Those of each origin that is one of these sources, in their order."""
        some = np.flatnonzero(np.array([origin.source in sources for origin in self.origins], bool)[self.origin])
        order = some[np.argsort(self.origin[some], kind="stable")]
        ends = np.cumsum(np.bincount(self.origin[some], minlength=len(self.origins)))
        for origin, rows in zip(self.origins, np.split(order, ends[:-1]), strict=False):
            if len(rows):
                yield origin, self.take(rows)

    @property
    def itemsize(self) -> Ints:
        """Of each piece the bytes of an element."""
        return self.nbytes // volumes_of(form.box for form in self.forms)[self.form]

    def largest_elements_first(self) -> Pieces:
        """Each then begins on a multiple of its own element, one piece after the other."""
        return self.take(np.argsort(-self.itemsize, kind="stable"))

    def brought(self) -> Pieces:
        """As they lie then: each for itself."""
        return replace(self, forms=[Form(form.box, form.box) for form in self.forms])

    def spans(self, places: Ints) -> tuple[Ints, Ints]:
        """(offset, length) of all runs of bytes in their copies, one piece after the other. ``places``: of the fragments there."""
        kinds, which = _unique(self.form, self.itemsize)
        row, (offset, length) = _spread(which, [runs(*self.forms[form][::-1], itemsize) for form, itemsize in kinds], 2)
        return places[self.fragment[row]] + offset, length


@dataclass(frozen=True, eq=False)
class Placed:
    """Pieces in memory, row by row: the number of a want, which of ``forms``, and where its stored box begins: a segment and the
    offset in it."""

    want: Ints
    form: Ints
    segment: Ints
    at: Ints
    forms: Sequence[Form]

    def __len__(self) -> int:
        return len(self.want)

    def __iter__(self) -> Iterator[tuple[int, Form, int, int]]:
        columns = (self.want.tolist(), self.form.tolist(), self.segment.tolist(), self.at.tolist())
        return ((want, self.forms[form], segment, at) for want, form, segment, at in zip(*columns, strict=True))

    def take(self, rows: Ints | Flags) -> Placed:
        return Placed(self.want[rows], self.form[rows], self.segment[rows], self.at[rows], self.forms)

    def encode(self) -> list[Any]:
        """For msgpack."""
        data, where = pack({name: getattr(self, name) for name in COLUMNS})
        return [where, data, [[*form.box, *form.stored] for form in self.forms]]

    @staticmethod
    def decode(fields: Sequence[Any]) -> Placed:
        """The inverse. ValueError, TypeError: it is not that."""
        where, data, boxes = fields
        found = unpack(data, [Column(*column) for column in where], COLUMNS)
        if found.keys() != {*COLUMNS} or len({*map(len, found.values())}) > 1:
            raise ValueError("pieces: a column is missing, or they differ in length")
        if any(min(numbers, default=0) < 0 for form in boxes for numbers in form):
            raise ValueError("pieces: a box begins or ends before its tensor")
        forms = [Form(Box(tuple(at), tuple(size)), Box(tuple(its_at), tuple(its_size))) for at, size, its_at, its_size in boxes]
        return Placed(found["want"], found["form"], found["segment"], found["at"], forms)


class Loads:
    """What a rank wants, and how much of it has come. ``wanted``: the box of each want, and the bytes of its elements."""

    def __init__(self, wanted: Sequence[tuple[Box, int]]) -> None:
        numbers: dict[tuple[Box, int], int] = {}
        self._kind: Ints = np.array([numbers.setdefault(one, len(numbers)) for one in wanted], np.int64)
        self._kinds = [*numbers]
        self._missing = volumes_of(box for box, _ in numbers)[self._kind]

    def check(self, placed: Placed, segments: Sequence[int]) -> None:
        """Every piece inside its want, inside what is stored, and that in its segment of so many bytes. Notes that it comes. Raises
        ValueError."""
        ends = (placed.want, len(self._kind)), (placed.form, len(placed.forms)), (placed.segment, len(segments))
        if not all(((column >= 0) & (column < end)).all() for column, end in ends):
            raise ValueError("a piece of what was not wanted, or of no segment")
        for kind, form in _unique(self._kind[placed.want], placed.form)[0]:
            box, stored = placed.forms[form]
            if not contains(self._kinds[kind][0], box) or not contains(stored, box):
                raise ValueError("a piece outside of what was wanted")
        items = np.array([itemsize for _, itemsize in self._kinds], np.int64)[self._kind[placed.want]]
        room = np.array(segments, np.int64)[placed.segment] - placed.at
        if not ((placed.at >= 0) & (volumes_of(form.stored for form in placed.forms)[placed.form] * items <= room)).all():
            raise ValueError("a piece leaves its segment")
        np.subtract.at(self._missing, placed.want, volumes_of(form.box for form in placed.forms)[placed.form])

    def lacking(self, count: int) -> tuple[int, int] | None:
        """Of the first so many: one that has not come as a whole, and how many elements it lacks."""
        found = np.flatnonzero(self._missing[:count])
        return (int(found[0]), int(self._missing[found[0]])) if len(found) else None

    def moves(self, placed: Placed, targets: Sequence[int], segments: Sequence[int]) -> tuple[Ints, Placed]:
        """Of pieces that were checked: addresses to move to, those to move from, and how many bytes, in three rows; and the pieces
        that have to be copied as boxes. ``targets``: where each want lies in one run of bytes, 0: it does not. ``segments``: where
        each of them begins."""
        start = np.array(targets, np.int64)[placed.want]
        kinds, which = _unique(self._kind[placed.want], placed.form)
        found = [_moves(*self._kinds[kind], placed.forms[form]) for kind, form in kinds]
        few = np.array([one is not None for one in found], bool)[which] & (start != 0)
        row, moves = _spread(which[few], [one or [] for one in found], 3)
        moves[:2] += np.stack((start, np.array(segments, np.int64)[placed.segment] + placed.at))[:, few][:, row]
        return moves, placed.take(~few)


def volumes_of(boxes: Iterable[Box]) -> Ints:
    return np.array([min(box.volume, VOLUME_MAX) for box in boxes], np.int64)


def _moves(box: Box, itemsize: int, form: Form) -> list[tuple[int, int, int]] | None:
    """(byte of the wanted box, byte of the stored one, bytes) of a piece; None: of too many runs."""
    split = max(whole_from(box, form.box), whole_from(form.stored, form.box))
    if prod(form.box.sizes[:split]) > MOVES_MAX:
        return None
    share = prod(form.box.sizes[split:]) * itemsize
    found = runs(box, form.box, itemsize), runs(form.stored, form.box, itemsize)
    starts = ([start + at for start, length in one for at in range(0, length, share)] for one in found)
    return [(target, source, share) for target, source in zip(*starts, strict=True)]


def _unique(*columns: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """The different rows, and which of them each is."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:  # as one number: sorted much faster than rows are
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), which


def _spread(which: Ints, found: Sequence[Sequence[tuple[int, ...]]], width: int) -> tuple[Ints, Ints]:
    """A list for each row (``which``: of those found), one after the other: the row of each entry, and the entries' columns."""
    counts = np.array([*map(len, found)], np.int64)
    first, count = (np.cumsum(counts) - counts)[which], counts[which]
    row = np.repeat(np.arange(len(which)), count)
    at = np.arange(len(row)) + np.repeat(first - (np.cumsum(count) - count), count)
    entries = np.array([entry for one in found for entry in one], np.int64).reshape(-1, width)
    return row, entries.T[:, at]
