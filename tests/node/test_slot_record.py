"""What a sealed slot says about itself, in the form of this release and of earlier ones (D1, P7)."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from ckptd.arena.record import RECORD_VERSION, SlotRecord, decode_record, encode_record
from ckptd.core.ids import SnapshotId
from ckptd.core.redundancy.parity_sets import Member, ParitySet, ParityShard, packed_shard
from ckptd.core.state_map.agreement import TENSORS
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE
from ckptd.core.state_map.layout_build import LayoutItem, build_layout

LAYOUT = build_layout(0, 2, [], objects_capacity=64)
RECORD = SlotRecord("1/gpt", SnapshotId(3, 40, 7), 0, 0, LAYOUT, 9, bytes(16), (("o:rng", b"x" * 16),), True)
PART = ParityShard(ParitySet(2, 1, 1, (Member(0, 64, "a"), Member(1, 64, "b"))), 1)


@pytest.mark.parametrize("record", [RECORD, replace(RECORD, rank=PART.parity_set.holding_rank, shard=PART)])
def test_a_record_comes_back_as_it_was(record: SlotRecord) -> None:
    assert decode_record(encode_record(record)) == record


def test_records_of_releases_that_named_no_grant_are_read() -> None:
    """P7: a daemon that was upgraded takes the memory of the one before."""
    body = ["1/gpt", [3, 40], 0, 0, LAYOUT.encoded, 9, bytes(16), RECORD.digests, True]
    before = replace(RECORD, snapshot=SnapshotId(3, 40))
    assert decode_record(msgpack.packb([1, *body])) == before
    body[2] = PART.parity_set.holding_rank
    parity = replace(before, rank=PART.parity_set.holding_rank, shard=PART)
    assert decode_record(msgpack.packb([2, *body, packed_shard(PART)])) == parity


def test_digests_that_a_release_named_are_put_in_order() -> None:
    items = [LayoutItem(key, "U8", (1,), Box.whole((1,)), "buffer", MAYBE, 1) for key in "ba"]
    layout = build_layout(0, 1, items, objects_capacity=64)
    order = [fragment.key for fragment in layout.fragments]
    assert sorted(order) == ["a", "b"]
    named = [(f"t:{key}|0", key.encode() * 16) for key in reversed(order)] + [("o:rng", b"x" * 16)]
    body = ["1/gpt", [3, 40, 7], 0, 0, layout.encoded, 9, bytes(48), named, True, None]
    assert decode_record(msgpack.packb([3, *body])).digests == (
        (TENSORS, "".join(key * 16 for key in order).encode()), ("o:rng", b"x" * 16)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("version", "numbers"),
    [(RECORD_VERSION, [3, 40]), (RECORD_VERSION, [3, 40, -1]), (RECORD_VERSION, [3, 40, 7, 1]), (2, [3, 40, 7]), (9, [3, 40, 7])],
)
def test_what_is_of_no_release_is_refused(version: int, numbers: list[int]) -> None:
    body = ["1/gpt", numbers, 0, 0, LAYOUT.encoded, 9, bytes(16), RECORD.digests, True, None]
    with pytest.raises(ValueError, match="slot record"):
        decode_record(msgpack.packb([version, *body]))
