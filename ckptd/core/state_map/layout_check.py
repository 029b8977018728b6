"""Reading a layout that came from elsewhere: every number is checked before anything is addressed with it (P13)."""

from __future__ import annotations

import math
from typing import Any

import msgpack

from ckptd.core.state_map.box import Box, disjoint_spans
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import (
    ALIGN_BYTES,
    FROZEN_VERSION,
    LAYOUT_VERSION,
    MAYBE,
    REPLICA,
    UNIQUE,
    WITHOUT_VERSION,
    Fragment,
    Layout,
)

LAYOUT_BYTES_MAX = 256 << 20  # encoded
FRAGMENTS_MAX = 1 << 18  # of one rank
DIMENSIONS_MAX = 64
KEY_CHARACTERS_MAX = 4096
KEY_BYTES_MAX = 4 * KEY_CHARACTERS_MAX
RAGGED_BOXES_MAX = 2000  # of one key on one rank that lie in no grid; a flat range is at most 2 * ndim - 1
PAYLOAD_BYTES_MAX = 1 << 50
ELEMENTS_MAX = 1 << 62  # along one dimension
WORLD_MAX = 1 << 20
TIER_MAX = 255
ROLES = frozenset(("param", "buffer", "optim", "extra", "rng"))
SHARINGS = frozenset((UNIQUE, REPLICA, MAYBE))
HEAD_FIELDS = {LAYOUT_VERSION: 8, FROZEN_VERSION: 9, WITHOUT_VERSION: 10}
ROW_FIELDS = 10


def decode_layout(data: bytes) -> Layout:
    """The inverse of ``Layout.encoded``. ValueError: anything else (bounds, alignment, overlap, order of tiers)."""
    if len(data) > LAYOUT_BYTES_MAX:
        raise ValueError(f"layout of {len(data)} bytes, at most {LAYOUT_BYTES_MAX} are read")
    reader = _Reader(data)
    try:
        layout = _read(reader)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a layout: {error}") from error
    _require(reader.at_end(), "not a layout: it goes on")
    return layout


class _Reader:
    """One value after the other. Lists are read entry by entry, so that nothing is built of what does not fit (D20)."""

    def __init__(self, data: bytes) -> None:
        self._nbytes = len(data)
        unpacker = msgpack.Unpacker(
            max_buffer_size=max(len(data), 1), max_array_len=0, max_map_len=0, max_ext_len=0, max_bin_len=0,
            max_str_len=KEY_BYTES_MAX,
        )  # fmt: skip
        unpacker.feed(data)
        self._unpacker = unpacker
        self.value, self.length = unpacker.unpack, unpacker.read_array_header

    def at_end(self) -> bool:
        return bool(self._unpacker.tell() == self._nbytes)

    def count(self, most: int, what: str) -> int:
        """Of the entries of the list that comes."""
        found: int = self.length()
        _require(found <= most, f"{what}: {found} of them, at most {most}")
        return found

    def numbers(self) -> tuple[int, ...]:
        found = tuple([self.value() for _ in range(self.count(DIMENSIONS_MAX, "dimensions"))])
        for number in found:
            if type(number) is not int or not 0 <= number <= ELEMENTS_MAX:
                raise ValueError("shape or box is not made of numbers within bounds")
        return found

    def keys(self, most: int) -> tuple[str, ...]:
        found = tuple(self.value() for _ in range(self.count(most, "texts")))
        _require(all(map(_key, found)), "not texts within bounds")
        return found


