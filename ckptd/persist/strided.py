"""Boxes as strided views of raw bytes: where a box lies in another one that is stored in C order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptd.core.state_map.box import Box

_UNIT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Elements = np.ndarray[Any, np.dtype[Any]]


def elements(data: Bytes, sizes: tuple[int, ...], item: int) -> Elements:
    """Raw bytes as an n-d array of plain unsigned numbers of the element's size. The address may be unaligned."""
    array: Elements = np.ndarray(sizes, _UNIT[item], data.data)
    return array


def window(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Where ``inner`` lies in an array of ``outer``."""
    spans = zip(inner.offsets, inner.sizes, outer.offsets, strict=True)
    return tuple(slice(at - base, at - base + size) for at, size, base in spans)


def strides(sizes: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Bytes between neighbours per dimension, C order."""
    return tuple(item * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def extent(outer: Box, inner: Box, item: int) -> tuple[int, int]:
    """First byte and end of ``inner`` (not empty) inside ``outer`` stored in C order from byte 0."""
    steps = strides(outer.sizes, item)
    corner = zip(inner.offsets, outer.offsets, steps, strict=True)
    first = sum((at - base) * step for at, base, step in corner)
    span = sum((size - 1) * step for size, step in zip(inner.sizes, steps, strict=True))
    return first, first + span + item


def inside(data: Bytes, outer: Box, inner: Box, item: int) -> Elements:
    """``inner`` as a view of ``data``, which holds ``outer``'s bytes from inner's first to its last."""
    array: Elements = np.ndarray(inner.sizes, _UNIT[item], data.data, 0, strides(outer.sizes, item))
    return array


def slabs(outer: Box, inner: Box, item: int, bytes_max: int) -> Iterator[Box]:
    """``inner`` cut along its first dimensions until each part spans at most ``bytes_max`` bytes of ``outer``."""
    start, stop = extent(outer, inner, item)
    dim = next((dim for dim, size in enumerate(inner.sizes) if size > 1), None)
    if stop - start <= bytes_max or dim is None:
        yield inner
        return
    step = strides(outer.sizes, item)[dim]
    one = stop - start - (inner.sizes[dim] - 1) * step  # span of a single row
    rows = max((bytes_max - one) // step + 1, 1)
    for at in range(0, inner.sizes[dim], rows):
        offsets = (*inner.offsets[:dim], inner.offsets[dim] + at, *inner.offsets[dim + 1 :])
        sizes = (*inner.sizes[:dim], min(rows, inner.sizes[dim] - at), *inner.sizes[dim + 1 :])
        yield from slabs(outer, Box(offsets, sizes), item, bytes_max)
