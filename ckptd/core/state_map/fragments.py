"""The fragments of a layout, in columns: as an object each, those of all ranks of a job would not fit into a daemon's memory (P16).

A fragment costs about 50 bytes here and 800 as an object. What ranks of one shape have in common (names, dtypes, shapes) is there
once, whoever's layout it came with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import ClassVar, NamedTuple, overload
from weakref import WeakValueDictionary

import msgpack
import numpy as np

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Flags, Ints, pack

SHARED = ("dtype", "role", "sharing", "tier", "dims", "shape")  # columns of a table, ``dims``: how many each fragment has
OWN = ("offsets", "sizes", "offset")  # and of one rank's layout
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

    def __init__(self, rows: Iterable[Fragment]) -> None:
        found = tuple(rows)
        transposed = list(zip(*found, strict=True)) or [()] * len(Fragment._fields)
        keys, dtypes, shapes, boxes, offset, nbytes, roles, sharings, tiers = transposed
        offsets, sizes = zip(*boxes, strict=True) if boxes else ((), ())
        dims = list(map(len, shapes))
        assert dims == list(map(len, offsets)) == list(map(len, sizes)), "equal dimensions"
        words = tuple(sorted({*dtypes, *roles, *sharings}))
        number = {word: at for at, word in enumerate(words)}.__getitem__
        columns = {
            "dtype": map(number, dtypes), "role": map(number, roles), "sharing": map(number, sharings), "tier": tiers, "dims": dims,
            "shape": chain.from_iterable(shapes), "offsets": chain.from_iterable(offsets), "sizes": chain.from_iterable(sizes),
            "offset": offset,
        }  # fmt: skip
        found_columns = {name: np.fromiter(column, np.int64) for name, column in columns.items()}
        self._take(Table.of(keys, words, found_columns), found_columns, nbytes)
        self._few = found if len(found) <= FEW_MAX else None

    @classmethod
    def of(cls, table: Table, columns: Mapping[str, Ints], nbytes: Ints) -> Fragments:
        """The inverse of ``own``. ``nbytes``: what follows from sizes and dtypes."""
        made = cls.__new__(cls)
        made._take(table, columns, nbytes)
        made._few = tuple(_made(made.columns())) if len(made) <= FEW_MAX else None
        return made

    def _take(self, table: Table, columns: Mapping[str, Ints], nbytes: Iterable[int]) -> None:
        self.table = table
        self._offsets, self._sizes, self._offset = (_narrow(columns[name]) for name in OWN)
        self._nbytes = _narrow(np.fromiter(nbytes, np.int64))

    @property
    def own(self) -> dict[str, Ints]:
        """All columns but the table's, and those that follow from others."""
        return dict(zip(OWN, (self._offsets, self._sizes, self._offset), strict=True))

    @property
    def offset(self) -> Ints:
        return self._offset.astype(np.int64)

    @property
    def nbytes(self) -> Ints:
        return self._nbytes.astype(np.int64)

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
        offsets[inside], sizes[inside] = self._offsets, self._sizes
        return offsets, sizes

    def __len__(self) -> int:
        return len(self._offset)

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
        place = range(len(self))[at]
        return next(_made(self.columns(place, place + 1)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fragments) and len(self) == len(other) and all(map(Fragment.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def columns(self, begin: int = 0, end: int | None = None) -> Columns:
        """Of these, as Fragment has them, but for the box, which is offsets and sizes here."""
        end, table = len(self) if end is None else end, self.table
        first = table.first[begin : end + 1].tolist()
        within, part = slice(first[0], first[-1]), slice(begin, end)
        cuts = [slice(a - first[0], b - first[0]) for a, b in pairwise(first)]
        shape, offsets, sizes = (
            map(tuple(column[within].tolist()).__getitem__, cuts) for column in (table.shape, self._offsets, self._sizes)
        )
        dtype, role, sharing = (
            map(table.words.__getitem__, column[part].tolist()) for column in (table.dtype, table.role, table.sharing)
        )
        places = self._offset[part].tolist(), self._nbytes[part].tolist()
        return table.keys[part], dtype, shape, offsets, sizes, *places, role, sharing, table.tier[part].tolist()


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
    def of(keys: tuple[str, ...], words: tuple[str, ...], columns: Mapping[str, Ints]) -> Table:
        """The same as long as somebody has it."""
        made = Table(keys, words, columns)
        return Table._known.setdefault(made.digest, made)

    @staticmethod
    def known(digest: str) -> Table | None:
        return Table._known.get(digest)

    def __init__(self, keys: tuple[str, ...], words: tuple[str, ...], columns: Mapping[str, Ints]) -> None:
        self.keys, self.words = keys, words
        self._columns = {name: _narrow(columns[name]) for name in SHARED}
        self.dtype, self.role, self.sharing, self.tier, self.dims, self.shape = self._columns.values()
        self.first = np.cumsum(np.append(0, self.dims), dtype=np.int64)
        self.dims_max = int(self.dims.max(initial=0))
        self.encoded = self._encode()
        self.digest = digest_of(self.encoded)

    def _encode(self) -> bytes:
        data, where = pack(self._columns)
        packed: bytes = msgpack.packb([self.keys, self.words, where, data], unicode_errors="surrogatepass")
        return packed


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


def digest_of(encoded: bytes) -> str:
    """What a table is named by."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _narrow(column: Ints) -> Ints:
    """Unsigned, in as few bytes as its largest needs."""
    kinds = (np.uint8, np.uint16, np.uint32)
    most = int(column.max(initial=0))
    return column.astype(next((kind for kind in kinds if most <= np.iinfo(kind).max), np.int64))
