"""The fragments of a layout, in columns: as an object each, those of all ranks of a job would not fit into a daemon's memory (P16).

A fragment costs about 50 bytes here and 800 as an object. What ranks of one shape have in common (names, dtypes, shapes, and how
they are cut) is there once, whoever's layout it came with; of a rank there is where it stands in each cut, whatever their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import ClassVar, NamedTuple, overload
from weakref import WeakValueDictionary

import msgpack
import numpy as np

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Flags, Ints, pack
from ckptd.core.state_map.cuts import CUTS_MAX, PARTS_MAX, RULES_MAX, Cut, Place, box_at, cut
from ckptd.core.state_map.dtypes import ITEMSIZE

# Columns of a table. dims: how many each fragment has; rule: the number of its cuts, from 1 on, 0: its box follows from none.
SHARED = ("dtype", "role", "sharing", "tier", "dims", "rule", "shape")
OWN = ("offsets", "sizes", "offset")  # and of one rank's layout: boxes that follow from no cuts; where its fragments lie
SORTS_MAX = 64  # of a table: with more, columns are faster
FEW_MAX = 64  # so many are kept as objects: what they cost is nothing, and looking them up in columns takes longer


class Fragment(NamedTuple):
    """One box of one logical tensor, stored contiguous (C order) in the payload at ``offset``."""

    key: str
    dtype: str  # safetensors name: F32, BF16, F8_E4M3, I64, BOOL, ...
    shape: tuple[int, ...]  # global
    box: Box
    offset: int  # bytes from the payload's start, multiple of ALIGN_BYTES
    nbytes: int
    role: str  # param | buffer | optim | extra | rng
    sharing: str = "unique"
    tier: int = 1


class Fragments(Sequence[Fragment]):
    """Read-only. ``offset``, ``nbytes`` and ``tier``: of all of them. To look at many one by one, iterate or take a slice: a single
    one takes as long as a hundred of those."""

    _few: tuple[Fragment, ...] | None

    def __init__(self, rows: Iterable[Fragment], cuts: Sequence[Sequence[Place] | None] = ()) -> None:
        """cuts: of each row how its box was cut, if that is known. One that is no box of these is kept as it is."""
        found = tuple(rows)
        transposed = list(zip(*found, strict=True)) or [()] * len(Fragment._fields)
        keys, dtypes, shapes, boxes, offset, nbytes, roles, sharings, tiers = transposed
        dims = list(map(len, shapes))
        assert all(len(at) == len(size) == count for (at, size), count in zip(boxes, dims, strict=True)), "equal dimensions"
        words = tuple(sorted({*dtypes, *roles, *sharings}))
        number = {word: at for at, word in enumerate(words)}.__getitem__
        numbers: dict[tuple[Place, ...], int] = {}
        rules = list(map(_Rules(numbers).of, found, cuts or [None] * len(found)))
        columns = {
            "dtype": map(number, dtypes), "role": map(number, roles), "sharing": map(number, sharings), "tier": tiers, "dims": dims,
            "rule": rules, "shape": chain.from_iterable(shapes), "offset": offset,
        }  # fmt: skip
        found_columns = {name: np.fromiter(column, np.int64) for name, column in columns.items()}
        own = [box for box, rule in zip(boxes, rules, strict=True) if not rule]
        for name, parts in zip(OWN, zip(*own, strict=True) if own else ((), ()), strict=False):
            found_columns[name] = np.fromiter(chain.from_iterable(parts), np.int64)
        made = [tuple((dim, parts) for dim, parts, _ in places) for places in numbers]
        self.places = tuple(tuple(at for _, _, at in places) for places in numbers)
        table = Table.of(keys, words, found_columns, made)
        self._take(table, found_columns, table.once(np.fromiter(nbytes, np.int64)))
        self._few = found if len(found) <= FEW_MAX else None

    @classmethod
    def of(
        cls, table: Table, places: tuple[tuple[int, ...], ...], columns: Mapping[str, Ints], nbytes: Shared,
        offset: Shared | None = None,
    ) -> Fragments:  # fmt: skip
        """The inverse of ``own``. ``places``: in each of the table's cuts. ``nbytes``: what follows from sizes and dtypes.
        ``offset``: instead of the column of that name."""
        made = cls.__new__(cls)
        made.places = places
        made._take(table, columns, nbytes, offset)
        made._few = tuple(_made(made.columns())) if len(made) <= FEW_MAX else None
        return made

    def _take(self, table: Table, columns: Mapping[str, Ints], nbytes: Shared, offset: Shared | None = None) -> None:
        self.table = table
        self._offsets, self._sizes = (_narrow(columns[name]) for name in OWN[:2])
        self._offset, self._nbytes = offset or table.once(columns["offset"]), nbytes  # most ranks have the same

    @property
    def own(self) -> dict[str, Ints]:
        """All columns but the table's, and those that follow from others."""
        return dict(zip(OWN, (self._offsets, self._sizes, self._offset.column), strict=True))

    @property
    def said(self) -> tuple[bytes, bytes]:
        """Of the boxes that follow from no cuts."""
        return self._offsets.tobytes(), self._sizes.tobytes()

    def standing(self, rules: Iterable[int]) -> tuple[object, ...]:
        """The same for ranks that have the same boxes of what is cut by these rules of the table; 0: of what follows from none."""
        return self.table, *(self.places[rule - 1] if rule else self.said for rule in rules)

    @property
    def offset(self) -> Ints:
        return self._offset.column.astype(np.int64)

    @property
    def nbytes(self) -> Ints:
        return self._nbytes.column.astype(np.int64)

    @property
    def alike(self) -> tuple[Table, Shared]:
        """The same for ranks of one table whose fragments are as large: where all shares are equal, for all."""
        return self.table, self._nbytes

    @property
    def tier(self) -> Ints:
        return self.table.tier.astype(np.int64)

    def shared_as(self, sharing: str) -> Flags:
        """Which of them are."""
        table = self.table
        found: Flags = table.sharing == (table.words.index(sharing) if sharing in table.words else len(table.words))
        return found

    def boxes(self, dims: int) -> tuple[Ints, Ints]:
        """Offsets and sizes of all of them, a column per dimension; what a fragment does not have of them is 0 and 1."""
        inside = np.arange(dims) < self.table.dims[:, None]
        offsets, sizes = np.zeros(inside.shape, np.int64), np.ones(inside.shape, np.int64)
        offsets[inside], sizes[inside] = self.flat_boxes()
        return offsets, sizes

    def flat_boxes(self) -> tuple[Ints, Ints]:
        """The same, one dimension after the other. Not kept: of thousands of ranks they would be most of what is here."""
        return self.table.boxes(self.places, self._offsets, self._sizes)

    def __len__(self) -> int:
        return len(self._offset.column)

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._few) if self._few is not None else _made(self.columns())

    @overload
    def __getitem__(self, at: int) -> Fragment: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Fragment, ...]: ...

    def __getitem__(self, at: int | slice) -> Fragment | tuple[Fragment, ...]:
        if self._few is not None:
            return self._few[at]
        if isinstance(at, slice):
            return tuple(self)[at]
        return next(self.at(np.array([range(len(self))[at]])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fragments) and len(self) == len(other) and all(map(Fragment.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def at(self, numbers: Ints) -> Iterator[Fragment]:
        """These, one after the other."""
        return _made(self.columns(numbers))

    def columns(self, numbers: Ints | None = None) -> Columns:
        """Of all, or of these, as Fragment has them, but for the box, which is offsets and sizes here."""
        table = self.table
        numbers = np.arange(len(self)) if numbers is None else numbers
        dims = table.dims[numbers].astype(np.int64)
        ends = np.cumsum(dims)
        within = np.repeat(table.first[:-1][numbers] - (ends - dims), dims) + np.arange(int(dims.sum()))
        cuts = [slice(a, b) for a, b in pairwise([0, *ends.tolist()])]
        shape, offsets, sizes = (
            map(tuple(column[within].tolist()).__getitem__, cuts) for column in (table.shape, *self.flat_boxes())
        )
        dtype, role, sharing = (
            map(table.words.__getitem__, column[numbers].tolist()) for column in (table.dtype, table.role, table.sharing)
        )
        keys = [table.keys[number] for number in numbers.tolist()]
        places = self._offset.column[numbers].tolist(), self._nbytes.column[numbers].tolist()
        return keys, dtype, shape, offsets, sizes, *places, role, sharing, table.tier[numbers].tolist()


Numbers = Iterable[tuple[int, ...]]
Words = Iterable[str]
Columns = tuple[Words, Words, Numbers, Numbers, Numbers, Iterable[int], Iterable[int], Words, Words, Iterable[int]]


def _made(columns: Columns) -> Iterator[Fragment]:
    keys, dtypes, shapes, offsets, sizes, *rest = columns
    return map(Fragment, keys, dtypes, shapes, map(Box, offsets, sizes), *rest)


class Table:
    """What ranks of one shape share. ``words``: the dtypes, roles and sharings that the columns name by number. ``first``: of each
    fragment its first dimension among all; and the end. ``dims_max``: the most that one has."""

    _known: ClassVar[WeakValueDictionary[str, Table]] = WeakValueDictionary()

    @staticmethod
    def of(
        keys: tuple[str, ...], words: tuple[str, ...], columns: Mapping[str, Ints], rules: Sequence[tuple[Cut, ...]] = ()
    ) -> Table:
        """The same as long as somebody has it."""
        made = Table(keys, words, columns, rules)
        return Table._known.setdefault(made.digest, made)

    @staticmethod
    def known(digest: str) -> Table | None:
        return Table._known.get(digest)

    def __init__(
        self, keys: tuple[str, ...], words: tuple[str, ...], columns: Mapping[str, Ints], rules: Sequence[tuple[Cut, ...]]
    ) -> None:
        self.keys, self.words, self.rules = keys, words, tuple(rules)
        self._columns = {name: _narrow(columns[name]) for name in SHARED}
        self.dtype, self.role, self.sharing, self.tier, self.dims, self.rule, self.shape = self._columns.values()
        self.first = np.cumsum(np.append(0, self.dims), dtype=np.int64)
        self.dims_max = int(self.dims.max(initial=0))
        self.names = frozenset(keys)
        self.encoded = self._encode()
        self.digest = digest_of(self.encoded)
        self.without_rule = np.repeat(self.rule == 0, self.dims)
        self._starts = [self.first[:-1][self.rule == number + 1] for number in range(len(self.rules))]
        self._item_bytes = np.array([ITEMSIZE.get(word, 0) for word in words], np.int64)[self.dtype]
        self._once: WeakValueDictionary[tuple[str, bytes], Shared] = WeakValueDictionary()
        self._of_sorts: WeakValueDictionary[tuple[int, ...], Shared] = WeakValueDictionary()

    def _encode(self) -> bytes:
        data, where = pack(self._columns)
        fields = [self.keys, self.words, where, data, self.rules]
        packed: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
        return packed

    def boxes(self, places: tuple[tuple[int, ...], ...], offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Of a rank that stands at these places; ``offsets``, ``sizes``: of what follows from no cuts."""
        all_offsets, all_sizes = np.zeros(len(self.shape), np.int64), self.shape.astype(np.int64)
        all_offsets[self.without_rule], all_sizes[self.without_rule] = offsets, sizes
        for cuts, at, starts in zip(self.rules, places, self._starts, strict=True):
            cut(all_offsets, all_sizes, starts, cuts, at)
        return all_offsets, all_sizes

    def nbytes(self, sizes: Ints, most: int) -> Ints:
        """Of each fragment. ValueError: more than ``most``."""
        some = self.dims > 0  # the others are numbers, of one element
        starts, found = self.first[:-1][some], self._item_bytes.copy()
        if len(starts):
            empty = np.minimum.reduceat(sizes, starts) == 0
            with np.errstate(all="ignore"):  # of what is empty any number of its other sizes is fine
                about = np.multiply.reduceat(sizes.astype(np.float64), starts) * found[some]
            if not ((about <= most) | empty).all():
                raise ValueError("more elements than there can be")
            found[some] *= np.where(empty, 0, np.multiply.reduceat(sizes, starts))
        nbytes: Ints = found
        return nbytes

    def cut_nbytes(self, places: tuple[tuple[int, ...], ...], most: int) -> Shared | None:
        """The same for a rank that stands at these places, where everything is cut, and into few sorts of parts; else None."""
        sorts, which = self._sorts
        if len(sorts) > SORTS_MAX or self.without_rule.any():
            return None
        cuts = [[(*one, where) for one, where in zip(rule, at, strict=True)] for rule, at in zip(self.rules, places, strict=True)]
        found = tuple(item * box_at(shape, cuts[rule - 1]).volume if rule else item for item, rule, shape in sorts)
        if max(found, default=0) > most:
            raise ValueError("more elements than there can be")
        known = self._of_sorts.get(found)
        if known is None:
            known = self._of_sorts[found] = self.once(np.array(found, np.int64)[which])
        return known

    @cached_property
    def _sorts(self) -> tuple[list[tuple[int, int, tuple[int, ...]]], Ints]:
        """What fragments differ in that makes them larger or smaller: (bytes of an element, rule, shape), and of which each is."""
        ends = self.first.tolist()
        flat = self.shape.tolist()
        shapes = (tuple(flat[start:end]) for start, end in pairwise(ends))
        numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
        rows = zip(self._item_bytes.tolist(), self.rule.tolist(), shapes, strict=True)
        which = [numbers.setdefault(row, len(numbers)) for row in rows]
        return list(numbers), np.array(which, np.int64)

    def once(self, column: Ints) -> Shared:
        """The same as long as somebody has it: where all shares are equal, all ranks' fragments are as large and lie alike."""
        made = _narrow(column)
        return self._once.setdefault((made.dtype.char, made.tobytes()), Shared(made))


class Shared:
    """A column that many ranks have."""

    def __init__(self, column: Ints) -> None:
        self.column = column
        self.follow: dict[tuple[int, int], Shared] = {}  # where fragments of so many bytes lie (layout.py)


class Alike(NamedTuple):
    """Ranks that stand alike: with the same boxes of the fragments in question, which are here once, each with its number among a
    rank's. Their ``offset`` is nobody's."""

    ranks: tuple[int, ...]
    rows: Sequence[tuple[int, Fragment]]


def standing_alike(all_ranks: Mapping[int, Fragments], which: Callable[[Fragments], Flags]) -> list[Alike]:
    """By their first ranks. ``which`` are in question, the same for each rank of a table; who has none of them is left out."""
    asked: dict[Table, tuple[Ints, list[int]]] = {}
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, fragments in sorted(all_ranks.items()):
        table = fragments.table
        if table not in asked:
            numbers = np.flatnonzero(which(fragments))
            asked[table] = numbers, np.unique(table.rule[numbers]).tolist()
        if len(asked[table][0]):
            found.setdefault(fragments.standing(asked[table][1]), []).append(rank)
    made = []
    for ranks in found.values():
        fragments = all_ranks[ranks[0]]
        numbers = asked[fragments.table][0]
        made.append(Alike(tuple(ranks), list(zip(numbers.tolist(), fragments.at(numbers), strict=True))))
    return made


class Kinds:
    """Numbers of what ranks store under one key with one dtype and shape; once for each table."""

    def __init__(self) -> None:
        self.number: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._tables: dict[Table, Ints] = {}

    def of(self, fragments: Fragments) -> Ints:
        table, number = fragments.table, self.number
        if table not in self._tables:
            keys, dtypes, shapes, *_ = fragments.columns()
            found = [number.setdefault(kind, len(number)) for kind in zip(keys, dtypes, shapes, strict=True)]
            self._tables[table] = np.array(found, np.int64)
        return self._tables[table]


class _Rules:
    """The numbers of cuts, from 1 on, as they come; 0: the box is no such part."""

    def __init__(self, numbers: dict[tuple[Place, ...], int]) -> None:
        self._numbers = numbers
        self._boxes: dict[tuple[tuple[int, ...], tuple[Place, ...]], Box | None] = {}  # many tensors have the same shape

    def of(self, row: Fragment, cuts: Sequence[Place] | None) -> int:
        places = tuple(cuts or ())
        if (row.shape, places) not in self._boxes:
            said = len(places) <= CUTS_MAX and prod(parts for _, parts, _ in places) <= PARTS_MAX
            self._boxes[row.shape, places] = box_at(row.shape, places) if said else None
        if row.box != self._boxes[row.shape, places] or len(self._numbers) == RULES_MAX:
            return 0
        return self._numbers.setdefault(places, len(self._numbers) + 1)


def digest_of(encoded: bytes) -> str:
    """What a table is named by."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _narrow(column: Ints) -> Ints:
    """Unsigned, in as few bytes as its largest needs."""
    kinds = (np.uint8, np.uint16, np.uint32)
    most = int(column.max(initial=0))
    return column.astype(next((kind for kind in kinds if most <= np.iinfo(kind).max), np.int64))
