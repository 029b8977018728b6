"""What a rank wants back: slices of logical tensors in its own new sharding, and objects by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.arena.objects import OBJECTS_MAX
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.recovery import Want

WANTS_MAX = 1 << 18  # slices of one rank
WANTS_BYTES_MAX = 64 << 20
NDIM_MAX = 64
VOLUME_MAX = 1 << 58  # elements: their bytes are an int64


@dataclass(frozen=True, slots=True)
class Wants:
    tensors: tuple[Want, ...]  # their numbers are their places
    objects: tuple[str, ...]
    first: int = 0  # so many of the tensors are brought before all others

    @staticmethod
    def decode(data: bytes) -> Wants:
        """Raises ValueError for anything malformed or out of bounds: the daemon believes no client blindly."""
        try:
            body = _DECODER.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"wants do not parse: {error}") from error
        ranks = body.ranks
        rows = tuple([Want(i, row[0], row[1], row[2], Box(row[3], row[4]), ranks.get(i)) for i, row in enumerate(body.tensors)])
        for row in rows:
            _check(row)
        return Wants(rows, tuple(body.objects), min(max(body.first, 0), len(rows)))


_Dimensions = Annotated[tuple[int, ...], Meta(max_length=NDIM_MAX)]


class _Body(msgspec.Struct):
    """A rank says it, so it is read into its types, and nothing else is built (D20)."""

    tensors: Annotated[list[tuple[str, str, _Dimensions, _Dimensions, _Dimensions]], Meta(max_length=WANTS_MAX)]
    objects: Annotated[list[str], Meta(max_length=OBJECTS_MAX)]
    first: int = 0
    ranks: Annotated[dict[int, int], Meta(max_length=WANTS_MAX)] = {}  # of a row: whose value, where it is not the rank's own


_DECODER = msgspec.msgpack.Decoder(_Body)


def _check(row: Want) -> None:
    box = row.box
    if row.dtype not in ITEMSIZE or len(row.shape) > NDIM_MAX:
        raise ValueError(f"wants: bad dtype or shape of {row.key}: {row.dtype}")
    if math.prod(row.shape) > VOLUME_MAX:
        raise ValueError(f"wants: {row.key} has more elements than there can be")
    if len(box.offsets) != len(row.shape) or len(box.sizes) != len(row.shape):
        raise ValueError(f"wants: box and shape of {row.key} differ in dimensions")
    for offset, size, extent in zip(box.offsets, box.sizes, row.shape, strict=True):
        if min(offset, size) < 0:
            raise ValueError(f"wants: bad box of {row.key}")
        if offset + size > extent:
            raise ValueError(f"wants: box of {row.key} is outside of its shape")
