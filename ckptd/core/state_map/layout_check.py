"""Reading a layout that came from elsewhere: every number is checked before anything is addressed with it (P13)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import prod

import msgpack
import numpy as np

from ckptd.core.state_map.box import disjoint_spans
from ckptd.core.state_map.columns import Column, Ints, unpack
from ckptd.core.state_map.cuts import CUTS_MAX, PARTS_MAX, RULES_MAX, Cut
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import OWN, SHARED, Fragment, Fragments, Table, digest_of
from ckptd.core.state_map.layout import ALIGN_BYTES, PLACED, VERSION, Layout, followed
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
    TableNotHere,
    require,
)
from ckptd.core.state_map.layout_rows import (
    COLUMNS_FIELDS,
    COLUMNS_VERSION,
    FROZEN_VERSION,
    HEAD_FIELDS,
    OLD_SHARED,
    ROLES,
    SHARINGS,
    WITHOUT_VERSION,
    read_row,
)

RAGGED_BOXES_MAX = 2000  # of one key on one rank that lie in no grid; a flat range is at most 2 * ndim - 1
WORDS_MAX = len(ITEMSIZE) + len(ROLES) + len(SHARINGS)
FIELDS = 14
DIGEST_CHARACTERS_MAX = 32
DIMENSIONS_EACH_MAX = 8  # of a fragment, as a mean: columns may lie over each other, so that few bytes would unfold to many numbers

Find = Callable[[str], Table | None]


def decode_layout(data: bytes, find: Find | None = None) -> Layout:
    """The inverse of ``Layout.encoded``, and of ``Layout.leaf`` whose table ``find`` knows by its digest (None: it must come with
    its own). TableNotHere: it does not. ValueError: anything else (bounds, alignment, overlap, order of tiers)."""
    if len(data) > LAYOUT_BYTES_MAX:
        raise ValueError(f"layout of {len(data)} bytes, at most {LAYOUT_BYTES_MAX} are read")
    reader = Reader(data)
    try:
        layout = _read(reader, data, find)
    except TableNotHere:
        raise
    except (ValueError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise ValueError(f"not a layout: {error}") from error
    require(reader.at_end(), "not a layout: it goes on")
    return layout


def _read(reader: Reader, data: bytes, find: Find | None) -> Layout:
    fields, version = reader.length(), reader.value()
    known = {**HEAD_FIELDS, COLUMNS_VERSION: COLUMNS_FIELDS, VERSION: FIELDS}
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
    if version >= COLUMNS_VERSION:
        frozen_bytes, without = reader.whole(0, room, "frozen_bytes"), reader.keys(FRAGMENTS_MAX)
        fragments = _fragments(reader, version, find, objects_capacity)
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
    named = _aliases(pairs, fragments.table.names)
    layout = Layout(rank, world, fragments, objects_capacity, payload_bytes, plan_id, named, frozen_bytes, without)
    if version != VERSION:
        layout.was_written(data, version)
    return layout


def _fragments(reader: Reader, version: int, find: Find | None, objects_capacity: int) -> Fragments:
    table = _table(reader.value(), version, find)
    places, live = ((), PLACED) if version == COLUMNS_VERSION else _places(reader, table)
    columns = _columns(reader, OWN)
    shape, offsets, sizes = table.shape[table.without_rule], columns["offsets"], columns["sizes"]
    require(len(offsets) == len(sizes) == len(shape), "box and shape differ in dimensions")
    require((sizes <= shape).all() and (offsets <= shape - sizes).all(), "a box outside its shape")
    nbytes = table.cut_nbytes(places, PAYLOAD_BYTES_MAX)
    if nbytes is None:
        nbytes = table.once(table.nbytes(table.boxes(places, offsets, sizes)[1], PAYLOAD_BYTES_MAX))
    if live != PLACED:
        require(not len(columns["offset"]) and float(nbytes.column.sum(dtype=np.float64)) <= PAYLOAD_BYTES_MAX, "two offsets")
        return Fragments.of(table, places, columns, nbytes, followed(table, nbytes, objects_capacity, live))
    require(len(columns["offset"]) == len(table.keys), "columns of other lengths")
    require(columns["offset"].max(initial=0) <= PAYLOAD_BYTES_MAX, "offset out of bounds")
    require(not (columns["offset"] % ALIGN_BYTES).any(), "offset not aligned")
    return Fragments.of(table, places, columns, nbytes)


def _places(reader: Reader, table: Table) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Where the rank stands in each of the table's cuts, and how many of its fragments are live where they follow each other."""
    places = tuple([reader.numbers() for _ in range(reader.count(RULES_MAX, "places"))])
    require(list(map(len, places)) == list(map(len, table.rules)), "other places than cuts")
    parts = [parts for cuts in table.rules for _, parts in cuts]
    require(all(map(int.__lt__, chain.from_iterable(places), parts)), "a place outside of its cut")
    return places, reader.whole(PLACED, len(table.keys), "live fragments")


