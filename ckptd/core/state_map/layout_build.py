"""From a rank's fragments to the layout of its payload: the live ones, the frozen ones, tiers descending, then as given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.cuts import Place
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import Fragment, Fragments
from ckptd.core.state_map.layout import Layout, align_up, following


class LayoutItem(NamedTuple):
    """A fragment that has no place yet. A plain tuple in this order serves as well."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    role: str
    sharing: str
    tier: int
    frozen: bool = False
    cuts: Sequence[Place] | None = None  # that make the box of the shape, where that is known


def build_layout(
    rank: int,
    world: int,
    items: Sequence[LayoutItem | tuple[str, str, tuple[int, ...], Box, str, str, int]],
    objects_capacity: int = 0,
    plan_id: str = "",
    aliases: Sequence[tuple[str, str]] = (),
    without: Sequence[str] = (),
) -> Layout:
    """Assign offsets. ``objects_capacity`` is rounded up to ALIGN_BYTES. ValueError: a dtype without a safetensors name."""
    objects_capacity = align_up(objects_capacity)
    rows = sorted((LayoutItem(*item) for item in items), key=place)
    for row in rows:
        if row.dtype not in ITEMSIZE:
            raise ValueError(f"{row.key}: dtype {row.dtype!r} has no safetensors name")
    nbytes = [row.box.volume * ITEMSIZE[row.dtype] for row in rows]
    live = sum(not row.frozen for row in rows)
    offset = following(np.array(nbytes, np.int64), objects_capacity, live).tolist()
    end = align_up(offset[-1] + nbytes[-1]) if rows else objects_capacity
    frozen_bytes = end - offset[live] if live < len(rows) else 0
    found = (
        Fragment(row.key, row.dtype, tuple(row.shape), row.box, at, length, row.role, row.sharing, row.tier)
        for row, at, length in zip(rows, offset, nbytes, strict=True)
    )
    fragments = Fragments(found, [row.cuts for row in rows])
    pairs = tuple((alias, key) for alias, key in aliases)
    return Layout(rank, world, fragments, objects_capacity, end, plan_id, pairs, frozen_bytes, tuple(without))


def place(item: LayoutItem) -> tuple[bool, int]:
    """What items are sorted by: the live ones first, then descending tiers."""
    return item.frozen, -item.tier
