"""Frozen parts in the arena: what leans on what, over re-adoption too (D6, P7)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from ckptd.arena.arena import Arena, Slot, SlotMisuse
from ckptd.arena.frozen import content_of, frozen_record
from ckptd.arena.payload import Joined
from ckptd.arena.slot import frozen_first
from ckptd.arena.sums import bad_blocks, block_sums, lower_tier
from ckptd.core.state_map.layout import Layout
from tests.node.slots import MIB, OWN, fill_and_seal_frozen, frozen_layout, small_arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = small_arena()
    yield made
    made.close()


def sealed(arena: Arena, step: int = 1, frozen: Slot | None = None, seed: int = 0) -> tuple[Slot, Slot]:
    """(slot, the slot that it leans on), the second a new one unless it is given."""
    frozen = frozen or arena.allocate(OWN, 4 * MIB)
    slot = arena.allocate(OWN, 4 * MIB)
    fill_and_seal_frozen(slot, frozen, step, seed=seed)
    return slot, frozen


def test_a_payload_of_two_memories_reads_as_one(arena: Arena) -> None:
    slot, frozen = sealed(arena)
    assert slot.record is not None and isinstance(slot.payload, Joined)
    layout = slot.record.layout
    last = layout.fragments[-1]
    assert bytes(slot.payload[last.offset : last.offset + last.nbytes]) == bytes(
        frozen.extent[last.offset - layout.frozen_at :][: last.nbytes]
    )
    here, there = slot.places(np.array([0, last.offset]))
    assert (here[0], here[1].tolist(), here[2]) == (slot.segment, [True, False], slot.offset)
    assert (there[0], there[1].tolist(), there[2] + last.offset) == (
        frozen.segment, [False, True], frozen.offset + last.offset - layout.frozen_at
    )  # fmt: skip
    assert bad_blocks(slot.payload, layout, slot.record.sums) == []
    frozen.extent[last.offset - layout.frozen_at] ^= 1
    assert len(bad_blocks(slot.payload, layout, slot.record.sums)) == 1
    with pytest.raises(ValueError, match="both parts"):
        slot.payload[layout.frozen_at - 1 : layout.frozen_at + 1]


def test_a_frozen_slot_knows_how_many_lean_on_it(arena: Arena) -> None:
    one, frozen = sealed(arena, 1)
    two, _ = sealed(arena, 2, frozen)
    assert frozen.leaning == 2
    one.free()
    assert frozen.leaning == 1 and one.frozen is None
    arena.release(two)
    assert frozen.leaning == 0


def test_nothing_is_sealed_without_the_frozen_part_that_it_names(arena: Arena) -> None:
    one, frozen = sealed(arena, 1)
    _, other = sealed(arena, 1, seed=5)
    record = one.record
    assert record is not None
    slot = arena.allocate(OWN, 4 * MIB)
    with pytest.raises(SlotMisuse, match="come together"):
        slot.seal(record)
    slot.lean(other)
    with pytest.raises(SlotMisuse, match="not what the record says"):
        slot.seal(record)
    slot.lean(frozen)
    slot.seal(record)
    assert (frozen.leaning, other.leaning) == (2, 1)


def test_both_come_back_with_the_memory_and_find_each_other(arena: Arena) -> None:
    slot, frozen = sealed(arena)
    record = slot.record
    assert record is not None
    fds = {s.segment.name: os.dup(s.segment.fd) for s in (slot, frozen)}
    again = small_arena()
    first, second = frozen_first(again.adopt(fds))
    assert (first.id, second.id) == (frozen.id, slot.id)
    assert first.record is not None and second.record == record
    assert content_of(first.record) == content_of(frozen_record(record))
    second.lean(first)
    assert bad_blocks(second.payload, record.layout, record.sums) == []
    again.close()


@pytest.mark.parametrize("tier", [0, 1, 2, 3])
def test_a_lower_tier_has_a_prefix_of_each_part(arena: Arena, tier: int) -> None:
    slot, _ = sealed(arena)
    record = slot.record
    assert record is not None
    layout: Layout = record.layout
    kept = block_sums(slot.payload, layout, tier)
    assert lower_tier(layout, record.sums, 0, tier) == kept
    assert len(kept) == 16 * sum(-(-f.nbytes // MIB) for f in layout.fragments if f.tier >= tier) + 16


def test_another_tier_or_other_bytes_are_another_content(arena: Arena) -> None:
    contents = set()
    for seed in (0, 1):
        slot, frozen = sealed(arena, seed=seed)
        assert slot.record is not None and frozen.record is not None
        contents |= {content_of(frozen.record), content_of(frozen_record(slot.record))}
    assert len(contents) == 2
    assert frozen_layout().frozen.layout_id != frozen_layout(rank=1).frozen.layout_id
