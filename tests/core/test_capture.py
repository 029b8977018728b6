"""Grants on a node: a slot for each local rank, the outcome to the steward, the way back when one is void (P6, P14, D9)."""

from __future__ import annotations

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.capture import GRANTS_KEPT_MAX, TEXT_CHARS_MAX
from tests.core.machines import EPOCH, Member, at, fact, layout, only, record_of

POLICY = Policy(replicas=1, durable=False)


@pytest.fixture
def node() -> Member:
    """Rank 1 with two slots."""
    member = Member(record_of("abc"), POLICY)
    member.slots(1, 1, 2)
    return member


def given(done: list[ins.Instruction]) -> list[tuple[int, int]]:
    return [(do.slot, do.from_step) for do in only(done, ins.GiveSlot)]


def missed(done: list[ins.Instruction]) -> list[tuple[int, str]]:
    from tests.core.machines import sent

    return [(m.grant, m.reason) for m in sent(done, msg.Missed, "a")]


def state_of(node: Member, slot: int) -> tuple[str, bool]:
    return node.machine.slots.by_id[slot].state, node.machine.slots.by_id[slot].doomed


# --- grants -----------------------------------------------------------------------------------------------------------
def test_a_grant_gives_a_free_slot_once(node: Member) -> None:
    assert given(node.grant(7)) == [(1, 7)]
    assert given(node.order(msg.Grant(EPOCH, 1, 7))) == [], "the same grant again"
    assert given(node.grant(8)) == [(2, 8)]
    assert missed(node.grant(9)) == [(3, ev.NO_SLOT)]


def test_a_rank_that_is_beyond_the_step_has_missed_it(node: Member) -> None:
    node.feed(ev.RankProgress(1, 7))
    assert missed(node.grant(7)) == [(1, "late")]
    assert given(node.grant(8)) == [(1, 8)]


def test_a_rank_that_waits_is_handed_what_comes(node: Member) -> None:
    """It alone knows whether it has let go of a step since: the first one that it calls is good for a grant from an earlier one on,
    and the others take that."""
    node.feed(ev.RankProgress(1, 7, asks=True))
    assert given(node.grant(6)) == [(1, 6)]
    assert given(node.grant(7)) == [(2, 7)]


def test_a_rank_that_is_not_there_misses_it(node: Member) -> None:
    node.feed(ev.RankLeft(1, clean=True))
    assert missed(node.grant(7)) == [(1, ev.NOT_HERE)]
    assert missed(node.order(msg.Grant(EPOCH, 1, 7))) == []


def test_ranks_of_other_nodes_are_not_ours_to_answer_for(node: Member) -> None:
    assert [do.rank for do in only(node.grant(7), ins.GiveSlot)] == [1]


def test_answered_grants_are_remembered_and_older_ones_not_taken_again(node: Member) -> None:
    node.grant(7)
    for number in range(2, GRANTS_KEPT_MAX + 4):
        node.order(msg.Grant(EPOCH, number, 7))
    assert len(node.machine.capture._answered) == GRANTS_KEPT_MAX
    assert missed(node.order(msg.Grant(EPOCH, 1, 7))) == [], "long settled"
    node.feed(ev.RankMissed(1, 1, "x"))
    assert given(node.order(msg.Grant(EPOCH, 2, 9))) == []


# --- seals ------------------------------------------------------------------------------------------------------------
def test_a_sealed_slot_is_told_with_its_grant_and_layout(node: Member) -> None:
    node.grant(7)
    mark = node.mark
    node.seal(1, 7, 1, keep=True, came_at=5)
    (told,) = node.said(msg.Sealed, "a", mark)
    assert (told.fact, told.came_at) == (fact(7, 1, grant=1, world=3, keep=True), 5)
    (state,) = node.said(msg.RankState, "a", mark)
    assert state.free_slots == 1, "before it, so that no slot counts twice"
    assert state.serial < told.serial
    assert state_of(node, 1) == ("sealed", False)


