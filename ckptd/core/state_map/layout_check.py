"""Reading a layout that came from elsewhere: every number is checked before anything is addressed with it (P13)."""

from __future__ import annotations

import msgpack
import numpy as np

from ckptd.core.state_map.box import disjoint_spans
from ckptd.core.state_map.columns import Column, Ints, unpack
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import OWN, SHARED, Fragment, Fragments, Table, digest_of
from ckptd.core.state_map.layout import ALIGN_BYTES, COLUMNS_VERSION, Layout
from ckptd.core.state_map.layout_reader import (
    DIMENSIONS_MAX,
    ELEMENTS_MAX,
    FRAGMENTS_MAX,
    KEY_CHARACTERS_MAX,
    LAYOUT_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    TIER_MAX,
    WORLD_MAX,
    Reader,
    require,
)
from ckptd.core.state_map.layout_rows import (
    FROZEN_VERSION,
    HEAD_FIELDS,
    ROLES,
    SHARINGS,
    WITHOUT_VERSION,
    read_row,
)

RAGGED_BOXES_MAX = 2000  # of one key on one rank that lie in no grid; a flat range is at most 2 * ndim - 1
WORDS_MAX = len(ITEMSIZE) + len(ROLES) + len(SHARINGS)
FIELDS = 12
DIMENSIONS_EACH_MAX = 8  # of a fragment, as a mean: columns may lie over each other, so that few bytes would unfold to many numbers


