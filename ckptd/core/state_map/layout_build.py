"""From a rank's fragments to the layout of its payload: the live ones, the frozen ones, tiers descending, then as given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import Fragment, Fragments
from ckptd.core.state_map.layout import ALIGN_BYTES, Layout

BIG_FRAGMENT_BYTES = 1 << 20  # from this size on a fragment starts on a page,
BIG_ALIGN_BYTES = 4096  # so that O_DIRECT writes it from where it lies, without a copy


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


def align_up(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


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
    at, frozen_at = objects_capacity, -1
    fragments: list[Fragment] = []
    for key, dtype, shape, box, role, sharing, tier, frozen in sorted((LayoutItem(*i) for i in items), key=place):
        if frozen and frozen_at < 0:
            at = frozen_at = (at // BIG_ALIGN_BYTES + 1) * BIG_ALIGN_BYTES  # a gap: no range of bytes lies in both parts
        if dtype not in ITEMSIZE:
            raise ValueError(f"{key}: dtype {dtype!r} has no safetensors name")
        nbytes = box.volume * ITEMSIZE[dtype]
        if nbytes >= BIG_FRAGMENT_BYTES:
            at = -(-at // BIG_ALIGN_BYTES) * BIG_ALIGN_BYTES
        fragments.append(Fragment(key, dtype, tuple(shape), box, at, nbytes, role, sharing, tier))
        at = align_up(at + nbytes)
    pairs = tuple((alias, key) for alias, key in aliases)
    frozen_bytes = at - frozen_at if frozen_at >= 0 else 0
    return Layout(rank, world, Fragments(fragments), objects_capacity, at, plan_id, pairs, frozen_bytes, tuple(without))


def place(item: LayoutItem) -> tuple[bool, int]:
    """What items are sorted by: the live ones first, then descending tiers."""
    return item.frozen, -item.tier
