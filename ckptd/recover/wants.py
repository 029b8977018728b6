"""What a rank wants back: slices of logical tensors in its own new sharding, and objects by name."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE

WANTS_MAX = 4_000_000  # slices of one rank
NDIM_MAX = 64


@dataclass(frozen=True, slots=True)
class Slice:
    key: str
    dtype: str
    shape: tuple[int, ...]  # global
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.volume * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Wants:
    tensors: tuple[Slice, ...]
    objects: tuple[str, ...]
    first: int = 0  # so many of the tensors are brought before all others

    @staticmethod
    def decode(data: bytes) -> Wants:
        """Raises ValueError for anything malformed or out of bounds: the daemon believes no client blindly."""
        try:
            body = msgpack.unpackb(data, max_array_len=WANTS_MAX)
            rows = [Slice(k, d, tuple(s), Box(tuple(o), tuple(z))) for k, d, s, o, z in body["tensors"]]
            objects, first = tuple(body["objects"]), body.get("first", 0)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ValueError(f"wants do not parse: {error}") from error
        for row in rows:
            _check(row)
        if type(first) is not int or not all(type(name) is str for name in objects):
            raise ValueError("wants: objects are no names, or their first part no number")
        return Wants(tuple(rows), objects, min(max(first, 0), len(rows)))


def _check(row: Slice) -> None:
    box = row.box
    if not type(row.key) is type(row.dtype) is str:
        raise ValueError("wants: a key or a dtype is no text")
    if row.dtype not in ITEMSIZE or len(row.shape) > NDIM_MAX:
        raise ValueError(f"wants: bad dtype or shape of {row.key}: {row.dtype}")
    if len(box.offsets) != len(row.shape) or len(box.sizes) != len(row.shape):
        raise ValueError(f"wants: box and shape of {row.key} differ in dimensions")
    for offset, size, extent in zip(box.offsets, box.sizes, row.shape, strict=True):
        if not type(offset) is type(size) is type(extent) is int or min(offset, size) < 0:
            raise ValueError(f"wants: bad box of {row.key}")
        if offset + size > extent:
            raise ValueError(f"wants: box of {row.key} is outside of its shape")
