"""What a sealed slot says about itself, as it lies in memory behind the payload (design D1, D14)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from ckptd.arena.sums import SUM_BYTES, block_count
from ckptd.core.ids import SnapshotId
from ckptd.core.layout import Layout

RECORD_VERSION = 1


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


def encode_record(record: SlotRecord) -> bytes:
    where = [record.job, [record.snapshot.epoch, record.snapshot.step], record.rank, record.tier]
    what = [record.layout.encoded, record.objects_bytes, record.sums, record.digests, record.keep]
    packed: bytes = msgpack.packb([RECORD_VERSION, *where, *what])
    return packed


def decode_record(data: bytes) -> SlotRecord:
    """Raises ValueError for anything that is not a whole, consistent record."""
    try:
        version, job, (epoch, step), rank, tier, layout, objects_bytes, sums, digests, keep = msgpack.unpackb(
            data
        )
        pairs = tuple((str(name), bytes(value)) for name, value in digests)
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a slot record: {error}") from error
    if version != RECORD_VERSION:
        raise ValueError(f"slot record of version {version}, ours is {RECORD_VERSION}")
    _require_ints(epoch=epoch, step=step, rank=rank, tier=tier, objects_bytes=objects_bytes)
    if not (isinstance(job, str) and isinstance(sums, bytes) and isinstance(layout, bytes)):
        raise ValueError("slot record with a field of another type")
    record = SlotRecord(
        job,
        SnapshotId(epoch, step),
        rank,
        tier,
        Layout.decode(layout),
        objects_bytes,
        sums,
        pairs,
        bool(keep),
    )
    check_record(record)
    return record


def check_record(record: SlotRecord) -> None:
    """Sums and objects agree with the layout. Raises ValueError."""
    if len(record.sums) != SUM_BYTES * block_count(record.layout, record.tier):
        raise ValueError("slot record whose sums do not match its layout")
    if record.objects_bytes > record.layout.objects_capacity:
        raise ValueError("slot record whose objects are larger than their region")


def _require_ints(**values: Any) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"slot record: {name} is {value!r}")
