"""Small real slots for the tests of the arena: a layout, bytes that depend on a seed, the record that belongs to them."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack

from ckptd.arena.arena import Arena, Slot, SlotRecord, Tenant
from ckptd.arena.fdstore import NullKeeper
from ckptd.arena.frozen import NO_SNAPSHOT
from ckptd.arena.sums import block_sums, digests, live_sums
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.fragments import Fragments
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout

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


def frozen_layout(rank: int = 0, live: int = 100) -> Layout:
    """A small live part of two tiers, and a frozen part of 2.2 MiB of three."""
    whole = Box.whole
    items = [
        LayoutItem("w", "F32", (live,), whole((live,)), "param", UNIQUE, 2),
        LayoutItem("v", "F32", (90,), whole((90,)), "param", UNIQUE, 1),
        LayoutItem("base", "F32", (600, 512), whole((600, 512)), "param", UNIQUE, 2, True),
        LayoutItem("rest", "F32", (300, 900), whole((300, 900)), "param", UNIQUE, 1, True),
        LayoutItem("here", "F32", (70,), whole((70,)), "param", REPLICA, 0, True),
    ]
    return build_layout(rank, max(2, rank + 1), items, objects_capacity=4096)


def write_payload(payload: memoryview, layout: Layout, seed: int) -> int:
    """Fill the slot; returns objects_bytes."""
    noise = random.Random(seed)
    objects = msgpack.packb({"scheduler": noise.randbytes(40), "loader": b""})
    payload[: layout.objects_capacity] = bytes(layout.objects_capacity)
    payload[: len(objects)] = objects
    write_fragments(payload, layout, noise.randrange(1 << 30))
    return len(objects)


def write_fragments(payload: memoryview, layout: Layout, seed: int) -> None:
    noise = random.Random(seed)
    for fragment in layout.fragments:
        payload[fragment.offset : fragment.offset + fragment.nbytes] = noise.randbytes(fragment.nbytes)


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


def fill_and_seal_frozen(
    slot: Slot, frozen: Slot, step: int, *, seed: int = 0, layout: Layout | None = None
) -> SlotRecord:
    """As the daemon does: the frozen part, unless it is sealed, then the slot that leans on it."""
    layout, job = layout or frozen_layout(), slot.tenant.job
    if frozen.record is None:
        write_fragments(frozen.extent, layout.frozen, seed)
        sums = block_sums(frozen.extent, layout.frozen)
        frozen.seal(SlotRecord(job, NO_SNAPSHOT, layout.rank, 0, layout.frozen, 0, sums, ()))
    assert frozen.record is not None
    slot.fill(step)
    live = replace(layout, fragments=Fragments(f for f in layout.fragments if f.offset < layout.frozen_at))
    objects_bytes = write_payload(slot.extent, live, seed=step)
    sums = live_sums(slot.extent, layout) + frozen.record.sums
    found = digests(layout, sums, slot.extent, objects_bytes)
    slot.lean(frozen)
    record = SlotRecord(job, SnapshotId(3, step), layout.rank, 0, layout, objects_bytes, sums, found)
    slot.seal(record)
    return record


def small_arena(budget_bytes: int = 64 * MIB, keeper: NullKeeper | None = None, **options: object) -> Arena:
    defaults = {"incarnation": "test", "prefault": False, "reserve_bytes": 0, "segment_bytes": 16 * MIB}
    return Arena(budget_bytes, keeper or NullKeeper(), **{**defaults, **options})  # type: ignore[arg-type]
