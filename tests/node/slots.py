"""Small real slots for the tests of the arena: a layout, bytes that depend on a seed, the record that belongs to them."""

from __future__ import annotations

import random

import msgpack

from ckptd.arena.arena import Arena, Slot, SlotRecord, Tenant
from ckptd.arena.fdstore import NullKeeper
from ckptd.arena.sums import block_sums, digests
from ckptd.core.box import Box
from ckptd.core.ids import SnapshotId
from ckptd.core.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.layout_build import build_layout

JOB = "1000/gpt"
OWN = Tenant(JOB, 1000, "own", 0)
PEER = Tenant(JOB, 1000, "peer", 7)
MIB = 1 << 20


def small_layout(rank: int = 0) -> Layout:
    """Two MiB-sized fragments, a replica, a plain one, a 0-d and an empty one: every kind of block."""
    whole = Box.whole
    items = [
        ("w", "F32", (600, 512), whole((600, 512)), "param", UNIQUE, 2),
        ("m", "F32", (300, 1000), Box((rank, 0), (299, 1000)), "optim", UNIQUE, 2),
        ("norm", "BF16", (33,), whole((33,)), "param", REPLICA, 1),
        ("mean", "F64", (5,), whole((5,)), "buffer", MAYBE, 1),
        ("step", "F32", (), whole(()), "optim", MAYBE, 1),
        ("none", "F32", (0, 4), whole((0, 4)), "buffer", MAYBE, 0),
    ]
    return build_layout(rank, max(2, rank + 1), items, objects_capacity=4096)


def write_payload(payload: memoryview, layout: Layout, seed: int) -> int:
    """Fill the slot; returns objects_bytes."""
    noise = random.Random(seed)
    objects = msgpack.packb({"scheduler": noise.randbytes(40), "loader": b""})
    payload[: layout.objects_capacity] = bytes(layout.objects_capacity)
    payload[: len(objects)] = objects
    for fragment in layout.fragments:
        payload[fragment.offset : fragment.offset + fragment.nbytes] = noise.randbytes(fragment.nbytes)
    return len(objects)


def fill_and_seal(slot: Slot, step: int, *, rank: int = 0, layout: Layout | None = None) -> SlotRecord:
    layout = layout or small_layout(rank)
    slot.fill(step)
    objects_bytes = write_payload(slot.payload, layout, seed=step)
    sums = block_sums(slot.payload, layout)
    record = SlotRecord(
        job=slot.tenant.job,
        snapshot=SnapshotId(3, step),
        rank=layout.rank,
        tier=0,
        layout=layout,
        objects_bytes=objects_bytes,
        sums=sums,
        digests=digests(layout, sums, slot.payload, objects_bytes),
        keep=step % 2 == 0,
    )
    slot.seal(record)
    return record


def small_arena(budget_bytes: int = 64 * MIB, keeper: NullKeeper | None = None, **options: object) -> Arena:
    defaults = {"incarnation": "test", "prefault": False, "reserve_bytes": 0, "segment_bytes": 16 * MIB}
    return Arena(budget_bytes, keeper or NullKeeper(), **{**defaults, **options})  # type: ignore[arg-type]
