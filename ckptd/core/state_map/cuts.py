"""How a logical tensor is cut into ranks' boxes, whatever its size: by what torch.chunk does, once or several times (design D18).

A *cut* is (dimension, parts), a *place* is (dimension, parts, at). Ranks of one shape have the cuts in common, and differ only in
where they stand: so a rank is a handful of numbers, and not one box per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Ints

Cut = tuple[int, int]
Place = tuple[int, int, int]

CUTS_MAX = 16  # of one tensor
RULES_MAX = 4096  # different ones of one rank
PARTS_MAX = 1 << 20  # of one tensor: as many as there can be ranks


def part(box: Box, dim: int, parts: int, at: int) -> Box:
    """Part ``at`` of one cut of a box."""
    size = box.sizes[dim]
    share = -(-size // parts)
    begin = min(at * share, size)
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + begin, min(share, size - begin)
    return Box(tuple(offsets), tuple(sizes))


def box_at(shape: tuple[int, ...], places: Sequence[Place]) -> Box:
    box = Box.whole(shape)
    for place in places:
        box = part(box, *place)
    return box


def cut(offsets: Ints, sizes: Ints, starts: Ints, cuts: Sequence[Cut], at: Sequence[int]) -> None:
    """The same of many boxes at once, whose dimensions begin at ``starts``: they become part ``at`` of each cut."""
    for (dim, parts), place in zip(cuts, at, strict=True):
        where = starts + dim
        size = sizes[where]
        share = -(-size // parts)
        begin = np.minimum(place * share, size)
        offsets[where] += begin
        sizes[where] = np.minimum(share, size - begin)
