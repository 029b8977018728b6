"""Of very large tables the rows that changed (Check-N-Run, Eisenman et al., NSDI 2022, sections 4 and 5.1).

Between two checkpoints training looks up few rows of an embedding, and writes no others. A table that is named for it lies in
pieces, each with the sums of its rows before them. A later checkpoint has of a piece the rows whose sums are others by now, and
names the whole one that they replace rows of: a reader needs these two, and no chain.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Ints
from ckptd.persist.sums import SUM_BYTES

WHOLE, CHANGES = 0, 1
HEAD = struct.Struct("<B3xI")  # which of both; rows that follow
PLACE = struct.Struct("<QIH2x")  # of the whole one: first byte and block in its file; bytes of the file's name
NUMBER_BYTES = 4  # of a row's number
HEAD_BYTES_MAX = 4096  # with the name
ROW_BYTES_MIN = 64  # the sums of shorter ones would be more than a quarter of them


class Place(NamedTuple):
    """Where the whole piece lies."""

    path: str
    at: int
    block: int


def row_bytes(box: Box, item: int) -> int:
    """Rows are those of the last dimension."""
    return box.sizes[-1] * item if box.sizes else item


def fits(box: Box, item: int) -> bool:
    return len(box.sizes) > 1 and row_bytes(box, item) >= ROW_BYTES_MIN


def whole_size(rows: int, width: int) -> int:
    """Bytes of a whole piece. width: bytes of a row."""
    return HEAD.size + rows * (SUM_BYTES + width)


def whole_of(box: Box, item: int) -> int:
    return whole_size(box.volume // box.sizes[-1], row_bytes(box, item))


def whole(values: memoryview, sums: bytes) -> bytes:
    return b"".join((HEAD.pack(WHOLE, len(sums) // SUM_BYTES), sums, values))


def changes(values: memoryview, width: int, changed: Ints, place: Place) -> bytes:
    path = place.path.encode()
    table = np.frombuffer(values, np.uint8).reshape(-1, width)
    head = HEAD.pack(CHANGES, len(changed)) + PLACE.pack(place.at, place.block, len(path))
    return b"".join((head, path, changed.astype("<u4").tobytes(), table[changed].tobytes()))


def place_in(frame: memoryview) -> Place | None:
    """None: it is a whole one. Raises ValueError: it is neither."""
    if len(frame) < HEAD.size or frame[0] not in (WHOLE, CHANGES):
        raise ValueError("no rows of a table")
    if frame[0] == WHOLE:
        return None
    if len(frame) < HEAD.size + PLACE.size:
        raise ValueError("rows of no table")
    at, block, length = PLACE.unpack_from(frame, HEAD.size)
    name = bytes(frame[HEAD.size + PLACE.size : HEAD.size + PLACE.size + length])
    if len(name) < length:
        raise ValueError("a name that is cut short")
    return Place(name.decode(), at, block)


def decode(frame: memoryview, box: Box, item: int, base: Callable[[Place, int], memoryview]) -> memoryview:
    """The values' bytes. base: the frame of a whole one, of so many bytes. Raises ValueError: these are no rows of this box; and
    what ``base`` raises."""
    width, rows = row_bytes(box, item), box.volume * item // max(row_bytes(box, item), 1)
    place = place_in(frame)
    if place is None:
        return memoryview(_values(frame, rows, width))
    _, count = HEAD.unpack_from(frame)
    begin = HEAD.size + PLACE.size + len(place.path.encode())
    if len(frame) != begin + count * (NUMBER_BYTES + width):
        raise ValueError("rows of another number")
    numbers = np.frombuffer(frame, "<u4", count, begin)
    if count and (int(numbers.max()) >= rows or bool((np.diff(numbers.astype(np.int64)) <= 0).any())):
        raise ValueError("rows that the table does not have")
    table = np.frombuffer(_values(base(place, whole_size(rows, width)), rows, width), np.uint8).reshape(rows, width).copy()
    table[numbers] = np.frombuffer(frame, np.uint8, count * width, begin + count * NUMBER_BYTES).reshape(count, width)
    found: memoryview = table.reshape(-1).data
    return found


def _values(frame: memoryview, rows: int, width: int) -> memoryview:
    if place_in(frame) is not None or HEAD.unpack_from(frame)[1] != rows or len(frame) != whole_size(rows, width):
        raise ValueError("not the whole of these rows")
    return frame[HEAD.size + rows * SUM_BYTES :]
