"""Which indices of a dimension a rank holds, as ascending or other runs, and the boxes that they make (design D7, D18)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box

Run = tuple[int, int]  # (start, length) along one dimension


def dim_cuts(
    dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any], key: str
) -> list[tuple[int, int, int]]:
    """How this dimension is cut: (parts, own part, split factor) per mesh dimension, left to right."""
    cuts = []
    for parts, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        factor = getattr(placement, "split_factor", None)
        if placement.is_shard() or factor is not None:
            if placement.dim == dim:
                cuts.append((parts, at, int(factor or 1)))
        elif not (placement.is_replicate() or placement.is_partial()):
            raise CkptdError(f"placement {placement} is not understood", where=key)
    return cuts


def in_order(cuts: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]] | None:
    """(parts, own part) as ``cut`` makes them one after the other; None: it takes a part of each of several pieces."""
    if not cuts:
        return []
    (parts, at, factor), rest = cuts[0], in_order(cuts[1:])
    if rest is None or (factor > 1 and math.prod(cut[0] for cut in cuts[1:]) != factor):
        return None
    return [*rest, (parts, at)] if factor > 1 else [(parts, at), *rest]


def cut(runs: list[Run], cuts: Sequence[tuple[int, int, int]]) -> list[Run]:
    """Which indices of a dimension the rank holds, as ascending runs; cuts: as ``dim_cuts`` tells them.

    A strided cut whose split factor is what the cuts to its right make was applied after them (FSDP2 on top of
    TP); without them it takes its part of each of ``split factor`` pieces.
    """
    if not cuts:
        return runs
    (parts, at, factor), rest = cuts[0], cuts[1:]
    if factor > 1 and math.prod(cut[0] for cut in rest) == factor:
        return chunk(cut(runs, rest), parts, at)
    if factor > 1:
        pieces = [chunk(chunk(runs, factor, piece), parts, at) for piece in range(factor)]
        return cut(joined(run for piece in pieces for run in piece), rest)
    return cut(chunk(runs, parts, at), rest)


def chunk(runs: Sequence[Run], parts: int, at: int) -> list[Run]:
    """Part ``at`` of the indices cut into ``parts``, as torch.chunk cuts: all of ceil size, the last ones less or none."""
    total = sum(length for _, length in runs)
    share = -(-total // parts)
    begin, end = min(at * share, total), min((at + 1) * share, total)
    return within(runs, [(begin, end - begin)])


def joined(runs: Any) -> list[Run]:
    found: list[Run] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def within(runs: Sequence[Run], inner: Iterable[Run]) -> list[Run]:
    """``inner`` are runs of what ``runs`` are one after the other."""
    found: list[Run] = []
    for begin, size in inner:
        position = 0
        for start, length in runs:
            low, high = max(begin, position), min(begin + size, position + length)
            if low < high:
                found.append((start + low - position, high - low))
            position += length
    return joined(found)


def boxes_of(runs: Sequence[Sequence[Run]], shape: Sequence[int] | None = None) -> list[tuple[Box, tuple[int, ...]]]:
    """The product of the dimensions' runs: (box, offsets in the local tensor). Nothing where a dimension has no run. ``shape``: no
    further than this."""
    choices: list[list[tuple[Run, int]]] = []
    for dim, of in enumerate(runs):
        starts = itertools.accumulate((length for _, length in of), initial=0)
        end = math.inf if shape is None else shape[dim]
        clipped = [((start, int(min(length, end - start))), at) for (start, length), at in zip(of, starts, strict=False)]
        choices.append([one for one in clipped if one[0][1] > 0])
    found: list[tuple[Box, tuple[int, ...]]] = []
    for choice in itertools.product(*choices):
        offsets = tuple(run[0] for run, _ in choice)
        sizes = tuple(run[1] for run, _ in choice)
        found.append((Box(offsets, sizes), tuple(at for _, at in choice)))
    return found
