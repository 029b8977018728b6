"""What parity protects of a slot, as one row of bytes: the tier-1 prefixes of its payload, one after the other (design D8).

Only objects and fragments count, for only they have sums; what lies between them is zeros by definition.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache

from ckptd.core.state_map.layout import BLOCK_BYTES, Layout

Span = tuple[int, int, int]  # (offset in the row, payload offset, length)
_FAR = 1 << 62


def linear_bytes(layout: Layout) -> int:
    return sum(length for _, length in layout.spans(1))


def linear_offset(layout: Layout, payload_offset: int) -> int:
    """Where a byte of the prefixes lies in the row. Raises ValueError: in none of them."""
    start = 0
    for at, length in layout.spans(1):
        if at <= payload_offset < at + length:
            return start + payload_offset - at
        start += length
    raise ValueError(f"byte {payload_offset} of the payload is not protected by parity")


def payload_spans(layout: Layout, start: int, stop: int) -> list[Span]:
    """(offset from ``start``, payload offset, length) of what has content in this range of the row; cut where blocks of sums
    begin, so that whatever can travel with the sums of its seal does."""
    covered = _covered(_Keyed(layout.layout_id, layout))
    found: list[Span] = []
    for at, offset, length in covered[max(0, bisect_right(covered, (start, _FAR, 0)) - 1) :]:
        if at >= stop:
            break
        low, high = max(at, start), min(at + length, stop)
        if low < high:
            found += [(a - start, offset + a - at, b - a) for a, b in _cuts(low, high, at, at + length)]
    return found


def _cuts(low: int, high: int, begin: int, end: int) -> list[tuple[int, int]]:
    """``low`` to ``high`` in at most three: up to the first block that begins inside, whole blocks, and the rest."""
    ahead = min(high, begin + -(-(low - begin) // BLOCK_BYTES) * BLOCK_BYTES)
    whole = high if high == end else max(ahead, begin + (high - begin) // BLOCK_BYTES * BLOCK_BYTES)
    return [(a, b) for a, b in ((low, ahead), (ahead, whole), (whole, high)) if a < b]


@dataclass(frozen=True, slots=True)
class _Keyed:
    """A layout that compares and hashes by its id."""

    name: str
    layout: Layout = field(compare=False)


@lru_cache(maxsize=256)
def _covered(keyed: _Keyed) -> tuple[Span, ...]:
    """(offset in the row, payload offset, length) of everything in the prefixes that has sums, ascending."""
    layout, start = keyed.layout, 0
    found: list[Span] = []
    for at, length in layout.spans(1):
        if at == 0 and layout.objects_capacity:
            found.append((0, 0, layout.objects_capacity))
        inside = [
            f for f in layout.fragments if at <= f.offset and f.offset + f.nbytes <= at + length and f.nbytes
        ]
        found += [(start + f.offset - at, f.offset, f.nbytes) for f in inside]
        start += length
    return tuple(found)
