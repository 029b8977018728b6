"""Sums made while bytes land: the same as sums made at leisure, however the bytes came (D14, P10)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptd.arena.sums import blocks_of, touched_blocks
from ckptd.protect.landing_sums import LandingSums
from ckptd.protect.verify import fresh_sums, stored_sums, units
from tests.node.slots import MIB, small_layout

Span = tuple[int, int]


def rows(lengths: list[int]) -> list[Span]:
    return [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]


@st.composite
def landings(draw: st.DrawFn) -> tuple[int, list[Span], list[Span]]:
    """How long the buffer is; units with gaps between them; what lands, in any order."""
    gapped = rows(draw(st.lists(st.integers(1, 40), max_size=30)))
    landed = rows(draw(st.lists(st.integers(1, 60), min_size=1, max_size=30)))
    nbytes = max(at + length for at, length in [*gapped, *landed])
    landed.append((sum(length for _, length in landed), nbytes - sum(length for _, length in landed)))
    return nbytes, [span for span in gapped if draw(st.booleans())], draw(st.permutations(landed))


@given(landings())
def test_they_are_the_sums_of_the_units_however_the_bytes_land(case: tuple[int, list[Span], list[Span]]) -> None:
    nbytes, wanted, landed = case
    source, buffer = random.Random(nbytes).randbytes(nbytes), bytearray(nbytes)
    sums = LandingSums(memoryview(buffer), wanted)
    for at, length in landed:
        buffer[at : at + length] = source[at : at + length]
        sums.saw(at, length)
    assert sums.joined() == b"".join(xxhash.xxh3_128_digest(source[at : at + n]) for at, n in wanted)


@given(landings(), st.integers(0))
def test_a_unit_of_which_a_byte_never_came_has_no_sum(case: tuple[int, list[Span], list[Span]], pick: int) -> None:
    nbytes, wanted, landed = case
    sums = LandingSums(memoryview(bytearray(nbytes)), wanted)
    lost = landed.pop(pick % len(landed))
    for at, length in landed:
        sums.saw(at, length)
    assert len(sums.joined()) == 16 * (len(wanted) - len(touched_blocks(wanted, [lost])))


def test_streams_may_meet_in_a_unit() -> None:
    """Race: two threads bring its two halves; exactly one of them makes the sum, of both."""
    wanted = rows([64] * 2000)
    buffer = bytearray(64 * 2000)
    for seed in range(5):
        fresh = random.Random(seed).randbytes(len(buffer))
        sums = LandingSums(memoryview(buffer), wanted)

        def land(first: int, sums: LandingSums = sums, fresh: bytes = fresh) -> None:
            for at in range(first, len(buffer), 64):
                buffer[at : at + 32] = fresh[at : at + 32]
                sums.saw(at, 32)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(land, (0, 32)))
        assert sums.joined() == b"".join(xxhash.xxh3_128_digest(fresh[at : at + 64]) for at, _ in wanted)


def test_the_sum_is_of_the_memory_and_not_of_what_was_received() -> None:
    """P10: a byte that is wrong where it lies is wrong, whatever the stream carried."""
    buffer = bytearray(b"landed")
    sums = LandingSums(memoryview(buffer), [(0, 6)])
    sums.saw(0, 3)
    buffer[0] ^= 1
    sums.saw(3, 3)
    assert sums.joined() == xxhash.xxh3_128_digest(buffer)


@pytest.mark.parametrize("span", [(0, 0), (5, 1), (7, MIB), (3, MIB + 1), (64, 3 * MIB - 1)])
def test_units_are_the_span_in_order_and_no_longer_than_a_block(span: Span) -> None:
    cut = units([span])
    assert sum(length for _, length in cut) == span[1]
    assert [at for at, _ in cut] == [span[0] + i * MIB for i in range(len(cut))]
    assert all(0 < length <= MIB for _, length in cut)


def test_stored_sums_are_told_for_whole_blocks_only() -> None:
    layout = small_layout()
    blocks, w = blocks_of(layout), layout.fragments[0]
    payload = memoryview(random.Random(1).randbytes(layout.payload_bytes))
    sums = b"".join(fresh_sums(payload, block) for block in blocks)
    whole = [(f.offset, f.nbytes) for f in layout.fragments] + [(0, layout.objects_capacity), blocks[2], (9, 0)]
    assert stored_sums(layout, sums, 0, whole) == [fresh_sums(payload, span) for span in whole]
    parts = [(w.offset + 4, 8), (w.offset, 100), (w.offset, w.nbytes - 1), (w.offset + 1, w.nbytes - 1), (0, MIB)]
    assert stored_sums(layout, sums, 0, parts) == [None] * len(parts)
