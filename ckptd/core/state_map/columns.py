"""Integer columns as bytes: what many rows share is said once, and no row is parsed (docs/FORMAT.md section 4)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ALIGN_BYTES = 8  # each column starts on this
TYPES = ("<u1", "<u2", "<u4", "<i8")  # the narrowest that has room for a column's values; numpy's names


class Column(NamedTuple):
    """``rows`` numbers of ``type`` from byte ``at`` on."""

    name: str
    type: str
    at: int
    rows: int


def pack(columns: Mapping[str, Ints]) -> tuple[bytes, list[Column]]:
    """The columns one after the other, and where each lies. Values must not be negative."""
    parts: list[bytes] = []
    found: list[Column] = []
    at = 0
    for name, values in columns.items():
        assert values.ndim == 1 and (not len(values) or int(values.min()) >= 0), f"{name}: counts and places"
        kind = next(kind for kind in TYPES if not len(values) or int(values.max()) <= np.iinfo(kind).max)
        data = values.astype(kind).tobytes()
        found.append(Column(name, kind, at, len(values)))
        parts += [data, bytes(-len(data) % ALIGN_BYTES)]
        at += len(data) + -len(data) % ALIGN_BYTES
    return b"".join(parts), found


def unpack(data: bytes | bytearray | memoryview, columns: Sequence[Column], names: Collection[str]) -> dict[str, Ints]:
    """The inverse of ``pack``, of the columns that have one of these names. ValueError: not columns, or they leave the data."""
    found: dict[str, Ints] = {}
    for column in columns:
        if column.name not in names:
            continue
        if column.type not in TYPES or column.name in found:
            raise ValueError(f"column {column.name}: of type {column.type!r}, or twice")
        length = column.rows * np.dtype(column.type).itemsize
        if min(column.at, column.rows) < 0 or column.at + length > len(data):
            raise ValueError(f"column {column.name} leaves the file")
        found[column.name] = np.frombuffer(data, column.type, column.rows, column.at).astype(np.int64)
    return found