def test_a_slot_is_sealed_once(node: Member) -> None:
    node.capture(1, 7, rank=1)
    mark = node.mark
    node.seal(1, 7, 1)
    node.seal(99, 7, 1)
    assert node.said(msg.Sealed, "a", mark) == []


def test_what_was_captured_before_a_restart_of_this_daemon_is_dropped(node: Member) -> None:
    assert only(node.seal(2, 7, 1, grant=1), ins.FreeSlot) == [ins.FreeSlot(2)]
    assert node.said(msg.Sealed) == []


def test_what_was_captured_under_another_grant_than_the_slots_is_dropped_and_the_rank_told(
    node: Member,
) -> None:
    """Without this word it would wait for a level for ever."""
    node.grant(7)
    done = node.seal(1, 7, 1, grant=99)
    assert only(done, ins.TellLevel) == [ins.TellLevel(at(7, grant=99), -1, 0, False, "its grant was void")]
    assert only(done, ins.FreeSlot) == [ins.FreeSlot(1)]
    assert missed(done) == [(1, "void")]


def test_what_is_sealed_under_a_void_grant_is_dropped(node: Member) -> None:
    node.grant(7)
    node.order(msg.Void(EPOCH, 1, "rank 0 missed it"))
    done = node.seal(1, 7, 1)
    assert (only(done, ins.FreeSlot), missed(done)) == ([ins.FreeSlot(1)], [(1, "void")])
    assert node.said(msg.Sealed) == []


def test_a_capture_of_an_epoch_that_is_over_is_void_in_its_own_epoch(node: Member) -> None:
    """P2: that step of the new epoch may still be captured, and certified."""
    node.grant(7)
    node.feed(ev.Received("b", msg.Stale(record_of("abc", number=EPOCH + 1, nonce="newer"))))
    done = node.seal(1, 7, 1)
    assert only(done, ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "a newer epoch opened")]


def test_what_is_sealed_of_a_void_snapshot_is_dropped_with_its_reason(node: Member) -> None:
    node.grant(7)
    node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    done = node.seal(1, 7, 1)
    assert only(done, ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "copies differ")]
    assert only(done, ins.FreeSlot) == [ins.FreeSlot(1)]


def test_a_rank_that_waited_for_a_step_does_not_wait_any_more_when_it_is_sealed(node: Member) -> None:
    node.feed(ev.RankProgress(1, 7, asks=True))
    node.capture(1, 7, rank=1)
    assert [m.asks for m in node.said(msg.RankState, "a")][-1] is None
    node.feed(ev.RankProgress(1, 9, asks=True))
    node.order(msg.Grant(EPOCH, 5, 9))
    node.seal(2, 8, 1, grant=5)
    assert [m.asks for m in node.said(msg.RankState, "a")][-1] == 9, "it waits for a later one"


def test_a_step_that_went_by_does_not_come_back(node: Member) -> None:
    node.feed(ev.RankProgress(1, 8), ev.RankProgress(1, 6))
    assert [m.step for m in node.said(msg.RankState, "a")][-1] == 8


def test_progress_of_a_rank_that_left_is_nobodys_business(node: Member) -> None:
    node.feed(ev.RankLeft(1, clean=False))
    mark = node.mark
    node.feed(ev.RankProgress(1, 8))
    assert node.said(msg.RankState, since=mark) == []


def test_why_a_rank_has_fewer_slots_than_it_should_is_told_until_it_has_them(node: Member) -> None:
    """P15: the steward names it where snapshots are waited for."""
    mark = node.mark
    for why in ("no memory: 3 of 4 slots", ""):
        node.feed(ev.SlotsShort(1, why))
    node.feed(ev.SlotsShort(1, "x" * 2 * TEXT_CHARS_MAX))
    told = [state.short for state in node.said(msg.RankState, "a", mark)]
    assert told == ["no memory: 3 of 4 slots", "", "x" * TEXT_CHARS_MAX]


