"""What a sealed slot says about itself, as it lies in memory behind the payload (design D1, D14)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from ckptd.arena.sums import block_count
from ckptd.core.ids import SnapshotId
from ckptd.core.redundancy.parity_sets import ParityShard, packed_shard, unpacked_shard
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.record_size import SUM_BYTES

RECORD_VERSION = 3
WITHOUT_GRANT = (1, 2)  # of earlier releases, still read: neither names a grant, and only 2 has a shard of a parity set


@dataclass(frozen=True)
class SlotRecord:
    job: str
    snapshot: SnapshotId
    rank: int
    tier: int  # the slot holds layout.spans(tier)
    layout: Layout
    objects_bytes: int  # real length of the objects region
    sums: bytes  # 16 per block of those
    digests: tuple[tuple[str, bytes], ...]
    keep: bool = False
    shard: ParityShard | None = None  # it holds no rank's state but this shard of a parity set's parity


def encode_record(record: SlotRecord) -> bytes:
    of = record.snapshot
    shard = packed_shard(record.shard) if record.shard is not None else None
    where = [record.job, [of.epoch, of.step, of.grant], record.rank, record.tier]
    what = [record.layout.encoded, record.objects_bytes, record.sums, record.digests, record.keep, shard]
    packed: bytes = msgpack.packb([RECORD_VERSION, *where, *what])
    return packed


def decode_record(data: bytes) -> SlotRecord:
    """Raises ValueError for anything that is not a whole, consistent record."""
    try:
        version, *fields = msgpack.unpackb(data)
        packed = None if version == WITHOUT_GRANT[0] else fields.pop()
        shard = unpacked_shard(packed) if packed is not None else None
        job, numbers, rank, tier, layout, objects_bytes, sums, digests, keep = fields
        epoch, step, grant = (*numbers, 0) if version in WITHOUT_GRANT else numbers
        pairs = tuple((name, value) for name, value in digests)
    except (IndexError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a slot record: {error}") from error
    _require_ints(version=version, epoch=epoch, step=step, grant=grant, rank=rank, tier=tier, objects_bytes=objects_bytes)
    if version not in (*WITHOUT_GRANT, RECORD_VERSION):
        raise ValueError(f"slot record of version {version}, ours is {RECORD_VERSION}")
    if not all(type(name) is str and type(value) is bytes for name, value in pairs):
        raise ValueError("slot record whose digests are not pairs of text and bytes")
    if not (type(job) is str and type(sums) is type(layout) is bytes and type(keep) is bool):
        raise ValueError("slot record with a field of another type")
    record = SlotRecord(
        job,
        SnapshotId(epoch, step, grant),
        rank,
        tier,
        Layout.decode(layout),
        objects_bytes,
        sums,
        pairs,
        keep,
        shard,
    )
    check_record(record)
    return record


def check_record(record: SlotRecord) -> None:
    """Sums and objects agree with the layout. Raises ValueError."""
    if len(record.sums) != SUM_BYTES * block_count(record.layout, record.tier):
        raise ValueError("slot record whose sums do not match its layout")
    if record.shard is not None and record.rank != record.shard.parity_set.holding_rank:
        raise ValueError("slot record of parity under another number than its parity set's")
    if record.objects_bytes > record.layout.objects_capacity:
        raise ValueError("slot record whose objects are larger than their region")


def _require_ints(**values: Any) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"slot record: {name} is not a whole number")