def _read(reader: _Reader) -> Layout:
    fields, version = reader.length(), reader.value()
    known = type(version) is int and version in HEAD_FIELDS
    _require(known, f"layout of another version, this reads {sorted(HEAD_FIELDS)}")
    _require(fields == HEAD_FIELDS[version], "a field too many or too few")
    rank, world, objects_capacity, payload_bytes, plan_id = (reader.value() for _ in range(5))
    _require(_whole(world, 1, WORLD_MAX) and _whole(rank, 0, world - 1), "rank outside the world")
    _require(_whole(payload_bytes, 0, PAYLOAD_BYTES_MAX), "payload_bytes out of bounds")
    _require(_whole(objects_capacity, 0, payload_bytes), "objects_capacity out of bounds")
    _require(objects_capacity % ALIGN_BYTES == 0, "objects_capacity not aligned")
    _require(isinstance(plan_id, str) and len(plan_id) <= KEY_CHARACTERS_MAX, "plan_id is not a short text")
    pairs = [reader.keys(2) for _ in range(reader.count(FRAGMENTS_MAX, "aliases"))]
    fragments = tuple([_fragment(reader) for _ in range(reader.count(FRAGMENTS_MAX, "fragments"))])
    frozen_bytes = reader.value() if version != LAYOUT_VERSION else 0
    without = reader.keys(FRAGMENTS_MAX) if version == WITHOUT_VERSION else ()
    _require(bool(without) == (version == WITHOUT_VERSION), "nothing is left out")
    _require(_whole(frozen_bytes, 0, payload_bytes - objects_capacity), "frozen_bytes out of bounds")
    frozen_at = payload_bytes - frozen_bytes
    _require(version != FROZEN_VERSION or frozen_bytes > 0, "a frozen part of no bytes")
    _require(not frozen_bytes or frozen_at % ALIGN_BYTES == 0, "the frozen part is not aligned")
    live = tuple(fragment for fragment in fragments if fragment.offset < frozen_at)
    _check_order(live, objects_capacity, frozen_at)
    _check_order(fragments[len(live) :], frozen_at, payload_bytes)
    _check_keys(fragments)
    named = _aliases(pairs, fragments)
    return Layout(rank, world, fragments, objects_capacity, payload_bytes, plan_id, named, frozen_bytes, without)


def _fragment(reader: _Reader) -> Fragment:
    _require(reader.length() == ROW_FIELDS, "a fragment has ten fields")
    value, numbers = reader.value, reader.numbers
    key, dtype = value(), value()
    _require(_key(key), "a fragment's key is not a text within bounds")
    shape, offsets, sizes = numbers(), numbers(), numbers()
    offset, nbytes, role, sharing, tier = value(), value(), value(), value(), value()
    named = isinstance(dtype, str) and isinstance(role, str) and isinstance(sharing, str)
    if not (named and dtype in ITEMSIZE and role in ROLES and sharing in SHARINGS):
        raise ValueError(f"{key}: unknown dtype, role or sharing")
    if not len(shape) == len(offsets) == len(sizes):
        raise ValueError(f"{key}: box and shape differ in dimensions")
    for size, start, length in zip(shape, offsets, sizes):  # noqa: B905 - lengths are equal, and this loop is hot
        if start + length > size:
            raise ValueError(f"{key}: box {offsets}+{sizes} outside shape {shape}")
    if not (_whole(tier, 0, TIER_MAX) and _whole(offset, 0, PAYLOAD_BYTES_MAX) and offset % ALIGN_BYTES == 0):
        raise ValueError(f"{key}: tier or offset out of bounds, or offset not aligned")
    if type(nbytes) is not int or nbytes != math.prod(sizes) * ITEMSIZE[dtype]:
        raise ValueError(f"{key}: nbytes is not volume times item size")
    return Fragment(key, dtype, shape, Box(offsets, sizes), offset, nbytes, role, sharing, tier)


def _check_order(fragments: tuple[Fragment, ...], start: int, stop: int) -> None:
    """One part: in the order of offsets without overlap, tiers descending, so that every tier is a prefix."""
    end, tier = start, TIER_MAX
    for fragment in fragments:
        if fragment.offset < end or fragment.tier > tier:
            raise ValueError(f"{fragment.key}: overlaps what lies before it, or tiers do not descend")
        end, tier = fragment.offset + fragment.nbytes, fragment.tier
    _require(end <= stop, "fragments reach past their part of the payload")


def _check_keys(fragments: tuple[Fragment, ...]) -> None:
    """A key is one tensor: one dtype, shape and role, and no element twice."""
    by_key: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        by_key.setdefault(fragment.key, []).append(fragment)
    for key, parts in by_key.items():
        if len(parts) == 1:
            continue
        kinds = {(part.dtype, part.shape, part.role) for part in parts}
        _require(len(kinds) == 1, f"{key}: fragments of different dtype, shape or role")
        spans = [(part.box.offsets, part.box.sizes) for part in parts]
        apart = len(set(spans)) == len(spans) and disjoint_spans(spans, RAGGED_BOXES_MAX)
        _require(apart, f"{key}: boxes overlap")


def _aliases(pairs: list[tuple[str, ...]], fragments: tuple[Fragment, ...]) -> tuple[tuple[str, str], ...]:
    keys = {fragment.key for fragment in fragments}
    result: dict[str, str] = {}
    for pair in pairs:
        _require(len(pair) == 2, "an alias is two keys")
        alias, key = pair
        _require(alias not in result and alias not in keys and alias != key, f"{alias}: alias is taken")
        result[alias] = key
    return tuple(result.items())


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # not bool


def _key(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= KEY_CHARACTERS_MAX


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
