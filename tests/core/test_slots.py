"""The slots of a daemon: which are free, what is held, and that nothing goes while a pin or a freeze holds it (P1, P6, P7)."""

from __future__ import annotations

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.slots import FILLING, FREE, SEALED, VOIDS_KEPT_MAX, Slot, Slots
from tests.core.machines import EPOCH, at, fact, layout, member, record_of


@pytest.fixture
def ctx() -> Context:
    return Context("job", member("b"), Policy(), now=10.0)


@pytest.fixture
def slots(ctx: Context) -> Slots:
    return Slots(ctx)


def freed(ctx: Context) -> list[int]:
    found = [do.slot for do in ctx.out if isinstance(do, ins.FreeSlot)]
    ctx.out = []
    return found


def hold(slots: Slots, slot_id: int, step: int, rank: int = 0, tier: int = 0, *, own: bool = False) -> Slot:
    slot = slots.by_id.get(slot_id) or Slot(slot_id, rank, own)
    slots.hold(slot, fact(step, rank, tier), layout(rank))
    return slot


def test_slots_of_a_rank_are_added_once_and_the_first_free_one_is_given(slots: Slots) -> None:
    slots.add(0, (1, 2))
    slots.by_id[1].state = FILLING
    slots.add(0, (1,))
    slots.add(1, (3,))
    assert slots.by_id[1].state == FILLING, "what is known already stays as it is"
    assert [slots.first_free(rank).id for rank in (0, 1) if slots.first_free(rank)] == [2, 3]  # type: ignore[union-attr]
    assert slots.first_free(2) is None
    hold(slots, 9, 1, rank=2, own=False)
    assert slots.first_free(2) is None, "a replica is no slot of its rank"


def test_capacity_is_what_may_be_granted(slots: Slots) -> None:
    slots.add(0, (1, 2, 3, 4))
    slots.add(1, (5,))
    slots.by_id[1].state = FILLING
    slots.by_id[2].state, slots.by_id[2].doomed = FILLING, True
    hold(slots, 3, 1, own=True)
    hold(slots, 9, 1, rank=0, own=False)
    assert slots.capacities() == {0: 2, 1: 1}, (
        "free ones, and those filled under a grant that stands"
    )


def test_filling_slots_by_rank_and_grant(slots: Slots) -> None:
    slots.add(0, (1, 2, 3))
    slots.add(1, (4,))
    for slot_id, grant in ((1, 7), (2, 8), (4, 7)):
        slots.by_id[slot_id].state, slots.by_id[slot_id].grant = FILLING, grant
    assert [s.id for s in slots.filling()] == [1, 2, 4]
    assert [s.id for s in slots.filling(0)] == [1, 2]
    assert [s.id for s in slots.filling(grant=7)] == [1, 4]
    assert [s.id for s in slots.filling(0, 7)] == [1]


def test_retired_slots_are_forgotten_and_those_in_use_named(slots: Slots) -> None:
    slots.add(0, (1, 2))
    hold(slots, 2, 1, own=True)
    assert [s.id for s in slots.remove((1, 2, 99))] == [2]
    assert (slots.by_id, slots.sealed) == ({}, {})


def test_the_fullest_undamaged_holding_is_the_best(slots: Slots) -> None:
    hold(slots, 1, 5, tier=2)
    full = hold(slots, 2, 5, tier=0)
    hold(slots, 3, 5, rank=1, tier=0)
    assert slots.best(at(5), 0) is full
    slots.pin("a write", at(5))
    slots.quarantine(full)
    best = slots.best(at(5), 0)
    assert best is not None and best.id == 1, "a damaged copy is not served (P10)"
    assert slots.best(at(6), 0) is None


def test_a_slot_that_was_damaged_is_as_good_as_any_once_it_is_filled_anew(slots: Slots) -> None:
    slots.add(0, (1,))
    slots.quarantine(hold(slots, 1, 5, own=True))
    again = hold(slots, 1, 6, own=True)
    assert slots.best(at(6), 0) is again


def test_what_is_held_is_told_until_it_is_released(slots: Slots, ctx: Context) -> None:
    hold(slots, 1, 5)
    hold(slots, 2, 6)
    slots.pin("a write", at(5))
    slots.release(at(5))
    assert slots.facts() == (fact(6, 0),), "what only waits for its pin is promised to nobody"
    hold(slots, 1, 7)
    assert fact(7, 0) in slots.facts(), "a slot begins anew with what it holds"


