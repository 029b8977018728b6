"""What a sealed slot says about itself, as it lies in memory behind the payload (design D1, D14)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgpack
import msgspec
from msgspec import Meta

from ckptd.arena.objects import OBJECTS_MAX
from ckptd.arena.sums import block_count
from ckptd.core.ids import SnapshotId
from ckptd.core.redundancy.parity_sets import ParityShard, packed_shard, unpacked_shard
from ckptd.core.redundancy.policies import GROUP_MAX
from ckptd.core.state_map.agreement import in_order
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_reader import FRAGMENTS_MAX
from ckptd.core.state_map.record_size import SUM_BYTES

RECORD_VERSION = 4
WITHOUT_GRANT = (1, 2)  # of earlier releases, still read: neither names a grant, and only 2 has a shard of a parity set
READ = (*WITHOUT_GRANT, 3, RECORD_VERSION)  # those before the last named the digest of each fragment


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


DIGESTS_MAX = 1 << 22  # of a parity shard, which has those of all members
_ARRAY_OF_TEN = b"\x9a"  # how a record of version 1 begins, which has no shard

_Numbers = Annotated[list[int], Meta(min_length=2, max_length=3)]
_Digests = Annotated[list[tuple[str, bytes]], Meta(max_length=DIGESTS_MAX)]
_Shard = tuple[int, int, int, int, Annotated[list[tuple[int, int, str]], Meta(max_length=GROUP_MAX)]]
_FIRST = msgspec.msgpack.Decoder(tuple[int, str, _Numbers, int, int, bytes, int, bytes, _Digests, bool])
_LATER = msgspec.msgpack.Decoder(tuple[int, str, _Numbers, int, int, bytes, int, bytes, _Digests, bool, _Shard | None])


def decode_record(data: bytes, *, own: bool = False) -> SlotRecord:
    """Its rank can write where it lies, so it is read into its types, and nothing else is built (D20). Raises ValueError for
    anything that is not a whole, consistent record. ``own``: a rank's own slot, which holds no parity."""
    try:
        fields = (_FIRST if data[:1] == _ARRAY_OF_TEN else _LATER).decode(data)
        version, job, numbers, rank, tier, layout, objects_bytes, sums, digests, keep = fields[:10]
        more = fields[10:]
        shard = unpacked_shard(list(more[0])) if more and more[0] is not None else None
        if own and (shard is not None or len(digests) > FRAGMENTS_MAX + OBJECTS_MAX):
            raise ValueError("what is no rank's")
        epoch, step, grant = (*numbers, 0) if version in WITHOUT_GRANT else numbers
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a slot record: {error}") from error
    if version not in READ or bool(more) != (version != WITHOUT_GRANT[0]):
        raise ValueError(f"slot record of version {version}, ours is {RECORD_VERSION}")
    if min(epoch, step, grant, rank, tier, objects_bytes) < 0:
        raise ValueError("slot record with a number below 0")
    at, layout_read = SnapshotId(epoch, step, grant), Layout.decode(layout)
    record = SlotRecord(job, at, rank, tier, layout_read, objects_bytes, sums, tuple(in_order(layout_read, digests)), keep, shard)
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