# --- voids ------------------------------------------------------------------------------------------------------------
def test_a_void_grant_takes_its_slot_back_and_waits_for_the_rank(node: Member) -> None:
    """P6: it may be writing into it."""
    node.grant(7)
    mark = node.mark
    done = node.order(msg.Void(EPOCH, 1, "rank 0 missed it"))
    assert only(done, ins.TakeBack) == [ins.TakeBack(1, 1, "rank 0 missed it")]
    assert state_of(node, 1) == ("filling", True)
    assert [m.free_slots for m in node.said(msg.RankState, "a", mark)] == [1], (
        "a doomed slot cannot be granted"
    )
    assert only(node.order(msg.Void(EPOCH, 1, "again")), ins.TakeBack) == []
    done = node.feed(ev.RankMissed(1, 1, "taken back"))
    assert (state_of(node, 1), missed(done)) == (("free", False), [(1, "taken back")])


def test_a_rank_that_takes_a_failed_seal_for_captured_is_told_why_it_is_void(node: Member) -> None:
    """P15: it waits for a level. One that gave the snapshot up itself knows."""
    node.grant(7)
    done = node.feed(ev.RankMissed(1, 1, "record too large: 3 bytes, the slot has room for 2", 7))
    assert only(done, ins.TellLevel) == [
        ins.TellLevel(at(7), -1, 0, False, "record too large: 3 bytes, the slot has room for 2")
    ]
    node.grant(8)
    assert only(node.feed(ev.RankMissed(1, 2, "late")), ins.TellLevel) == []


def test_a_failed_seal_is_void_in_the_epoch_that_it_was_captured_in(node: Member) -> None:
    """P15: else the rank waits on, and P2: the step of the new epoch may still be captured."""
    node.grant(7)
    node.feed(ev.Received("b", msg.Stale(record_of("abc", number=EPOCH + 1, nonce="newer"))))
    assert only(node.feed(ev.RankMissed(1, 1, "no space", 7)), ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "no space")]
    done = node.feed(ev.RankMissed(1, 1, "its slot is gone", 7))
    assert only(done, ins.TellLevel) == [ins.TellLevel(at(7, EPOCH + 1, grant=1), -1, 0, False, "its slot is gone")]


def test_a_seal_that_comes_after_its_grant_was_void_is_told_why(node: Member) -> None:
    """P15"""
    node.grant(7)
    node.order(msg.Void(EPOCH, 1, "rank 0 missed it: late"))
    assert only(node.seal(1, 7, 1), ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "rank 0 missed it: late")]


def test_a_void_that_overtook_its_grant_is_answered_and_the_grant_not_taken(node: Member) -> None:
    assert missed(node.order(msg.Void(EPOCH, 1, "rank 0 missed it"))) == [(1, "void")]
    assert given(node.order(msg.Grant(EPOCH, 1, 7))) == []


def test_a_void_of_a_snapshot_alone_answers_for_no_grant(node: Member) -> None:
    assert missed(node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))) == []
    node.grant(8)
    assert state_of(node, 1) == ("filling", False)


def test_a_void_snapshot_goes_and_everybody_hears_it(node: Member) -> None:
    node.capture(1, 7, rank=1)
    done = node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    assert only(done, ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "copies differ")]
    assert only(done, ins.FreeSlot) == [ins.FreeSlot(1)]
    told = node.said(msg.Held, "a")
    assert [(m.fact.snapshot, m.lost) for m in told] == [(at(7), True)]
    assert [m.free_slots for m in node.said(msg.RankState, "a")][-1] == 2
    done = node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    assert only(done, ins.TellLevel) == [], "said once"


def test_a_void_snapshot_that_is_pinned_is_told_as_lost_once(node: Member) -> None:
    node.capture(1, 7, rank=1)
    node.machine.slots.pin("write x", at(7))
    node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    done = node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    assert only(node.done, ins.FreeSlot) == []
    assert len(node.said(msg.Held, "a")) == 1, done