def test_a_freed_slot_has_nothing_of_what_it_was(slots: Slots, ctx: Context) -> None:
    slots.add(0, (1,))
    slot = hold(slots, 1, 5, own=True)
    slot.grant, slot.doomed, slot.void, slot.released = 4, True, "late", True
    slots.free(slot)
    assert slot == Slot(1, 0, own=True)
    assert (slots.sealed, slots.by_id, freed(ctx)) == ({}, {1: slot}, [1])
    slots.free(hold(slots, 2, 5))
    assert (list(slots.by_id), freed(ctx)) == ([1], [2]), "a replica's memory is nobody's any more"


def test_two_holdings_of_one_snapshot_go_one_by_one(slots: Slots, ctx: Context) -> None:
    one, other = hold(slots, 1, 5), hold(slots, 2, 5, rank=1)
    slots.free(one)
    assert slots.sealed == {at(5): [other]}
    assert (one.state, other.state) == (FREE, SEALED)


def test_what_is_pinned_goes_when_the_last_pin_falls(slots: Slots, ctx: Context) -> None:
    """P1: nobody writes into memory that a restore or a write reads."""
    hold(slots, 1, 5)
    slots.pin("restore", at(5), at(6))
    slots.pin("write x", at(5))
    slots.release(at(5))
    slots.unpin("restore")
    assert (freed(ctx), slots.pinned(at(5)), slots.pinned(at(6))) == ([], True, False)
    slots.unpin("write x")
    assert (freed(ctx), slots.pinned(at(5))) == ([1], False)
    slots.unpin("write x")


def test_a_pin_that_falls_frees_only_what_was_released(slots: Slots, ctx: Context) -> None:
    hold(slots, 1, 5)
    retired = hold(slots, 2, 5, rank=1)
    slots.pin("write x", at(5))
    slots.retire(retired)
    assert freed(ctx) == []
    slots.unpin("write x")
    assert freed(ctx) == [2]


def test_a_retired_or_damaged_one_goes_at_once_when_nobody_reads_it(slots: Slots, ctx: Context) -> None:
    slots.retire(hold(slots, 1, 5))
    slots.quarantine(hold(slots, 2, 6))
    assert freed(ctx) == [1, 2]


def test_an_inventory_that_was_answered_freezes_releases_for_a_while(slots: Slots, ctx: Context) -> None:
    """P3: what was named to whoever decides about a restore stays until it has decided, or its time is up."""
    hold(slots, 1, 5)
    hold(slots, 2, 6)
    slots.frozen_until = 12.0
    slots.release(at(5))
    slots.on_tick()
    assert freed(ctx) == []
    ctx.now = 12.0
    slots.on_tick()
    assert (freed(ctx), slots.frozen_until) == ([1], 0.0)
    slots.frozen_until = 20.0
    slots.release(at(6))
    slots.thaw()
    assert (freed(ctx), slots.frozen_until) == ([2], 0.0)


def test_whoever_decides_hears_of_what_was_released_and_not_of_what_is_damaged_or_void(slots: Slots) -> None:
    """P3: asked a second time, a frozen node must not say less than the first time."""
    hold(slots, 1, 5)
    damaged = hold(slots, 2, 6)
    slots.frozen_until = 12.0
    slots.release(at(5))
    slots.quarantine(damaged)
    hold(slots, 3, 7)
    slots.mark_void(at(7), "copies differ")
    slots.release(at(7))
    assert (slots.facts(), slots.frozen_facts()) == ((), (fact(5, 0),))
    slots.keep(at(7))
    assert slots.facts() == (), "what is void is nobody's to restore"


def test_what_the_next_epoch_was_opened_on_is_kept_although_the_one_before_had_it_released(
    slots: Slots, ctx: Context
) -> None:
    """P3: nothing newer is in the new lineage. A damaged copy is not wanted by anybody."""
    hold(slots, 1, 5)
    hold(slots, 3, 6)
    slots.frozen_until = 12.0
    slots.quarantine(hold(slots, 2, 5, rank=1))
    slots.release(at(5))
    slots.release(at(6))
    slots.keep(at(5))
    slots.thaw()
    assert freed(ctx) == [2, 3]
    assert slots.facts() == (fact(5, 0),)


