"""A start of the job at its steward-elect: who is asked, what is chosen, who is refused, and two votes (D10, D11, P3, P12)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.decide import CLAIM_SPREAD, spread
from ckptd.core.protocol.machine.steward.gather import FRESH_S
from ckptd.core.protocol.machine.steward.restore import (
    CLAIM_TIMEOUT_S,
)
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from tests.core.elect import ASK, BEFORE, BOTH, LAYOUTS, OLD, A, B, C, Elect
from tests.core.machines import at, layout, member, only, sent


# --- what is chosen ---------------------------------------------------------------------------------------------------
def test_the_newest_whole_snapshot_is_chosen_with_its_sources() -> None:
    node = Elect()
    message = node.open()
    assert (message.snapshot, message.durable) == (at(5, OLD), False)
    assert {(s.node, s.rank) for s in message.sources} == {("b", 0), ("b", 1)}
    assert (message.record.number, message.record.ranks, message.record.nodes) == (
        OLD + 1,
        ("a", "b"),
        (A, B),
    )
    assert message.record.before == (OLD, ())


def test_a_proven_fresh_start_restores_nothing() -> None:
    node = Elect().start()
    node.answer("b")
    node.claimed()
    message = node.opens()[-1]
    assert (message.snapshot, message.record.number, message.record.before) == (None, 1, (-1, ()))


def test_a_step_that_was_asked_for_is_not_there_in_a_fresh_job_either() -> None:
    """A job name with a slip in it would begin at step 0 without a word."""
    node = Elect(ask=replace(ASK, step=50)).start()
    node.answer("b")
    (refused,) = sent(node.done, msg.JoinRefused, "a")
    assert (refused.code, refused.reason) == ("unrecoverable", "there is no checkpoint of step 50")
    node = Elect(ask=replace(ASK, step=50, allow_fresh=True)).start()
    node.answer("b")
    node.claimed()
    assert node.opens()[-1].snapshot is None


@pytest.mark.parametrize(
    "told", [{"certified": ((at(5, OLD), 0, False),)}, {"holdings": BOTH[:1]}, {"certified": ((at(5, OLD), -1, True),)}]
)
def test_a_job_that_has_had_snapshots_does_not_start_fresh_by_itself(told: dict[str, Any]) -> None:
    """None may be returned only when it is proven that there is no checkpoint (D11)."""
    node = Elect().start()
    node.answer("b", *told.pop("holdings", ()), known=BEFORE, done=True, **told)
    assert node.refusals() == [("now", "unrecoverable")]


def test_while_somebody_is_silent_it_may_still_be_recovered() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known).start()
    node.answer("b", known=known, done=True)
    node.tick(2.5)
    assert node.refusals()[0] == ("now", "unreachable")
    node = Elect(durable=True).start()
    node.answer("b", *BOTH[:1], known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", False, reason="EIO"))
    node.answer("b", *BOTH[:1], known=BEFORE, done=True)
    assert node.refusals() == [("now", "unreachable")]
    assert "storage did not answer: EIO" in sent(node.done, msg.JoinRefused)[0].reason


def test_a_declared_fresh_start_leaves_the_lineage_behind() -> None:
    node = Elect(ask=msg.RestoreAsk(allow_fresh=True)).start()
    node.answer("b", *BOTH[:1], known=BEFORE, done=True)
    node.claimed()
    message = node.opens()[-1]
    assert (message.snapshot, message.record.ancestry, message.record.before) == (None, (), (OLD, ()))
    assert any("holds nothing of rank 1" in error for error in message.errors)


def test_ranks_that_ask_for_no_restore_begin_a_lineage() -> None:
    node = Elect(ask=None).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    assert (node.claim.ancestry, node.claim.number) == ((), OLD + 1)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (msg.RestoreAsk(step=3), "there is no checkpoint of step 3"),
        (msg.RestoreAsk(source="memory", step=3), "there is no checkpoint of step 3 in memory"),
        (msg.RestoreAsk(source="durable"), "not on durable storage"),
    ],
)
def test_what_was_asked_for_and_is_not_there_is_named(ask: msg.RestoreAsk, text: str) -> None:
    node = Elect(ask=ask).start(ask=ask)
    node.answer("b", *BOTH, known=BEFORE, done=True)
    assert text in sent(node.done, msg.JoinRefused)[0].reason


@pytest.mark.parametrize(
    ("ancestry", "left", "text"),
    [
        ((at(3, OLD - 1),), at(9, OLD - 1), f"went back to step 3 of epoch {OLD - 1}"),
        ((), at(9, OLD - 1), "started anew"),
        ((at(9, OLD - 1),), at(9, OLD - 1), ""),
        ((at(6, OLD - 1), at(5, OLD - 2)), at(7, OLD - 2), f"went back to step 5 of epoch {OLD - 2}"),  # and went on since
        ((at(6, OLD - 1), at(5, OLD - 3)), at(7, OLD - 2), f"went back to step 5 of epoch {OLD - 3}"),
        ((at(6, OLD - 1),), at(7, OLD - 2), "started anew"),
    ],
)
def test_a_step_that_was_left_behind_is_refused_by_that_name(ancestry: tuple[SnapshotId, ...], left: SnapshotId, text: str) -> None:
    """Of those on storage: they are listed, so "there is none" would be no answer."""
    known, ask = replace(BEFORE, ancestry=ancestry), msg.RestoreAsk(step=left.step)
    node = Elect(ask=ask, durable=True).start(ask=ask)
    node.answer("b", known=known, done=True)
    node.feed(ev.DurableRead("now", True, known, (at(9, OLD - 1), at(9, OLD - 2), at(8, OLD - 1), at(7, OLD - 2))))
    node.answer("b", known=known, done=True)
    if text:
        said = f"step {left.step} of epoch {left.epoch} was left behind when the job {text}; "
        assert said in sent(node.done, msg.JoinRefused)[0].reason
    else:
        assert (node.refusals(), node.claim.ancestry) == ([], (at(9, OLD - 1),))


def test_who_does_not_answer_is_waited_for_when_only_it_may_hold_what_was_asked_for() -> None:
    """Although its link is down, and the others hold something newer."""
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    for ask, decided in ((msg.RestoreAsk(), True), (msg.RestoreAsk(step=3), False)):
        node = Elect(known, ask=ask)
        node.feed(ev.NodeDown("c"))
        node.start().answer("b", *BOTH, known=known, done=True)
        assert (bool(only(node.done, ins.ClaimEpoch)), node.refusals()) == (decided, [])
    node.tick(2.5)
    assert node.refusals()[0] == ("now", "unreachable")


def test_a_start_that_nobody_remembers_may_have_had_a_snapshot() -> None:
    """Only a daemon that has not been restarted since can say that there was none."""
    known = replace(BEFORE, ranks=("b", "b"))
    for incarnation, fresh in (("b#1", True), ("b#2", False), ("", False)):
        node = Elect().start()
        node.answer("b", known=known, done=True, incarnation=incarnation)
        assert bool(only(node.done, ins.ClaimEpoch)) == fresh
    node = Elect().start()
    witness = replace(known, nodes=(A, replace(B, incarnation="")))
    node.answer("b", known=witness, done=True)
    assert node.refusals() == [("now", "unrecoverable")], "nobody knows which process that was"


def test_a_start_after_one_that_never_ran_is_as_fresh_as_that_one_was() -> None:
    for before, fresh in (((-1, ()), True), ((0, ()), False)):
        node = Elect().start()
        node.answer("b", known=replace(BEFORE, before=before), never=True)
        assert bool(only(node.done, ins.ClaimEpoch)) == fresh
        assert node.refusals() == ([] if fresh else [("now", "unrecoverable")])


def test_a_start_after_one_that_had_restored_is_never_fresh() -> None:
    node = Elect().start()
    node.answer("b", known=replace(BEFORE, ancestry=(at(3, 2),)), done=True, incarnation="b#1")
    assert node.refusals() == [("now", "unrecoverable")]


@pytest.mark.parametrize("ordered", [0, OLD])
def test_what_trained_before_one_that_never_ran_is_not_passed_over_because_its_record_is_lost(ordered: int) -> None:
    """Its only node could not write it down and came back, and the newest start had been decided without it: the one before
    was restored (P3; simulator, seed 4897527211 of that day). What was forgotten by order stays so."""
    never = EpochRecord(6, "never", ("a", "b"), (A, B), (at(2, 2),), (), (2, (at(2, 2),)))
    node = Elect(ask=replace(ASK, allow_fresh=True)).start()
    node.answer("b", *BOTH, known=never, never=True, buried=ordered, forgotten=ordered)
    before = (2 if ordered else OLD, (at(2, 2),))
    assert node.claim.before == before
    assert node.claim.ancestry == (() if ordered else (at(5, OLD), at(2, 2)))


def test_what_was_sealed_in_the_newest_epoch_counts_although_its_record_is_lost() -> None:
    """Nobody could write it down, the disks being full, and all daemons came back: to the record that they had it was nobody's
    (P3; a reader's history)."""
    newer = tuple(msg.HoldingFact(at(9, 7), rank, 0, layout(rank).layout_id) for rank in (0, 1))
    node = Elect(BEFORE).start(known=BEFORE)
    node.answer("b", *BOTH, *newer, known=BEFORE, done=True, sealed=7)
    assert node.claim.ancestry == (at(9, 7), at(5, OLD))


def held(snapshot: SnapshotId, *ranks: int) -> tuple[msg.HoldingFact, ...]:
    return tuple(msg.HoldingFact(snapshot, rank, 0, layout(rank).layout_id) for rank in ranks)


def test_what_was_promised_before_an_epoch_whose_record_is_lost_is_not_passed_over_for_a_part_of_its_own() -> None:
    """Its state directory had failed and storage was gone: the start after it, which never ran, was decided without a word of what
    had been before, and half of what it was decided upon was damaged (P3; simulator, seed 9326746343 of that day)."""
    never = EpochRecord(9, "never", ("b", "b"), (B,), (at(9, 7),))
    node = Elect().start()
    node.answer("b", *BOTH, *held(at(9, 7), 1), known=never, never=True, sealed=7)
    assert (node.refusals(), node.claim.ancestry) == ([], (at(5, OLD),))
    assert node.claim.before == (7, (at(5, OLD),)), "the next one knows it, too"


def test_what_is_left_of_epochs_of_which_nobody_has_a_record_is_one_line_as_far_as_anybody_can_tell() -> None:
    """P3: the newest is not whole, and the ones before it are not nobody's for that."""
    node = Elect().start()
    node.answer("b", *held(at(2, 2), 0, 1), *BOTH, *held(at(9, 7), 1), certified=((at(5, OLD), 1, False),), sealed=7)
    assert (node.refusals(), node.claim.ancestry) == ([], (at(5, OLD), at(2, 2)))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_line_goes_back_to_the_newest_record_that_is_left_and_no_further_than_that(fresh: bool) -> None:
    """What a declared fresh start had left behind stays so."""
    six = EpochRecord(6, "six", ("a", "b"), (A, B), () if fresh else (at(5, OLD),), (), (OLD, ()))
    never = EpochRecord(9, "never", ("b", "b"), (B,), (at(9, 7),))
    node = Elect(six).start(known=six)
    node.answer("b", *BOTH, *held(at(9, 7), 1), known=never, never=True, ran=six)
    assert [code for _, code in node.refusals()] == (["unrecoverable"] if fresh else [])
    assert fresh or node.claim.ancestry == (at(5, OLD),)


def test_an_epoch_that_certainly_never_ran_left_nothing_behind() -> None:
    """What was decided upon before it counts."""
    never = EpochRecord(6, "never", ("a", "b"), (A, B), (at(5, OLD),), (), (OLD, ()))
    node = Elect().start()
    node.answer("b", *BOTH, known=never, never=True)
    assert (node.claim.number, node.claim.ancestry, node.claim.before) == (7, (at(5, OLD),), (OLD, ()))
    node = Elect().start()
    node.answer("b", *BOTH, known=never)
    assert node.claim.before == (6, (at(5, OLD),)), "it may have run"


def test_epochs_that_never_ran_one_after_the_other_left_nothing_behind() -> None:
    six = EpochRecord(6, "six", ("a", "b"), (A, B), (at(5, OLD),), (), (OLD, ()))
    seven = EpochRecord(7, "seven", ("a", "b"), (A, B), (at(5, OLD),), (), (6, (at(5, OLD),)))
    node = Elect().start(known=six)
    node.answer("b", *BOTH, known=seven, never=True)
    assert node.claim.before == (6, (at(5, OLD),)), "it may have run"
    node = Elect().start(known=six)
    node.answer("a", known=six, never=True)
    node.answer("b", *BOTH, known=seven, never=True)
    assert node.claim.before == (OLD, ())


def test_an_epoch_that_a_member_never_entered_never_ran() -> None:
    known = EpochRecord(6, "six", ("b", "b"), (B,), (at(5, OLD),), (), (OLD, ()))
    node = Elect().start(known=known)
    node.answer("b", *BOTH, known=BEFORE)
    assert node.claim.before == (OLD, ())
    node = Elect().start(known=known)
    node.answer("b", *BOTH, known=None)
    assert node.claim.before[0] == 6, "a daemon that has forgotten everything proves nothing"


def test_an_epoch_that_left_a_snapshot_ran_whatever_anybody_says() -> None:
    known = EpochRecord(6, "six", ("a", "b"), (A, B), (at(5, OLD),), (), (OLD, ()))
    held = tuple(replace(one, snapshot=at(8, 6)) for one in BOTH)
    node = Elect().start()
    node.answer("b", *held, known=known, never=True)
    assert node.claim.ancestry == (at(8, 6), at(5, OLD))


def test_the_forks_are_handed_down() -> None:
    last = EpochRecord(6, "six", ("a", "b"), (A, B), (at(5, OLD), at(3, 2)))
    for chosen, ancestry in (
        (at(8, 6), (at(8, 6), at(5, OLD), at(3, 2))),
        (at(4, OLD), (at(4, OLD), at(3, 2))),
        (at(2, 2), (at(2, 2),)),
    ):
        node = Elect().start()
        node.answer("b", *(replace(one, snapshot=chosen) for one in BOTH), known=last, done=True)
        assert node.claim.ancestry == ancestry


def test_rank_0s_node_is_the_first_in_the_succession() -> None:
    node = Elect()
    node.nodes = (B, A)
    node.start().answer("b", *BOTH, known=BEFORE, done=True)
    assert node.claim.nodes == (A, B)


@pytest.mark.parametrize(("redundancy", "seated"), [(Replicas(1), "bda"), (Parity(2, 1), "adb")])
def test_members_sit_where_least_of_what_was_placed_moves(redundancy: Redundancy, seated: str) -> None:
    """Copies are in pairs, of which one is left; of a group of parity any place is as good as another."""
    known = replace(BEFORE, nodes=(A, C, B, member("d")), ranks=tuple("acbd"))
    node = Elect(known, redundancy=redundancy)
    node.nodes = (A, B, member("d"))
    node.start().answer("b", *BOTH, known=known, done=True)
    node.answer("d", known=known, done=True)
    node.tick(2.5)
    assert [info.node for info in node.claim.nodes] == list(seated)


def test_outsiders_that_hold_something_or_may_are_remembered() -> None:
    known = replace(BEFORE, nodes=(A, B, C, member("d"), member("e")), ranks=tuple("abce"))
    node = Elect(known).start()
    node.answer("b", *BOTH, known=known, done=True)
    node.answer("c", BOTH[0], known=known, done=True)
    node.answer("d", known=known)
    node.tick(2.5)
    assert node.claim.holders == (C, member("e")), "node d has nothing; node e did not answer"


def test_a_member_of_an_epoch_that_goes_on_until_this_one_opens_is_remembered() -> None:
    known = replace(BEFORE, nodes=(A, B, C, member("d")), ranks=tuple("abc"))
    node = Elect(known).start()
    node.answer("b", *BOTH, known=known, done=True)
    node.answer("c", known=known, done=True)
    node.answer("d", known=known, done=True)
    assert node.claim.holders == (C,), "node d has no ranks"


@pytest.mark.parametrize("heard", [False, True])
def test_a_member_of_an_epoch_that_is_being_opened_elsewhere_is_remembered(heard: bool) -> None:
    """P1: it trains as soon as it has loaded, and this start may be given up before anybody hears of it: the next one would
    ask nobody who trained, and take the job for fresh."""
    other = replace(BEFORE, number=9, nonce="other", nodes=(C, member("d")), ranks=("c", "c"))
    node = Elect(durable=True).start()
    node.feed(ev.DurableRead("now", True, other))
    node.answer("b")
    node.answer("c", known=other if heard else None, incarnation=C.incarnation, never=heard)
    node.answer("d", known=other)
    assert (node.claim.number, node.claim.holders) == (10, (C,)), "node d has no ranks"


# --- the claim --------------------------------------------------------------------------------------------------------
def test_a_number_that_is_taken_is_another_starts_whose_nodes_are_asked_before_it_is_superseded() -> None:
    """P1: it has trained since we were told that there is nothing."""
    node = Elect(durable=True).start()
    node.answer("b")
    node.feed(ev.DurableRead("now", True))
    assert (node.claim.number, node.claim.before) == (1, (-1, ()))
    mark = len(node.done)
    node.claimed(ok=False, taken=9)
    assert node.opens() == []
    assert sent(node.done[mark:], msg.InventoryRequest, "b") and only(node.done[mark:], ins.ReadDurable), "all anew"
    other = replace(BEFORE, number=9, nonce="other", nodes=(C,), ranks=("c", "c"), before=(-1, ()))
    node.feed(ev.DurableRead("now", True, other))
    node.answer("b")
    assert sent(node.done, msg.InventoryRequest, "c")
    mine = tuple(replace(one, snapshot=at(5, 9)) for one in BOTH)
    node.answer("c", *mine, known=other, done=True)
    assert node.claim.number == 10
    node.claimed()
    assert (node.opens()[-1].record.number, node.opens()[-1].snapshot) == (10, at(5, 9))


def test_a_number_that_is_taken_is_not_tried_again_though_storage_does_not_show_by_whom() -> None:
    node = Elect(durable=True).start()
    node.answer("b")
    node.feed(ev.DurableRead("now", True))
    node.claimed(ok=False, taken=9)
    node.answer("b")
    node.feed(ev.DurableRead("now", True))
    assert node.claim.number == 10


def test_a_later_claim_does_not_meet_a_number_that_nobody_vouched_for() -> None:
    """P12: it opened without a claim, its daemon died, and began anew knowing nothing of it, from one number lower: the next
    start claimed the one after, which was the first (simulator, seed 900463 of that day)."""
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, replace(BEFORE, number=OLD + 1, before=(OLD, ()))))
    node.claimed(reason="EIO")
    nobody_vouched_for = node.opens()[-1].record.number
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", False, reason="EIO"))
    node.claimed()
    opened = node.opens()[-1].record
    node = Elect(opened, durable=True)
    node.join("later")
    node.report("later")
    node.answer("b", *BOTH, attempt="later", known=opened)
    node.feed(ev.DurableRead("later", True, opened))
    assert node.claim.number == opened.number + 1 != nobody_vouched_for