def test_a_step_that_was_void_can_be_captured_under_a_new_grant_for_it(node: Member) -> None:
    """A step that had been void once could never complete."""
    node.capture(1, 7, rank=1)
    node.order(msg.Void(EPOCH, 0, "rank 0 missed it", at(7)))
    node.feed(ev.RankProgress(1, 7, asks=True))
    node.grant(7)
    node.seal(1, 7, 1)
    assert len(node.said(msg.Sealed, "a")) == 2


# --- ranks and slots that go ------------------------------------------------------------------------------------------
def test_what_a_rank_was_filling_when_it_died_is_free(node: Member) -> None:
    """P6: the slot that holds the snapshot before stays."""
    node.capture(1, 7, rank=1)
    node.grant(8)
    done = node.feed(ev.RankLeft(1, clean=False))
    assert missed(done) == [(2, "the rank is gone")]
    assert (state_of(node, 1), state_of(node, 2)) == (("sealed", False), ("free", False))


def test_what_a_rank_was_given_by_a_connection_that_broke_is_taken_back(node: Member) -> None:
    """P14: it had never heard of the grant, and nobody gave that up: a rank that waits for just this step waited on (a reader's
    history). Seen where a stopped trainer's daemon closed its connection."""
    node.capture(1, 7, rank=1)
    node.feed(ev.RankProgress(1, 8, asks=True))
    node.grant(8)
    done = node.join(1, grant=1)
    assert only(done, ins.TakeBack) == [ins.TakeBack(1, 2, "the connection broke")]
    assert (state_of(node, 1), state_of(node, 2)) == (("sealed", False), ("filling", True))
    assert only(node.join(1, grant=1), ins.TakeBack) == [ins.TakeBack(1, 2, "the connection broke")], "it broke once more"
    assert missed(node.feed(ev.RankMissed(1, 2, "not its"))) == [(2, "not its")]


def test_a_rank_that_comes_back_is_told_again_why_its_grant_was_void(node: Member) -> None:
    """P15: it may have missed that; another reason would be wrong."""
    node.grant(7)
    node.order(msg.Void(EPOCH, 1, "rank 0 missed it"))
    assert only(node.join(1, grant=1), ins.TakeBack) == [ins.TakeBack(1, 1, "rank 0 missed it")]


def test_a_rank_answers_for_its_own_grant_only(node: Member) -> None:
    node.grant(7)
    node.grant(8)
    done = node.feed(ev.RankMissed(1, 2, "no memory"), ev.RankMissed(0, 1, "x"))
    assert missed(done) == [(2, "no memory")]
    assert state_of(node, 1) == ("filling", False)


def test_slots_that_were_retired_are_told(node: Member) -> None:
    node.slots(1, 3, 4)
    node.capture(1, 7, rank=1)
    node.grant(8)
    node.grant(9)
    node.order(msg.Void(EPOCH, 3, "why"))
    done = node.feed(ev.SlotsGone(1, (1, 2, 3, 4)))
    assert missed(done) == [(2, "its slot was retired"), (3, "its slot was retired")], "a free one has no grant"
    assert [(m.fact.snapshot, m.lost) for m in node.said(msg.Held, "a")] == [(at(7), True)]


def test_a_void_grant_whose_slot_is_retired_before_its_rank_answered_is_settled(node: Member) -> None:
    """P14: the steward waited for that answer for ever, and granted nothing meanwhile (simulator, seed 914974 of that day)."""
    node.grant(7)
    assert only(node.order(msg.Void(EPOCH, 1, "another rank missed it")), ins.TakeBack)
    done = node.feed(ev.SlotsGone(1, (1, 2)), ev.RankMissed(1, 1, "the rank is not here"))
    assert missed(done) == [(1, "its slot was retired")], "told once"
    node.slots(1, 5)
    node.grant(8)
    node.hello("s2")
    assert missed(node.feed(ev.SlotsGone(1, (5,)))) == [], "nobody waits for the grants of an earlier session"