def decode_layout(data: bytes, leaf: bool = False) -> Layout:
    """The inverse of ``Layout.encoded``, and of ``Layout.leaf``. ValueError: anything else (bounds, alignment, overlap, order of
    tiers)."""
    if len(data) > LAYOUT_BYTES_MAX:
        raise ValueError(f"layout of {len(data)} bytes, at most {LAYOUT_BYTES_MAX} are read")
    reader = Reader(data)
    try:
        layout = _read(reader, data, leaf)
    except (ValueError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise ValueError(f"not a layout: {error}") from error
    require(reader.at_end(), "not a layout: it goes on")
    return layout


def _read(reader: Reader, data: bytes, leaf: bool) -> Layout:
    fields, version = reader.length(), reader.value()
    known = {**HEAD_FIELDS, COLUMNS_VERSION: FIELDS}
    require(type(version) is int and version in known, f"layout of another version, this reads {sorted(known)}")
    require(fields == known[version], "a field too many or too few")
    rank = reader.whole(0, WORLD_MAX, "rank")
    world = reader.whole(rank + 1, WORLD_MAX, "world")
    objects_capacity = reader.whole(0, PAYLOAD_BYTES_MAX, "objects_capacity")
    payload_bytes = reader.whole(objects_capacity, PAYLOAD_BYTES_MAX, "payload_bytes")
    require(objects_capacity % ALIGN_BYTES == 0, "objects_capacity not aligned")
    plan_id = reader.value()
    require(isinstance(plan_id, str) and len(plan_id) <= KEY_CHARACTERS_MAX, "plan_id is not a short text")
    pairs = [reader.keys(2) for _ in range(reader.count(FRAGMENTS_MAX, "aliases"))]
    room = payload_bytes - objects_capacity
    if version == COLUMNS_VERSION:
        frozen_bytes, without = reader.whole(0, room, "frozen_bytes"), reader.keys(FRAGMENTS_MAX)
        fragments = _fragments(reader, leaf)
    else:
        fragments = Fragments([read_row(reader) for _ in range(reader.count(FRAGMENTS_MAX, "fragments"))])
        frozen_bytes = reader.whole(version == FROZEN_VERSION, room, "frozen_bytes") if version > 1 else 0
        without = reader.keys(FRAGMENTS_MAX) if version == WITHOUT_VERSION else ()
        require(bool(without) == (version == WITHOUT_VERSION), "nothing is left out")
    frozen_at = payload_bytes - frozen_bytes
    require(not frozen_bytes or frozen_at % ALIGN_BYTES == 0, "the frozen part is not aligned")
    live = int((fragments.offset < frozen_at).sum())
    _check_order(fragments, slice(0, live), objects_capacity, frozen_at)
    _check_order(fragments, slice(live, len(fragments)), frozen_at, payload_bytes)
    _check_keys(fragments)
    named = _aliases(pairs, frozenset(fragments.table.keys))
    layout = Layout(rank, world, fragments, objects_capacity, payload_bytes, plan_id, named, frozen_bytes, without)
    if version != COLUMNS_VERSION:
        layout.was_in_rows(data)
    return layout


def _fragments(reader: Reader, leaf: bool) -> Fragments:
    said = reader.value()
    named = said if leaf and isinstance(said, str) else digest_of(said) if isinstance(said, bytes) else ""
    table = Table.known(named) or _table(said)
    columns = _columns(reader, OWN)
    dims, shape, offsets, sizes = table.dims, table.shape, columns["offsets"], columns["sizes"]
    require(len(columns["offset"]) == len(table.keys), "columns of other lengths")
    require(len(offsets) == len(sizes) == len(shape), "box and shape differ in dimensions")
    require(columns["offset"].max(initial=0) <= PAYLOAD_BYTES_MAX, "offset out of bounds")
    require(not (columns["offset"] % ALIGN_BYTES).any(), "offset not aligned")
    require((sizes <= shape).all() and (offsets <= shape - sizes).all(), "a box outside its shape")
    return Fragments.of(table, columns, _nbytes(table, dims.astype(np.int64), sizes))


def _table(said: bytes | str) -> Table:
    if not isinstance(said, bytes):
        raise ValueError("its table is not here")
    reader = Reader(said)
    require(reader.count(4, "a table") == 4, "a table has four fields")
    keys, words = reader.keys(FRAGMENTS_MAX), reader.keys(WORDS_MAX)
    columns = _columns(reader, SHARED)
    require(reader.at_end(), "a table goes on")
    per_fragment = [column for name, column in columns.items() if name != "shape"]
    require(all(len(column) == len(keys) for column in per_fragment), "columns of other lengths")
    for name, most in (("dims", DIMENSIONS_MAX), ("shape", ELEMENTS_MAX), ("tier", TIER_MAX)):
        require(columns[name].max(initial=0) <= most, f"{name} out of bounds")
    require(len(columns["shape"]) == columns["dims"].sum(), "shape differs in dimensions")
    wide = len(keys) * int(columns["dims"].max(initial=0))
    require(wide <= FRAGMENTS_MAX * DIMENSIONS_EACH_MAX, "more dimensions than there can be")
    require(list(words) == sorted(set(words)), "words are not in order, or twice")
    for name, known in (("dtype", ITEMSIZE), ("role", ROLES), ("sharing", SHARINGS)):
        used = np.unique(columns[name]).tolist()
        require(all(at < len(words) and words[at] in known for at in used), f"unknown {name}")
    return Table.of(keys, words, columns)


def _columns(reader: Reader, names: tuple[str, ...]) -> dict[str, Ints]:
    where = [_column(reader) for _ in range(reader.count(len(names), "columns"))]
    data = reader.value()
    require(isinstance(data, bytes), "columns are bytes")
    require(all(column.rows <= FRAGMENTS_MAX * DIMENSIONS_EACH_MAX for column in where), "more dimensions than there can be")
    columns = unpack(data, where, names)
    require(columns.keys() == set(names), "columns are missing")
    require(all(column.min(initial=0) >= 0 for column in columns.values()), "numbers below 0")
    return columns


def _column(reader: Reader) -> Column:
    require(reader.count(4, "a column") == 4, "a column is a name, a type, a place and a length")
    name, kind, at, rows = (reader.value() for _ in range(4))
    require(isinstance(name, str) and isinstance(kind, str) and type(at) is int and type(rows) is int, "not a column")
    return Column(name, kind, at, rows)


def _nbytes(table: Table, dims: Ints, sizes: Ints) -> Ints:
    """Of each fragment."""
    some = dims > 0  # the others are numbers, of one element
    starts = (np.cumsum(dims) - dims)[some]
    nbytes = np.array([ITEMSIZE.get(word, 0) for word in table.words], np.int64)[table.dtype]
    if len(starts):
        empty = np.minimum.reduceat(sizes, starts) == 0
        with np.errstate(all="ignore"):  # of what is empty any number of its other sizes is fine
            about = np.multiply.reduceat(sizes.astype(np.float64), starts) * nbytes[some]
        require(((about <= PAYLOAD_BYTES_MAX) | empty).all(), "more elements than there can be")
        nbytes[some] *= np.where(empty, 0, np.multiply.reduceat(sizes, starts))
    return nbytes


def _check_order(fragments: Fragments, part: slice, start: int, stop: int) -> None:
    """One part: in the order of offsets without overlap, tiers descending, so that every tier is a prefix."""
    offset, tier = fragments.offset[part], fragments.tier[part]
    end = offset + fragments.nbytes[part]
    apart = (offset >= np.concatenate(([start], end[:-1]))[: len(offset)]).all() and (tier[1:] <= tier[:-1]).all()
    require(apart, "fragments overlap or leave their part of the payload, or tiers do not descend")
    require(int(end.max(initial=start)) <= stop, "fragments reach past their part of the payload")


def _check_keys(fragments: Fragments) -> None:
    """A key is one tensor: one dtype, shape and role, and no element twice."""
    keys = fragments.table.keys
    if len(set(keys)) == len(keys):
        return
    by_key: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        by_key.setdefault(fragment.key, []).append(fragment)
    for key, parts in by_key.items():
        if len(parts) == 1:
            continue
        kinds = {(part.dtype, part.shape, part.role) for part in parts}
        require(len(kinds) == 1, f"{key}: fragments of different dtype, shape or role")
        spans = [(part.box.offsets, part.box.sizes) for part in parts]
        apart = len(set(spans)) == len(spans) and disjoint_spans(spans, RAGGED_BOXES_MAX)
        require(apart, f"{key}: boxes overlap")


def _aliases(pairs: list[tuple[str, ...]], keys: frozenset[str]) -> tuple[tuple[str, str], ...]:
    result: dict[str, str] = {}
    for pair in pairs:
        require(len(pair) == 2, "an alias is two keys")
        alias, key = pair
        require(alias not in result and alias not in keys and alias != key, f"{alias}: alias is taken")
        result[alias] = key
    return tuple(result.items())
