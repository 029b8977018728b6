"""Integrity sums: every flipped bit is found, only what was asked is read (D14, P10)."""

from __future__ import annotations

import random

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptd.arena.sums import (
    HASH_THREADS,
    SPLIT_BYTES_MIN,
    SUM_BYTES,
    bad_blocks,
    block_count,
    block_sums,
    blocks_of,
    digests,
    hash_shares,
    lower_tier,
)
from ckptd.core.state_map.agreement import TENSORS
from ckptd.core.state_map.layout import UNIQUE, Layout
from ckptd.core.state_map.layout_build import build_layout
from tests.node.slots import frozen_layout, small_layout, write_payload


@pytest.fixture
def layout() -> Layout:
    return small_layout()


@pytest.fixture
def payload(layout: Layout) -> memoryview:
    made = memoryview(bytearray(layout.payload_bytes))
    write_payload(made, layout, seed=1)
    return made


def test_sums_are_one_xxh3_128_per_block(layout: Layout, payload: memoryview) -> None:
    sums = block_sums(payload, layout)
    expected = [xxhash.xxh3_128(bytes(payload[at : at + n])).digest() for at, n in layout.blocks()]
    assert sums == b"".join(expected)


def test_every_flipped_bit_in_a_block_is_found(layout: Layout, payload: memoryview) -> None:
    sums, noise = block_sums(payload, layout), random.Random(5)
    assert bad_blocks(payload, layout, sums) == []
    for index, (at, size) in enumerate(layout.blocks()):
        where, bit = at + noise.randrange(size), 1 << noise.randrange(8)
        payload[where] ^= bit
        assert bad_blocks(payload, layout, sums) == [index]
        payload[where] ^= bit


@pytest.mark.parametrize("tier", [0, 1, 2, 3])
def test_a_tier_has_the_sums_of_its_prefix(layout: Layout, payload: memoryview, tier: int) -> None:
    prefix = payload[: layout.live_bytes(tier)]
    sums = block_sums(prefix, layout, tier)
    assert block_sums(payload, layout).startswith(sums)
    assert len(sums) == SUM_BYTES * block_count(layout, tier)
    assert bad_blocks(prefix, layout, sums, tier=tier) == []
    last, size = layout.blocks()[block_count(layout, tier) - 1]
    payload[last + size - 1] ^= 1
    assert bad_blocks(prefix, layout, sums, tier=tier) == [block_count(layout, tier) - 1]


def test_spans_choose_exactly_the_blocks_they_touch(layout: Layout, payload: memoryview) -> None:
    noise, blocks = random.Random(9), blocks_of(layout)
    nothing = bytes(SUM_BYTES * len(blocks))  # every block is bad, so the answer is what was looked at
    for _ in range(200):
        starts = [noise.randrange(layout.payload_bytes) for _ in range(2)]
        spans = [(at, min(noise.randrange(0, 1 << 20), layout.payload_bytes - at)) for at in starts]
        touched = [
            i
            for i, (at, size) in enumerate(blocks)
            if any(length and at < start + length and start < at + size for start, length in spans)
        ]
        assert bad_blocks(payload, layout, nothing, spans) == touched


@pytest.mark.parametrize("tier", [0, 1])
def test_of_what_a_copy_has_not_nothing_is_said(layout: Layout, payload: memoryview, tier: int) -> None:
    """No block would speak against it."""
    sums = lower_tier(layout, block_sums(payload, layout), 0, tier)
    end = layout.live_bytes(tier)
    assert bad_blocks(payload, layout, sums, [(0, end)], tier) == []
    with pytest.raises(ValueError, match="outside"):
        bad_blocks(payload, layout, sums, [(0, 8), (end - 8, 16)], tier)
    for span in ((1 << 62, (1 << 63) - 1), (1 << 63, 1), (-8, 8), (8, -8)):  # nor of sums that a number does not hold
        with pytest.raises(ValueError, match="outside"):
            bad_blocks(payload, layout, sums, [span], tier)
    nothing = build_layout(0, 1, [])
    assert bad_blocks(memoryview(b""), nothing, b"", [], 1) == []


def test_digests_name_what_other_ranks_may_hold_too(layout: Layout, payload: memoryview) -> None:
    objects_bytes = write_payload(payload, layout, seed=2)
    found = dict(digests(layout, block_sums(payload, layout), payload, objects_bytes))
    shared = [f.key for f in layout.fragments if f.sharing != UNIQUE]
    assert found.keys() == {TENSORS, "o:scheduler", "o:loader"} and sorted(shared) == ["mean", "none", "norm", "step"]
    assert {name: len(digest) for name, digest in found.items()} == {TENSORS: 64, "o:scheduler": 16, "o:loader": 16}
    step = next(f for f in layout.fragments if f.key == "step")
    payload[step.offset] ^= 1
    changed = dict(digests(layout, block_sums(payload, layout), payload, objects_bytes))
    assert {name for name in found if found[name] != changed[name]} == {TENSORS}
    each = [found[TENSORS][at : at + 16] != changed[TENSORS][at : at + 16] for at in range(0, 64, 16)]
    assert [key for key, differs in zip(shared, each, strict=True) if differs] == ["step"]


@pytest.mark.parametrize(
    "objects",
    [b"\xc1", msgpack.packb([1]), msgpack.packb({"a": 1}), msgpack.packb({"a": "text"}), b"\x81" * 4000],
)
def test_an_objects_region_that_is_no_map_of_bytes_is_refused(
    layout: Layout, payload: memoryview, objects: bytes
) -> None:
    payload[: len(objects)] = objects
    with pytest.raises(ValueError, match="objects region"):
        digests(layout, block_sums(payload, layout), payload, len(objects))


def test_lengths_that_contradict_the_layout_are_refused(layout: Layout, payload: memoryview) -> None:
    sums = block_sums(payload, layout)
    with pytest.raises(ValueError, match="payload of"):
        block_sums(payload[:-64], layout)
    with pytest.raises(ValueError, match="bytes of sums"):
        bad_blocks(payload, layout, sums[:-1])
    with pytest.raises(ValueError, match="objects of"):
        digests(layout, sums, payload, layout.objects_capacity + 1)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 40 << 20)), max_size=12))
def test_shares_are_the_spans_dealt_out_evenly(spans: list[tuple[int, int]]) -> None:
    shares = hash_shares(spans)
    given_out = [span for share in shares for span in share]
    for at, length in spans:  # in their order, each in one piece or cut
        while length > 0:
            start, part = given_out.pop(0)
            assert start == at and 0 < part <= length
            at, length = at + part, length - part
    assert not given_out
    if sum(length for _, length in spans) >= SPLIT_BYTES_MIN:
        sizes = [sum(length for _, length in share) for share in shares]
        assert len(sizes) == HASH_THREADS and max(sizes) - min(sizes) <= HASH_THREADS


@pytest.mark.parametrize("layout", [small_layout(), frozen_layout(), frozen_layout().frozen, build_layout(0, 1, [], 0)])
def test_blocks_are_counted_as_they_are_listed(layout: Layout) -> None:
    for tier in range(-1, 5):
        assert block_count(layout, tier) == len(blocks_of(layout, tier))