def test_a_new_session_dooms_what_is_being_filled(node: Member) -> None:
    """Nobody waits for the grants of the old one."""
    node.capture(1, 7, rank=1)
    node.grant(8)
    done = node.hello("s2")
    assert [(do.rank, do.grant) for do in only(done, ins.TakeBack)] == [(1, 2)]
    assert node.machine.slots.by_id[1].grant == 0
    done = node.feed(ev.RankMissed(1, 2, "taken back"))
    assert missed(done) == [], "a grant of the steward before"
    assert given(node.order(msg.Grant(EPOCH, 2, 8))) == [(2, 8)], "numbers of the new session are its own"
    assert only(node.hello("s3"), ins.TakeBack) == [ins.TakeBack(1, 2, "the steward began anew")]
    assert only(node.hello("s4"), ins.TakeBack) == [], "doomed already"


# --- holdings ---------------------------------------------------------------------------------------------------------
def arrive(node: Member, slot: int, step: int, *, rank: int = 0, tier: int = 1) -> list[ins.Instruction]:
    return node.feed(ev.ReplicaArrived(at(step), rank, tier, slot, layout(rank, 3), (), keep=True))


def test_a_replica_that_arrived_is_told(node: Member) -> None:
    arrive(node, 50, 7)
    assert [m.fact for m in node.said(msg.Held, "a")] == [fact(7, 0, 1, world=3, keep=True)]
    assert not node.said(msg.Held, "a")[0].lost


def test_a_fuller_replica_takes_the_place_of_a_smaller_one(node: Member) -> None:
    arrive(node, 50, 7, tier=2)
    assert only(arrive(node, 51, 7, tier=2), ins.FreeSlot) == [ins.FreeSlot(51)], "the same again"
    assert only(arrive(node, 52, 7, tier=1), ins.FreeSlot) == [ins.FreeSlot(50)]
    assert only(arrive(node, 53, 7, tier=2), ins.FreeSlot) == [ins.FreeSlot(53)]
    assert only(arrive(node, 54, 7, rank=2, tier=2), ins.FreeSlot) == [], "another rank's"
    assert [m.fact.tier for m in node.said(msg.Held, "a")] == [2, 1, 2]


def test_a_replica_of_what_is_being_released_is_taken_in_anew(node: Member) -> None:
    arrive(node, 50, 7)
    node.machine.slots.pin("x", at(7))
    node.certify(1, 8, 0, releases=(at(7),))
    assert only(arrive(node, 51, 7), ins.FreeSlot) == []


def test_a_replica_of_a_void_snapshot_is_dropped(node: Member) -> None:
    node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    assert node.machine.admits_replica(at(7), 0) == "void"
    assert only(arrive(node, 50, 7), ins.FreeSlot) == [ins.FreeSlot(50)]
    assert node.said(msg.Held) == []


def test_a_damaged_replica_is_told_to_the_steward_and_its_owner() -> None:
    """P10."""
    node = Member(record_of("abc"), POLICY)
    arrive(node, 50, 7, rank=2)
    done = node.feed(ev.SlotDamaged(50, "found while reading"))
    assert only(done, ins.FreeSlot) == [ins.FreeSlot(50)]
    assert [(to, m.lost, bool(m.session)) for to in "ac" for m in node.said(msg.Held, to) if m.lost] == [
        ("a", True, True),
        ("c", True, False),
    ]
    assert node.feed(ev.SlotDamaged(50, "again")) == []


