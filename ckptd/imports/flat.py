"""Tensors that were cut as ranges of their flattened elements: ZeRO's partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import flat_range_boxes
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.imports.stored import Place, Stored


def places(shape: Sequence[int], start: int, count: int, flat: Stored, at: int) -> Iterator[Place]:
    """Elements [start, start + count) of a tensor of this shape are those from ``at`` on of ``flat``. Raises CkptdError."""
    if not count:
        return
    if not flat.places or len(flat.shape) != 1 or at < 0 or at + count > flat.shape[0]:
        text = f"elements {at} to {at + count} of a buffer of shape {flat.shape}"
        raise CkptdError(text, hint="the files do not belong together")
    where, item, done = flat.places[0], ITEMSIZE[flat.dtype], 0
    if where.steps != (item,):
        raise CkptdError("a flat buffer with gaps", where=where.path)
    for box in flat_range_boxes(tuple(shape), start, start + count):
        yield Place.packed(box, where.path, where.at + (at + done) * item, flat.dtype)
        done += box.volume
