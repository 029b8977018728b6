"""The frozen part of a sealed slot, as a slot of its own: what it says about itself, and by what it is known (design D6).

A job that trains adapters has most of its bytes in parameters that never change. They lie in memory once, and every snapshot
of the rank leans on that copy; what a frozen slot holds is known by its content, so a node that has it already, of whatever
epoch, is not sent it again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left

from ckptd.arena.record import SlotRecord
from ckptd.arena.sums import blocks_of
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.record_size import SUM_BYTES

NO_SNAPSHOT = SnapshotId(0, 0)  # a frozen slot is of no one snapshot


def leans(record: SlotRecord) -> bool:
    """Does this tier of the snapshot have a frozen part, which lies elsewhere?"""
    layout = record.layout
    spans = () if layout.is_frozen or not layout.frozen_bytes else layout.spans(record.tier)
    return any(at >= layout.frozen_at for at, _ in spans)


def own_bytes(layout: Layout, tier: int) -> int:
    """What a slot of this layout and tier must have room for itself."""
    return sum(n for _, n in layout.spans(tier)) if layout.is_frozen else layout.live_bytes(tier)


def frozen_record(record: SlotRecord) -> SlotRecord:
    """What the slot says that holds this snapshot's frozen part."""
    assert leans(record), "there is a frozen part"
    starts = [at for at, _ in blocks_of(record.layout, record.tier)]
    sums = record.sums[bisect_left(starts, record.layout.frozen_at) * SUM_BYTES :]  # its blocks come last
    return SlotRecord(record.job, NO_SNAPSHOT, record.rank, record.tier, record.layout.frozen, 0, sums, ())


def content_of(record: SlotRecord) -> str:
    """A name for the bytes of a frozen slot: equal for equal layout, tier and sums. ``record``: the frozen slot's own."""
    assert record.layout.is_frozen, "the content of a frozen slot"
    facts = f"{record.layout.layout_id}|{record.tier}|".encode() + record.sums
    return hashlib.blake2b(facts, digest_size=16).hexdigest()
