"""Layouts of the versions 1 to 3, whose fragments are rows, and of 4, whose boxes are columns: memory that an older daemon left may
hold them (P7)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgpack

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import pack
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import SHARED, Fragment
from ckptd.core.state_map.layout import ALIGN_BYTES, MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_reader import PAYLOAD_BYTES_MAX, TIER_MAX, Reader, is_key, is_whole, require

ROLES = frozenset(("param", "buffer", "optim", "extra", "rng"))
SHARINGS = frozenset((UNIQUE, REPLICA, MAYBE))
FROZEN_VERSION, WITHOUT_VERSION = 2, 3  # has a frozen part; says what it leaves out
COLUMNS_VERSION, COLUMNS_FIELDS = 4, 12
OLD_SHARED = tuple(name for name in SHARED if name != "rule")  # a table's columns then
HEAD_FIELDS = {1: 8, FROZEN_VERSION: 9, WITHOUT_VERSION: 10}  # by version
ROW_FIELDS = 10


def read_row(reader: Reader) -> Fragment:
    require(reader.length() == ROW_FIELDS, "a fragment has ten fields")
    value, numbers = reader.value, reader.numbers
    key, dtype = value(), value()
    require(is_key(key), "a fragment's key is not a text within bounds")
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
    if not (is_whole(tier, 0, TIER_MAX) and is_whole(offset, 0, PAYLOAD_BYTES_MAX) and offset % ALIGN_BYTES == 0):
        raise ValueError(f"{key}: tier or offset out of bounds, or offset not aligned")
    volume = math.prod(sizes) * ITEMSIZE[dtype]
    if type(nbytes) is not int or nbytes != volume or volume > PAYLOAD_BYTES_MAX:
        raise ValueError(f"{key}: nbytes is not volume times item size, or out of bounds")
    return Fragment(key, dtype, shape, Box(offsets, sizes), offset, nbytes, role, sharing, tier)


def old_frozen(layout: Layout, version: int) -> bytes:
    """As such a frozen part was written then: its slot is named so."""
    head = [layout.rank, layout.world, 0, layout.payload_bytes, "", ()]
    if version < COLUMNS_VERSION:
        rows = list(zip(*layout.fragments.columns(), strict=True))
        in_rows: bytes = msgpack.packb([FROZEN_VERSION, *head, rows, layout.frozen_bytes])
        return in_rows
    return in_columns(layout, head)


def in_columns(layout: Layout, head: Sequence[object]) -> bytes:
    """As version 4 had it. ``head``: from the rank to the aliases."""
    table = layout.fragments.table
    shared, where = pack({name: getattr(table, name) for name in OLD_SHARED})
    named = msgpack.packb([table.keys, table.words, where, shared], unicode_errors="surrogatepass")
    offsets, sizes = layout.fragments.flat_boxes()
    own, where = pack({"offsets": offsets, "sizes": sizes, "offset": layout.fragments.offset})
    fields = [COLUMNS_VERSION, *head, layout.frozen_bytes, layout.without, named, where, own]
    packed: bytes = msgpack.packb(fields)
    return packed