@pytest.mark.parametrize("trace", ["held", "certified", "sealed"])
def test_a_number_lies_above_every_epoch_of_which_anything_is_left(trace: str) -> None:
    """P3: its record could not be written down, its daemon died, and what was sealed in it was newer, for ever, than all that the
    next one took: each of those was released for it (simulator, seed 4088403699)."""
    forgotten = OLD + 400
    more: dict[str, Any] = {}
    holdings = BOTH
    if trace == "held":
        holdings = (*BOTH, *(replace(fact, snapshot=SnapshotId(forgotten, 3)) for fact in BOTH))
    elif trace == "certified":
        more["certified"] = ((SnapshotId(forgotten, 3), 0, False),)
    else:
        more["sealed"] = forgotten
    node = Elect(BEFORE).start()
    node.answer("b", *holdings, known=BEFORE, done=True, **more)
    assert node.claim.number > forgotten


def test_without_storage_a_silent_node_may_have_seen_higher_numbers() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known).start()
    node.answer("b", *BOTH, known=known, done=True)
    node.tick(2.5)
    assert node.claim.number == OLD + 1 + spread("now", OLD + 1)


def test_a_claim_that_hangs_is_done_without() -> None:
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, BEFORE))
    node.tick(CLAIM_TIMEOUT_S)
    assert node.opens() == []
    node.tick(0.5)
    assert node.opens()[-1].record.number == OLD + 1 + spread("now", OLD + 1)