def _table(said: bytes | str, version: int, find: Find | None) -> Table:
    if isinstance(said, str) and find is not None:
        named = find(said)
        if named is None:
            raise TableNotHere(said[:DIGEST_CHARACTERS_MAX])
        return named
    if not isinstance(said, bytes):
        raise ValueError("its table is not here")
    known = Table.known(digest_of(said)) if version == VERSION else None
    return known if known is not None else _read_table(Reader(said), version)


def _read_table(reader: Reader, version: int) -> Table:
    fields = 5 if version == VERSION else 4
    require(reader.count(fields, "a table") == fields, "a table has another number of fields")
    keys, words = reader.keys(FRAGMENTS_MAX), reader.keys(WORDS_MAX)
    columns = _columns(reader, SHARED if version == VERSION else OLD_SHARED)
    columns.setdefault("rule", np.zeros(len(keys), np.int64))
    rules = [_cuts(reader) for _ in range(reader.count(RULES_MAX, "cuts"))] if version == VERSION else []
    require(reader.at_end(), "a table goes on")
    per_fragment = [column for name, column in columns.items() if name != "shape"]
    require(all(len(column) == len(keys) for column in per_fragment), "columns of other lengths")
    for name, most in (("dims", DIMENSIONS_MAX), ("shape", ELEMENTS_MAX), ("tier", TIER_MAX), ("rule", len(rules))):
        require(columns[name].max(initial=0) <= most, f"{name} out of bounds")
    require(len(columns["shape"]) == columns["dims"].sum(), "shape differs in dimensions")
    wide = len(keys) * int(columns["dims"].max(initial=0))
    require(wide <= FRAGMENTS_MAX * DIMENSIONS_EACH_MAX, "more dimensions than there can be")
    require(list(words) == sorted(set(words)), "words are not in order, or twice")
    for name, known in (("dtype", ITEMSIZE), ("role", ROLES), ("sharing", SHARINGS)):
        used = np.unique(columns[name]).tolist()
        require(all(at < len(words) and words[at] in known for at in used), f"unknown {name}")
    for number, cuts in enumerate(rules):
        fewest = int(columns["dims"][columns["rule"] == number + 1].min(initial=DIMENSIONS_MAX))
        require(all(dim < fewest for dim, _ in cuts), "a cut along a dimension that is not there")
    return Table.of(keys, words, columns, rules)


def _cuts(reader: Reader) -> tuple[Cut, ...]:
    found = []
    for _ in range(reader.count(CUTS_MAX, "cuts of one tensor")):
        require(reader.count(2, "a cut") == 2, "a cut is a dimension and parts")
        found.append((reader.whole(0, DIMENSIONS_MAX, "dimension"), reader.whole(1, PARTS_MAX, "parts")))
    require(prod(parts for _, parts in found) <= PARTS_MAX, "more parts than there can be ranks")
    return tuple(found)


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


def _check_order(fragments: Fragments, part: slice, start: int, stop: int) -> None:
    """One part: in the order of offsets without overlap, tiers descending, so that every tier is a prefix."""
    offset, tier = fragments.offset[part], fragments.tier[part]
    end = offset + fragments.nbytes[part]
    apart = (offset >= np.concatenate(([start], end[:-1]))[: len(offset)]).all() and (tier[1:] <= tier[:-1]).all()
    require(apart, "fragments overlap or leave their part of the payload, or tiers do not descend")
    require(int(end.max(initial=start)) <= stop, "fragments reach past their part of the payload")


def _check_keys(fragments: Fragments) -> None:
    """A key is one tensor: one dtype, shape and role, and no element twice."""
    if len(fragments.table.names) == len(fragments):
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