def test_voids_and_what_was_spared_are_remembered_and_bounded(slots: Slots) -> None:
    for step in range(VOIDS_KEPT_MAX + 2):
        slots.mark_void(at(step), "why")
        slots.mark_spared(at(step))
    newest = [at(step) for step in range(2, VOIDS_KEPT_MAX + 2)]
    assert (list(slots.void), list(slots.spared)) == (newest, newest)


def test_an_epoch_is_written_down_as_sealed_when_each_rank_here_has_sealed_something_of_it(slots: Slots, ctx: Context) -> None:
    """P1: a start that finds nothing goes by this. Too early it refuses what lost nothing, too late it begins anew in silence."""
    ctx.record = record_of("abb")

    def sealed(slot: int, rank: int, epoch: int = EPOCH, *, own: bool = True) -> list[int]:
        ctx.out = []
        slots.hold(Slot(slot, rank, own), fact(7, rank, epoch=epoch, world=3), layout(rank, 3))
        return [do.epoch for do in ctx.out if isinstance(do, ins.PersistSealed)]

    assert sealed(1, 1) == sealed(2, 1) == sealed(3, 2, own=False) == []
    ctx.record = record_of("abb", number=EPOCH + 1)
    assert sealed(4, 2, EPOCH + 1) == [], "what rank 1 had sealed was of the epoch before"
    assert sealed(5, 1, EPOCH + 1) == [EPOCH + 1] == [ctx.sealed]
    assert sealed(6, 2, EPOCH) == sealed(7, 1, EPOCH + 1) == [], "said once"
    ctx.record = record_of("abb", number=EPOCH + 3)
    assert sealed(8, 1, EPOCH + 2) == [EPOCH + 2], "whose ranks lived here then, nobody knows any more"


# --- readers who are no ranks -------------------------------------------------------------------------------------
def test_a_copy_stays_for_who_reads_it_until_he_has_ended_or_reads_another_one(slots: Slots, ctx: Context) -> None:
    for slot_id, step in ((1, 7), (2, 8)):
        hold(slots, slot_id, step)
    slots.read("first", (at(7), at(8)))
    slots.read("second", (at(7),))
    for step in (7, 8):
        slots.release(at(step))
    assert freed(ctx) == [] and slots.facts() == (), "whoever decides does not count it any more"
    slots.read("first", (at(7),))
    assert freed(ctx) == [2]
    slots.read("first", ())
    assert freed(ctx) == []
    slots.read("second", ())
    slots.read("second", ())
    assert freed(ctx) == [1]


def test_of_own_slots_two_are_left_to_go_on_with(slots: Slots, ctx: Context) -> None:
    """Those of the rank, whatever other ranks have; of four two may stay for readers."""
    slots.add(1, (9, 10, 11, 12))
    for slots_of_rank, stay in ((2, []), (3, [1]), (4, [1, 2])):
        slots.by_id = {slot_id: slot for slot_id, slot in slots.by_id.items() if slot.rank}
        slots.add(0, range(1, slots_of_rank + 1))
        for slot_id, step in ((1, 7), (2, 8)):
            hold(slots, slot_id, step, own=True)
        slots.read("reader", (at(7), at(8)))
        for step in (7, 8):
            slots.release(at(step))
        assert freed(ctx) == [slot_id for slot_id in (1, 2) if slot_id not in stay]
        slots.read("reader", ())
        assert freed(ctx) == stay


def test_what_is_void_or_damaged_stays_for_no_reader(slots: Slots, ctx: Context) -> None:
    damaged, _ = hold(slots, 1, 7), hold(slots, 2, 8)
    slots.read("reader", (at(7), at(8)))
    slots.quarantine(damaged)
    slots.mark_void(at(8), "torn")
    slots.release(at(8))
    assert freed(ctx) == [1, 2]


def test_what_is_pinned_by_others_is_not_there_for_readers_alone(slots: Slots, ctx: Context) -> None:
    slot = hold(slots, 1, 7)
    slots.read("reader", (at(7),))
    assert not slots.for_readers(slot), "it is needed"
    slots.pin("write", at(7))
    slots.release(at(7))
    assert not slots.for_readers(slot)
    slots.unpin("write")
    assert slots.for_readers(slot) and freed(ctx) == []