def test_ranks_that_went_during_the_claim_open_nothing() -> None:
    node = Elect().start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.now += FRESH_S
    node.claimed()
    assert node.opens() == []
    node.report()
    node.tick(0.5)
    assert len(only(node.done, ins.ClaimEpoch)) == 2, "if they are back, it is decided anew"


def test_a_start_that_is_superseded_during_its_claim_leaves_no_claim_behind() -> None:
    """What was decided for the one would open as the other's epoch."""
    node = Elect().start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.join("two")
    node.report("two")
    node.claimed()
    assert node.opens() == []
    node.answer("b", *BOTH, attempt="two", known=BEFORE, done=True)
    assert node.claim.nonce == "two"


def test_an_epoch_that_an_earlier_life_had_opened_ends_the_claim() -> None:
    node = Elect().start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    opened = EpochRecord(6, "now", ("a", "b"), (A, B), (at(5, OLD),), (), (OLD, ()))
    node.hear("b", msg.Stale(opened))
    node.join("two")
    node.report("two")
    node.answer("b", *BOTH, attempt="two", known=opened)
    assert (node.claim.nonce, node.claim.number) == ("two", 7)


@pytest.mark.parametrize("claims", [False, True])
def test_an_epoch_that_somebody_saw_complete_is_not_decided_again(claims: bool) -> None:
    """A daemon that came back in the middle: it speaks for its epoch, and its rank asks for that epoch's restore."""
    node = Elect(BEFORE)
    node.tick(reporting=False)
    hello = sent(node.done, msg.OpenSession, "b")[-1].nonce
    node.join("before")
    node.report("before")
    if claims:
        node.answer("b", *BOTH, attempt="before", known=BEFORE)
    told = len(only(node.done, ins.ClaimEpoch))
    node.hear("b", msg.Inventory("", BEFORE, BOTH, LAYOUTS, done=True, session=hello))
    assert sent(node.done, msg.RestoreDone, "a") != []
    node.answer("b", *BOTH, attempt="before", known=BEFORE)
    assert len(only(node.done, ins.ClaimEpoch)) == told == claims
    node.join("two")
    node.report("two")
    node.answer("b", *BOTH, attempt="two", known=BEFORE, done=True)
    assert node.claim.nonce == "two"


def test_two_starts_that_nobody_vouches_for_hardly_ever_take_one_number() -> None:
    """P12: one of a thousand pairs did (simulator, seed 427503278702 of that day: two records of one number, two states of one
    name)."""
    taken = [spread(f"a{attempt}", 808) for attempt in range(100)]
    assert len(set(taken)) == len(taken) and CLAIM_SPREAD > 50_000
