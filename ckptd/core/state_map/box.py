"""N-d boxes: a slice of a logical tensor as (offsets, sizes) in elements (design D7).

Shapes and boxes count elements, C order. A 0-d tensor is the box with empty tuples and volume 1; a box with a zero size has
volume 0, intersects nothing and is always covered.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Box(NamedTuple):
    """``offsets[d] <= index[d] < offsets[d] + sizes[d]`` for each dimension; a 0-d tensor has empty tuples."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Elements; 1 for 0-d, 0 when any size is 0."""
        return math.prod(self.sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """The box of elements in both; None when there is none. ValueError: the boxes have different ranks."""
    if len(a.sizes) != len(b.sizes):
        raise ValueError(f"boxes of {len(a.sizes)} and {len(b.sizes)} dimensions")
    offsets, sizes = [], []
    for a_from, a_size, b_from, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = a_from if a_from > b_from else b_from
        size = min(a_from + a_size, b_from + b_size) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def contains(outer: Box, inner: Box) -> bool:
    """Does ``inner`` lie wholly inside ``outer``? An empty inner box must still have its corner inside."""
    if len(outer.sizes) != len(inner.sizes):
        return False
    bounds = zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    return all(
        o_from <= i_from and i_from + i_size <= o_from + o_size for o_from, o_size, i_from, i_size in bounds
    )


def covers(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Do the boxes (overlapping or not) hold every element of a tensor of this shape?"""
    return not uncovered(Box.whole(shape), boxes)


SWEEP_STEPS_MAX = 1_000_000  # slabs of one sweep, some seconds; 4096 boxes of a grid take about as many


def uncovered(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """The part of ``box`` outside all ``boxes``, as disjoint boxes in C order.

    Sweeps one dimension after the other: n boxes of a grid cost O(n log n), not O(n²). Boxes that cross each other in many
    dimensions can make it exponential (it decides tautology of formulas): after SWEEP_STEPS_MAX the answer is the whole box,
    as if nothing covered it, for nobody may believe what was not proven.
    """
    if box.volume == 0:
        return []
    inside = list(dict.fromkeys(part for other in boxes if (part := intersect(box, other)) is not None))
    if box in inside:
        return []
    try:
        return [Box(offsets, sizes) for offsets, sizes in _gaps(box, inside, 0, iter(range(SWEEP_STEPS_MAX)))]
    except StopIteration:
        return [box]


def without(box: Box, part: Box) -> list[Box]:
    """``box`` less ``part``, which lies inside it: at most two boxes per dimension."""
    rest: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        low, high = offsets[dim], offsets[dim] + sizes[dim]
        for cut, end in ((low, start), (start + size, high)):
            if cut < end:
                around = (
                    (*offsets[:dim], cut, *offsets[dim + 1 :]),
                    (*sizes[:dim], end - cut, *sizes[dim + 1 :]),
                )
                rest.append(Box(*around))
        offsets[dim], sizes[dim] = start, size
    return rest


Span = tuple[
    tuple[int, ...], tuple[int, ...]
]  # offsets and sizes of a Box; hashing a Box costs ten times as much


def disjoint(boxes: Sequence[Box]) -> bool:
    """No element lies in two of the boxes. Empty boxes are disjoint from everything."""
    return disjoint_spans([(box.offsets, box.sizes) for box in boxes])


PAIRS_MAX = 2_000_000  # of boxes that are compared two by two, about 1 s


def disjoint_spans(spans: Sequence[Span], ragged_max: int | None = None) -> bool:
    """``disjoint`` of many boxes. ragged_max: ValueError when more than so many lie in no grid (up to 2000: bounded work)."""
    solid = [span for span in spans if 0 not in span[1]]
    if len(solid) < 2:
        return True
    if len(set(solid)) < len(solid):
        return False
    # The usual shards are cells of a grid, even or not: in each dimension their extents are equal or apart.
    cut = [dim for dim in _extents(solid) if len(dim) > 1]
    if all(a[0] + a[1] <= b[0] for dim in cut for a, b in pairwise(dim)):
        return True
    if len(cut) == 1:
        return False
    if ragged_max is not None and len(solid) > ragged_max:
        raise ValueError(f"{len(solid)} boxes that lie in no grid, at most {ragged_max} are compared")
    meeting, dim = min((_meeting(solid, dim), dim) for dim in range(len(solid[0][0])))
    if meeting <= PAIRS_MAX:  # sweeping cuts through all dimensions at once, which a few boxes of many can make exponential
        return not _any_meet(solid, dim)
    boxes = [Box(*span) for span in solid]
    frame = _frame(boxes)
    union = frame.volume - sum(gap.volume for gap in uncovered(frame, boxes))
    return union == sum(box.volume for box in boxes)


def _meeting(spans: Sequence[Span], dim: int) -> int:
    """Pairs of boxes whose extents in this dimension overlap."""
    ends = sorted(at[dim] + size[dim] for at, size in spans)
    apart = sum(bisect_right(ends, at[dim]) for at, _ in spans)
    return len(spans) * (len(spans) - 1) // 2 - apart


def _any_meet(spans: Sequence[Span], dim: int) -> bool:
    """Do any two boxes overlap? ``dim``: the one in which the fewest pairs do."""
    active: list[Span] = []
    for span in sorted(spans, key=lambda span: span[0][dim]):
        start = span[0][dim]
        active = [other for other in active if other[0][dim] + other[1][dim] > start]
        if any(_meet(span, other) for other in active):
            return True
        active.append(span)
    return False


def _meet(a: Span, b: Span) -> bool:
    """Boxes that are not empty."""
    return all(
        a_from < b_from + b_size and b_from < a_from + a_size
        for a_from, a_size, b_from, b_size in zip(a[0], a[1], b[0], b[1], strict=True)
    )


def _extents(spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
    """For each dimension the different (offset, size), sorted. ValueError: the boxes have different ranks."""
    offsets = zip(*(span[0] for span in spans), strict=True)
    sizes = zip(*(span[1] for span in spans), strict=True)
    return [sorted(set(zip(at, size, strict=True))) for at, size in zip(offsets, sizes, strict=True)]


_Part = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of the dimensions not yet swept


def _gaps(box: Box, inside: Sequence[Box], dim: int, steps: Iterator[int]) -> list[_Part]:
    """Sweep dimension ``dim``: cut where a box begins or ends, ask the next dimension about each slab. Raises StopIteration
    when there are no steps left."""
    if not inside:
        return [(box.offsets[dim:], box.sizes[dim:])]
    if dim == len(box.sizes):
        return []
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for index, other in enumerate(inside):
        begins.setdefault(other.offsets[dim], []).append(index)
        ends.setdefault(other.offsets[dim] + other.sizes[dim], []).append(index)
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    cuts = sorted({low, high, *begins, *ends})
    slabs: list[tuple[int, int, list[_Part]]] = []
    active: dict[int, None] = {}
    for start, stop in pairwise(cuts):
        for index in ends.get(start, ()):
            del active[index]
        active.update(dict.fromkeys(begins.get(start, ())))
        next(steps)
        below = _gaps(box, [inside[index] for index in active], dim + 1, steps)
        if slabs and slabs[-1][2] == below:
            slabs[-1] = (slabs[-1][0], stop, below)
        else:
            slabs.append((start, stop, below))
    return [
        ((start, *offsets), (stop - start, *sizes))
        for start, stop, below in slabs
        for offsets, sizes in below
    ]


def _frame(boxes: Sequence[Box]) -> Box:
    """The smallest box around all of them."""
    low = tuple(min(at) for at in zip(*(box.offsets for box in boxes), strict=True))
    stops = (tuple(map(sum, zip(box.offsets, box.sizes, strict=True))) for box in boxes)
    high = tuple(max(at) for at in zip(*stops, strict=True))
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))


def merge(boxes: Iterable[Box]) -> list[Box]:
    """Join disjoint boxes until no two of them together form a box; sorted by offsets.

    Every result is the exact union of some of the given boxes. Repeats and empty boxes are dropped.
    """
    joined = sorted({box for box in boxes if box.volume}, key=_order)
    dims = len(joined[0].sizes) if joined else 0
    before = 0
    while len(joined) != before:
        before = len(joined)
        for dim in reversed(range(dims)):  # the last dimension first: it makes runs longer
            joined = _merge_along(joined, dim)
    return joined


def _merge_along(boxes: list[Box], dim: int) -> list[Box]:
    rows: dict[_Part, list[Box]] = {}
    for box in boxes:
        others = box.offsets[:dim] + box.offsets[dim + 1 :], box.sizes[:dim] + box.sizes[dim + 1 :]
        rows.setdefault(others, []).append(box)
    result: list[Box] = []
    for row in rows.values():
        row.sort(key=lambda box: box.offsets[dim])
        last = row[0]
        for box in row[1:]:
            if last.offsets[dim] + last.sizes[dim] == box.offsets[dim]:
                size = last.sizes[dim] + box.sizes[dim]
                last = Box(last.offsets, (*last.sizes[:dim], size, *last.sizes[dim + 1 :]))
            else:
                result.append(last)
                last = box
        result.append(last)
    return sorted(result, key=_order)


def _order(box: Box) -> _Part:
    return box.offsets, box.sizes


def split(box: Box, volume_max: int) -> list[Box]:
    """``box`` in pieces of at most ``volume_max`` (>= 1) elements, in C order, each contiguous in it."""
    if box.volume <= volume_max:
        return [box]
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    rows = max(1, volume_max // (box.volume // box.sizes[dim]))
    pieces: list[Box] = []
    for start in range(0, box.sizes[dim], rows):
        size = min(rows, box.sizes[dim] - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
        pieces += split(part, volume_max)
    return pieces


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements ``[start, stop)`` of the C-order flattened tensor as at most ``max(1, 2*ndim - 1)`` boxes, in C order.

    FSDP1, ZeRO and Megatron's distributed optimizer cut flat buffers. ValueError: the range leaves the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) outside a tensor of shape {shape}")
    return [Box(offsets, sizes) for offsets, sizes in _flat(shape, start, stop)]


def _flat(shape: tuple[int, ...], start: int, stop: int) -> list[_Part]:
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # inside one row
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in _flat(inner, head, tail)]
    parts: list[_Part] = []
    if head:
        parts += [((first, *offsets), (1, *sizes)) for offsets, sizes in _flat(inner, head, row)]
        first += 1
    if last > first:
        parts.append(((first, *(0,) * len(inner)), (last - first, *inner)))
    parts += [((last, *offsets), (1, *sizes)) for offsets, sizes in _flat(inner, 0, tail)]
    return parts


def whole_from(outer: Box, inner: Box) -> int:
    """The dimension from which on ``inner`` lies in one piece in ``outer``, which it is inside of."""
    split = len(outer.sizes)
    while split and inner.sizes[split - 1] == outer.sizes[split - 1]:
        split -= 1
    return max(split - 1, 0)  # the dimension before those that are whole may be partial, and is contiguous all the same


def runs(outer: Box, inner: Box, itemsize: int) -> list[tuple[int, int]]:
    """(byte offset, bytes) of each contiguous piece of ``inner`` inside ``outer``, stored C-contiguously from byte 0.

    In ascending order, neighbours joined: their concatenation is ``inner`` in C order. ValueError: not inside.
    """
    if not contains(outer, inner):
        raise ValueError(f"{inner} does not lie inside {outer}")
    if inner.volume == 0:
        return []
    strides = [itemsize] * len(outer.sizes)
    for dim in reversed(range(len(strides) - 1)):
        strides[dim] = strides[dim + 1] * outer.sizes[dim + 1]
    split = whole_from(outer, inner)
    length = math.prod(inner.sizes[split:]) * itemsize
    corner = zip(inner.offsets, outer.offsets, strides, strict=True)
    starts = [sum((at - base) * stride for at, base, stride in corner)]
    for size, stride in zip(inner.sizes[:split], strides[:split], strict=True):
        starts = [start + step * stride for start in starts for step in range(size)]
    return [(start, length) for start in starts]
