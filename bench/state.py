"""A sealed slot of real size in a real arena, as the daemon holds it after a capture."""

from __future__ import annotations

import numpy as np

from ckptd.arena.arena import Arena, Slot, SlotRecord, Tenant
from ckptd.arena.fdstore import NullKeeper
from ckptd.arena.sums import block_sums, digests
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout_build import LayoutItem, build_layout

JOB = "0/bench"
TENSOR_BYTES_MAX = 64 << 20  # of one tensor: about what a layer of a billion-parameter model has
TENSORS_MIN = 4
COLUMNS = 1024
META_BYTES = 16 << 20
OBJECTS_BYTES = 64 << 10


def make_arena(slots: int, nbytes: int) -> Arena:
    """With room for so many slots of so many bytes."""
    return Arena(slots * (nbytes + OBJECTS_BYTES + 2 * META_BYTES), NullKeeper(), incarnation="bench", reserve_bytes=64 << 20)


def sealed_slot(arena: Arena, nbytes: int, step: int = 1, *, trained: bool = False, frozen: float = 0.0) -> Slot:
    """About ``nbytes`` of float32 tensors, sums made: random bytes, or numbers distributed as a trained layer's are. The memory is
    warm afterwards. frozen: so much of it is as at step 1."""
    count = max(TENSORS_MIN, round(nbytes / TENSOR_BYTES_MAX))
    shape = (max(1, nbytes // count // COLUMNS // 4), COLUMNS)
    items = [
        LayoutItem(f"layer.{i}.weight", "F32", shape, Box.whole(shape), "param", "unique", 1)
        for i in range(count)
    ]
    layout = build_layout(0, 1, items, OBJECTS_BYTES, "bench", ())
    slot = arena.allocate(Tenant(JOB, 0, "own", 0), layout.payload_bytes, META_BYTES)
    flat = np.frombuffer(slot.payload[: layout.payload_bytes], dtype=np.uint8)
    noise = np.random.default_rng(step)
    piece = noise.integers(0, 255, 8 << 20, dtype=np.uint8)
    if trained:
        piece = (noise.standard_normal(2 << 20, np.float32) * np.float32(0.02)).view(np.uint8)
    base = np.random.default_rng(1).integers(0, 255, len(piece), dtype=np.uint8)
    for at in range(0, len(flat), len(piece)):
        end = min(len(flat), at + len(piece))
        flat[at:end] = (base if end <= frozen * len(flat) else piece)[: end - at]
        flat[at] = at % 251  # no two blocks alike
    flat[:OBJECTS_BYTES] = 0
    flat[0] = 0x80  # an empty msgpack map
    sums = block_sums(slot.payload, layout)
    slot.fill(1)
    slot.seal(
        SlotRecord(JOB, SnapshotId(1, step), 0, 0, layout, 1, sums, digests(layout, sums, slot.payload, 1))
    )
    return slot