def test_a_damaged_own_slot_is_told_to_the_steward_alone(node: Member) -> None:
    node.capture(1, 7, rank=1)
    node.machine.slots.pin("write", at(7))
    mark = node.mark
    node.feed(ev.SlotDamaged(1, "x"))
    node.feed(ev.SlotDamaged(1, "x"))
    node.feed(ev.SlotDamaged(2, "x"))
    assert [
        (do.to, m.lost) for do in only(node.done[mark:], ins.Send) if isinstance(m := do.message, msg.Held)
    ] == [("a", True)]
    assert node.machine.slots.best(at(7), 1) is None, "not served any more, though a write still reads it"


def test_damage_in_a_replica_of_an_earlier_epoch_is_nobodys_business_but_the_stewards() -> None:
    node = Member(record_of("abc", ancestry=(at(5, EPOCH - 1),)), POLICY)
    node.feed(ev.ReplicaArrived(at(5, EPOCH - 1), 2, 1, 50, layout(2, 3), ()))
    mark = node.mark
    node.feed(ev.SlotDamaged(50, "x"))
    assert [do.to for do in only(node.done[mark:], ins.Send)] == ["a"]


def test_what_lies_beyond_the_fork_is_not_taken_in_and_goes_when_the_restore_is_done() -> None:
    record = record_of("abc", ancestry=(at(5, EPOCH - 1),))
    node = Member(record, POLICY, running=False)
    for slot, step in ((1, 5), (2, 6)):
        node.feed(ev.HoldingFound(slot, at(step, EPOCH - 1), 1, 0, True, layout(1, 3), ()))
    assert node.machine.admits_replica(at(6, EPOCH - 1), 0) == "", "the restore may still be called off"
    done = node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert only(done, ins.FreeSlot) == [ins.FreeSlot(2)]
    assert node.machine.admits_replica(at(6, EPOCH - 1), 0) == "stale epoch"
    assert node.machine.admits_replica(at(5, EPOCH - 1), 0) == ""
    assert only(node.feed(ev.ReplicaArrived(at(6, EPOCH - 1), 0, 1, 9, layout(0, 3), ())), ins.FreeSlot) == [
        ins.FreeSlot(9)
    ]


def test_a_fresh_start_keeps_the_lineage_before_until_it_has_something_of_its_own() -> None:
    node = Member(record_of("abc"), POLICY, running=False)
    node.feed(ev.HoldingFound(1, at(6, EPOCH - 1), 1, 0, True, layout(1, 3), ()))
    assert only(node.hear("a", msg.RestoreDone(EPOCH, EPOCH)), ins.FreeSlot) == []
    assert node.machine.admits_replica(at(6, EPOCH - 1), 0) == ""


def test_a_snapshot_of_this_epoch_that_is_found_proves_that_its_restore_was_done() -> None:
    """It could not have been captured otherwise."""
    node = Member(record_of("abc", ancestry=(at(5, EPOCH - 1),)), POLICY, running=False)
    node.feed(ev.HoldingFound(1, at(5, EPOCH - 1), 1, 0, True, layout(1, 3), ()))
    assert not node.machine.view()["done"]
    node.feed(ev.HoldingFound(2, at(7), 1, 0, True, layout(1, 3), ()))
    assert node.machine.view()["done"]


def test_a_late_word_that_a_step_is_void_does_not_concern_its_second_capture(node: Member) -> None:
    """P3: it was certified, and the word that its first capture was void came after that (the simulator)."""
    node.grant(7)
    node.order(msg.Void(EPOCH, 1, "late"))
    node.feed(ev.RankMissed(1, 1, "taken back"))
    node.grant(7)
    late = msg.Void(EPOCH, 0, "late", at(7, grant=1))
    node.order(late)
    node.seal(1, 7, 1)
    node.order(msg.Certificate(EPOCH, 1, at(7, grant=2), 0, 0, False))
    mark = node.mark
    node.order(late)
    assert (state_of(node, 1), only(node.done[mark:], ins.TellLevel)) == (("sealed", False), [])
    node.order(msg.Void(EPOCH, 0, "differs", at(7, grant=2)))
    assert state_of(node, 1)[0] == "free"
