"""What parity protects as one row of bytes: every byte with a sum is there once, at its place (P1)."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from ckptd.core.redundancy.linear import linear_bytes, linear_offset, payload_spans
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import BLOCK_BYTES, Layout
from ckptd.core.state_map.layout_build import build_layout
from tests.node.slots import frozen_layout

SIZES = (3, 0, BLOCK_BYTES + 5, 64, 2 * BLOCK_BYTES, 1)


def layout(tiers: tuple[int, ...]) -> Layout:
    items = [
        (f"w{i}", "U8", (size,), Box((0,), (size,)), "param", "unique", tier)
        for i, (size, tier) in enumerate(zip(SIZES, tiers, strict=True))
    ]
    return build_layout(0, 1, items, 100, "p", ())


CASES = [layout((1,) * 6), layout((2, 2, 1, 1, 0, 0)), layout((0,) * 6), frozen_layout()]


NOWHERE = -1


def expected(found: Layout, row_bytes: int) -> npt.NDArray[np.int64]:
    """Of every byte of the row its payload offset; NOWHERE where parity protects nothing."""
    covered = np.zeros(found.payload_bytes, dtype=bool)
    for at, length in found.blocks():
        covered[at : at + length] = True
    where, start = np.full(row_bytes, NOWHERE, dtype=np.int64), 0
    for at, length in found.spans(1):
        offsets = np.arange(at, at + length)
        where[start : start + length] = np.where(covered[at : at + length], offsets, NOWHERE)
        start += length
    return where


@pytest.mark.parametrize("found", CASES)
def test_any_range_covers_what_it_must_and_nothing_else(found: Layout) -> None:
    rng, total = Random(1), linear_bytes(found)
    ranges = [(0, total), (0, total + 70_000), (total, total + 10)]
    ranges += [tuple(sorted((rng.randrange(total + 1), rng.randrange(total + 1)))) for _ in range(12)]
    want = expected(found, total + 70_000)
    for start, stop in ranges:
        got = np.full(len(want), NOWHERE, dtype=np.int64)
        for at, offset, length in payload_spans(found, start, stop):
            assert length > 0
            row = got[start + at : start + at + length]
            assert len(row) == length and (row == NOWHERE).all(), "once"
            row[:] = np.arange(offset, offset + length)
        assert (got[start:stop] == want[start:stop]).all()
        assert (got[:start] == NOWHERE).all() and (got[stop:] == NOWHERE).all()


@pytest.mark.parametrize("found", CASES)
def test_whole_blocks_travel_whole(found: Layout) -> None:
    """So that they go with the sums of their seal."""
    starts = {at for at, _ in found.blocks()}
    total = linear_bytes(found)
    for start in range(0, total, BLOCK_BYTES):
        spans = payload_spans(found, start, start + 4 * BLOCK_BYTES)
        long = [(at, offset, length) for at, offset, length in spans if length >= BLOCK_BYTES]
        assert all(offset in starts for _, offset, _ in long)


@pytest.mark.parametrize("found", CASES)
def test_offsets_agree_with_spans(found: Layout) -> None:
    for at, offset, _ in payload_spans(found, 0, linear_bytes(found)):
        assert linear_offset(found, offset) == at
    with pytest.raises(ValueError, match="not protected"):
        linear_offset(found, found.payload_bytes)


def test_a_range_is_cut_where_blocks_begin_and_a_fragments_last_block_is_whole() -> None:
    """A block that is there in part has no sum that it could be checked by."""
    found, size = layout((1,) * 6), BLOCK_BYTES + 5
    (begin,) = [f.offset for f in found.fragments if f.nbytes == size]
    row = linear_offset(found, begin)

    def cuts(start: int, stop: int) -> list[tuple[int, int]]:
        return [(o - begin, n) for _, o, n in payload_spans(found, row + start, row + stop)]

    assert cuts(0, size) == [(0, size)]
    assert cuts(0, size - 1) == [(0, BLOCK_BYTES), (BLOCK_BYTES, 4)]
    assert cuts(1, size) == [(1, BLOCK_BYTES - 1), (BLOCK_BYTES, 5)]
