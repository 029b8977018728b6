"""What is made durable and when, one flush at a time (D11 to D13, P4, P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.certify import REPEAT_S
from ckptd.core.protocol.machine.steward.flush import (
    ASKS_KEPT_MAX,
    BACKOFF_MAX_S,
    MEND_S,
)
from ckptd.core.protocol.machine.steward.grants import FULL_S, RETURN_S
from ckptd.core.protocol.machine.steward.guards import KEEP_FAILURES_MAX
from ckptd.core.protocol.machine.steward.protecting import PATIENCE_S
from ckptd.core.protocol.machine.steward.steward import READ_AGAIN_S
from ckptd.core.protocol.machine.uplink import REGISTER_S
from tests.core import parity_rig
from tests.core.flushes import (
    OLD,
    alarms,
    ask,
    committed,
    flush_now,
    orders,
    step_of,
    steward,
    written,
    wrote,
)
from tests.core.machines import EPOCH, Steward, at, fact, layout, only, record_of, sent


# --- what and when ----------------------------------------------------------------------------------------------------
def test_a_step_that_was_asked_for_is_ordered_from_all_who_hold_it_and_committed_once() -> None:
    node = steward().train().capture(7).protect(7)
    assert step_of(node) is None
    done = ask(node, 7)
    assert step_of(node) == 7
    (to_a,), (to_b,) = orders(done, "a"), orders(done, "b")
    assert sorted(piece.rank for order in (to_a, to_b) for piece in order.pieces) == [0, 1]
    assert to_a.attempt == to_b.attempt
    (commit,) = written(node)
    assert (commit.snapshot, commit.attempt, commit.record, commit.keep) == (
        at(7),
        to_a.attempt,
        node.record,
        False,
    )
    assert (commit.reports, commit.layouts) == ((b"a", b"b"), {0: layout(0), 1: layout(1)})
    committed(node)
    assert (step_of(node), node.certificates()[-1].durable) == (None, True)
    assert ask(node, 7) == [] or step_of(node) is None, "it is durable"


def test_nothing_is_flushed_without_storage() -> None:
    node = steward(durable=False).train().capture(7)
    ask(node, 7)
    assert step_of(node) is None


def test_the_oldest_whole_one_that_is_not_before_the_step_is_taken() -> None:
    node = steward().train().capture(7).capture(8).protect(8).capture(9)
    ask(node, 8)
    assert step_of(node) == 8
    node = steward().train().capture(7)
    ask(node, 8)
    assert step_of(node) is None, "it is still to come"
    node.capture(8)
    node.tick()
    assert step_of(node) == 8


def test_of_several_wishes_the_earliest_is_first() -> None:
    node = steward().train().capture(7).protect(7).capture(8)
    for step in (8, 7):
        node.hear("b", msg.FlushAsk(EPOCH, step))
    node.tick()
    assert step_of(node) == 7
    written(node)
    committed(node)
    node.tick()
    assert step_of(node) == 8


def test_wishes_are_bounded_and_those_that_are_answered_forgotten() -> None:
    node = steward().train().capture(7)
    for step in range(100, 100 + ASKS_KEPT_MAX + 3):
        node.hear("b", msg.FlushAsk(EPOCH, step))
    assert len(node.machine.steward.flushing.asked) == ASKS_KEPT_MAX
    node = steward().train().capture(7)
    flush_now(node, 7)
    node.capture(8)
    ask(node, 6)
    assert node.machine.steward.flushing.asked <= {7}
    assert step_of(node) is None


def test_a_marked_one_is_flushed_without_being_asked_for_and_first() -> None:
    node = steward().train().capture(7, keep=True).protect(7).capture(8)
    ask(node, 8)
    assert step_of(node) == 7
    (commit,) = written(node)
    assert commit.keep
    committed(node)
    node.tick()
    assert step_of(node) == 8


def test_of_several_marked_ones_the_oldest_is_first_in_whatever_order_they_were_heard_of() -> None:
    node = steward()
    held = [fact(step, rank, rank ^ 1, keep=True) for step in (8, 7) for rank in (0, 1)]
    node.others["b"].tell_inventory(*held, layouts=[layout(0), layout(1)])
    node.tick()
    assert step_of(node) is None, "the older one is still to be looked at"
    node.tick()
    assert step_of(node) == 7


@pytest.mark.parametrize("keep", [True, False])
def test_what_waits_for_parity_that_nobody_makes_holds_up_no_newer_one(keep: bool) -> None:
    """P14: the newer one never became durable while the older could be put together by nobody."""
    node = parity_rig.protected(parity_rig.steward(durable=True), keep=keep)
    parity_rig.lose(node, "c")
    ask(node, 7)
    assert step_of(node) is None, "only parity brings what node c had"
    held = [fact(8, rank, rank != 0, world=3) for rank in range(3)]
    node.hear("b", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in (layout(rank, 3) for rank in range(3))}))
    for one in held:
        node.others["b"].held(one)
    node.tick(MEND_S)
    assert (node.machine.steward.table.states[at(7)].level, step_of(node)) == (0, 8)


@pytest.mark.parametrize("keep", [True, False])
def test_what_often_failed_holds_up_no_newer_one(keep: bool) -> None:
    """P14: its bits had flipped, and nothing newer ever became durable."""
    node = steward().train().capture(7, keep=keep).protect(7)
    ask(node, 7)
    for _ in range(KEEP_FAILURES_MAX):
        assert step_of(node) == 7
        wrote(node, "b", ok=False, reason="checksum")
        node.capture(9)
        node.tick(BACKOFF_MAX_S)
    assert step_of(node) == 9
    written(node)
    committed(node)
    node.tick(BACKOFF_MAX_S)
    assert step_of(node) == (7 if keep else None)


def test_a_marked_one_that_nobody_puts_together_fails_and_gives_its_slots_to_newer_ones() -> None:
    """P14: no flush of it ever began, so none ever failed."""
    node = parity_rig.protected(parity_rig.steward(durable=True, write_timeout_s=10.0), keep=True)
    parity_rig.lose(node, "c")
    node.tick(9.0)
    assert (node.machine.steward.table.states[at(7)].failures, alarms(node, "flush")) == (0, [])
    node.tick(KEEP_FAILURES_MAX * 12.0)
    assert KEEP_FAILURES_MAX <= node.machine.steward.table.states[at(7)].failures <= KEEP_FAILURES_MAX + 1, "one for each timeout"
    assert "step 7: making data of parity took longer than write_timeout_s" in alarms(node, "flush")
    needed = node.machine.steward.certify.guards.needed
    assert needed(node.machine.steward.table.states[at(7)]), "nobody lacks its slots"
    node.machine.steward.grants._full_since = node.now - FULL_S - 1.0
    assert not needed(node.machine.steward.table.states[at(7)])


def test_every_so_many_steps() -> None:
    node = steward(flush_every_steps=2).train(0).capture(1)
    node.tick()
    assert step_of(node) is None
    node.capture(2)
    node.tick()
    assert step_of(node) == 2
    written(node)
    committed(node)
    node.capture(3)
    node.tick()
    assert step_of(node) is None, "one step since"
    node.capture(4)
    node.tick()
    assert step_of(node) == 4


def test_every_so_many_seconds() -> None:
    node = steward(flush_every_s=10.0).train().capture(7)
    node.tick(9.0)
    assert step_of(node) is None
    node.tick(1.0)
    assert step_of(node) == 7
    written(node)
    node.tick(2.0)
    committed(node)
    node.capture(8)
    node.tick(9.5)
    assert step_of(node) is None, "counted from the last commit"
    node.tick(0.5)
    assert step_of(node) == 8


def test_what_is_older_than_something_durable_is_not_due() -> None:
    node = steward(flush_every_steps=1).train().capture(7)
    node.machine.steward.table.mark_durable([at(9)])
    node.tick(1.0)
    assert step_of(node) is None
    node = steward(flush_every_steps=1).train().capture(7)
    node.machine.steward.table.mark_durable([at(9, OLD)])
    node.tick(1.0)
    assert step_of(node) == 7, "that one is of another lineage"


def test_what_is_void_or_incomplete_is_not_flushed() -> None:
    node = steward().train().capture(7, 0)
    ask(node, 7)
    assert step_of(node) is None


def test_nothing_begins_before_everybody_has_told() -> None:
    node = steward().train().capture(7)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    ask(node, 7)
    assert step_of(node) is None
    node.tick(1.0)
    node.others["b"].tell_inventory(fact(7, 1))
    node.tick()
    assert step_of(node) == 7


def test_the_newest_is_the_newest_in_whatever_order_they_were_heard_of() -> None:
    node = steward(flush_every_steps=1).train()
    node.capture(9, 1).capture(8).protect(8).capture(9, 0)
    assert set(node.machine.steward.table.states) == {at(8), at(9)}
    node.tick()
    assert step_of(node) == 9


# --- when nobody trains -----------------------------------------------------------------------------------------------
def test_when_all_have_said_goodbye_the_newest_is_flushed_at_once() -> None:
    node = steward().train().capture(7)
    node.feed(ev.RankLeft(0, clean=True))
    node.tick()
    assert step_of(node) is None
    node.others["b"].state(1, 7, left="clean")
    node.tick()
    assert (step_of(node), alarms(node, "breakpoint")) == (7, [])


def test_when_a_rank_died_and_nobody_comes_back_the_newest_is_flushed() -> None:
    node = steward().train().capture(7)
    node.others["b"].state(1, 7, left="died")
    node.tick(2.75)
    assert step_of(node) is None, "a new start of the job may come"
    node.tick(0.75)
    assert step_of(node) == 7
    assert alarms(node, "breakpoint") == ["ranks, or their daemons, are gone: step 7 is written from memory"]
    wrote(node, "b", ok=False)
    node.tick(5.0)
    assert step_of(node) == 7
    assert len(alarms(node, "breakpoint")) == 1, "said once"


def test_each_time_that_ranks_are_gone_is_said() -> None:
    node = steward().train().capture(7)
    for step in (7, 8):
        node.others["b"].state(1, step, left="died")
        node.tick(3.5)
        assert step_of(node) == step
        written(node)
        committed(node)
        node.others["b"].state(1, step)
        node.capture(8)
        node.tick()
    assert [text.split(":")[1] for text in alarms(node, "breakpoint")] == [
        f" step {step} is written from memory" for step in (7, 8)
    ]


def test_ranks_of_which_a_new_office_hears_nothing_count_as_gone() -> None:
    node = steward().train().capture(7).protect(7)
    node.now += 10.0  # its process stood still
    node.tick()
    node.feed(ev.NodeDown("b"))
    node.tick(3.5)
    assert step_of(node) == 7


def test_a_node_that_is_away_with_its_ranks_counts_as_death() -> None:
    node = steward().train().capture(7).protect(7)
    node.feed(ev.NodeDown("b"))
    node.tick(3.5)
    assert step_of(node) == 7
    assert {order.pieces for order in orders(node.done, "b")} == set(), "written by who is left"


def test_a_daemon_that_came_back_without_its_ranks_counts_as_death() -> None:
    """It tells nothing of them: nobody says that they left."""
    node = steward().train().capture(7).protect(7)
    node.tick(REGISTER_S)
    node.hear("b", msg.Inventory("", node.record, ()))
    node.others["b"].tell_inventory(fact(7, 1), fact(7, 0, 1), incarnation="another")
    node.tick(2.75)
    assert step_of(node) is None
    node.tick(0.75)
    assert step_of(node) == 7


def test_a_rank_that_is_back_in_time_trains_on() -> None:
    node = steward().train().capture(7)
    node.others["b"].state(1, 7, left="died")
    node.tick(2.0)
    node.others["b"].state(1, 7)
    node.tick(2.0)
    node.others["b"].state(1, 7, left="died")
    node.tick(2.0)
    assert step_of(node) is None


# --- when there is no slot for a newer one ----------------------------------------------------------------------------
def with_one_slot() -> Steward:
    return steward().train(free=1).capture(7).protect(7)


def test_what_fills_the_only_slot_is_flushed_and_gives_it_to_the_next() -> None:
    """P14: no newer one could ever release it."""
    node = with_one_slot()
    node.others["b"].state(1, 7, free=0)
    node.tick(RETURN_S)
    assert step_of(node) is None, "slots may be on their way back"
    node.tick(1.0)
    assert step_of(node) == 7
    written(node)
    committed(node)
    node.tick(FULL_S - RETURN_S - 2.0)
    assert node.level(7) == 1, "memory is the nearer source, and storage is not to be kept busy"
    mark = node.mark
    node.tick(2.0)
    fallen = next(c for c in node.certificates("b", mark) if c.level < 0)
    assert (fallen.snapshot, fallen.durable, fallen.releases) == (at(7), True, (at(7),)), "said before its memory goes (P2)"
    assert fallen.serial > max(c.serial for c in sent(node.done[:mark], msg.Certificate)), "whichever comes last"
    again = node.mark
    node.tick(2 * REPEAT_S)
    assert any(c.releases for c in node.certificates("b", again)), "it may have been lost, and slots are wanted"
    node.others["b"].held(fact(7, 1), lost=True)
    node.others["b"].held(fact(7, 0, 1), lost=True)
    node.others["b"].state(1, 7, free=1)
    assert node.granted(8)


def test_a_rank_that_waits_for_its_step_gets_the_only_slot_soon() -> None:
    node = with_one_slot()
    node.others["b"].state(1, 9, free=0, asks=9)
    node.feed(ev.RankProgress(0, 9, asks=True))
    node.tick(RETURN_S + 1.0)
    assert step_of(node) == 7
    written(node)
    committed(node)
    node.tick()
    assert node.level(7) == -1


def test_what_is_durable_stays_in_memory_while_there_is_a_slot_for_the_next() -> None:
    node = steward().train(free=2).capture(7).protect(7)
    flush_now(node, 7)
    node.tick(FULL_S + 1.0)
    assert (node.level(7), step_of(node)) == (1, None)


def test_a_better_protected_one_that_keeps_its_slot_from_newer_ones_is_flushed_and_goes() -> None:
    """Two slots: copies can be made no more, so no newer one ever reaches its level."""
    node = steward().train(free=2).capture(7).protect(7).capture(8)
    node.others["b"].state(1, 8, free=0)
    node.tick(FULL_S + PATIENCE_S + 2.0)
    assert (node.level(8), step_of(node)) == (0, 7)
    written(node)
    committed(node)
    node.tick()
    assert (node.level(7), node.level(8)) == (-1, 0)


def test_what_a_declared_fresh_start_left_behind_is_flushed_and_gives_its_only_slot_to_the_new_run() -> None:
    """P14: nobody goes on from it, so it was never flushed, and being the last of its lineage it never went."""
    node = steward()
    node.others["b"].tell_inventory(*(fact(5, rank, epoch=OLD) for rank in (0, 1)), layouts=[layout(0), layout(1)])
    node.train(free=0)
    node.slots(0, 1)
    node.tick(RETURN_S + 1.0)
    assert step_of(node) == 5
    written(node)
    committed(node)
    mark = node.mark
    node.tick(FULL_S)
    assert any(at(5, OLD) in c.releases for c in node.certificates("b", mark))


def test_nothing_is_given_to_storage_while_copies_are_under_way() -> None:
    node = steward().train(free=1).capture(7)
    node.others["b"].state(1, 7, free=0)
    node.machine.steward.certify.protecting._patience_s = 2 * FULL_S
    node.tick(FULL_S + 1.0)
    assert step_of(node) is None
    node.feed(ev.DurableRead("", True, node.record, (at(7),)))
    node.tick(1.0)
    assert node.level(7) == 0, "nor what it has already"


def test_storage_takes_over_one_at_a_time() -> None:
    """Its slot is on its way back, and may be enough (P2)."""
    node = steward().train(free=2).capture(7).protect(7).capture(8)
    node.others["b"].state(1, 8, free=0)
    node.feed(ev.DurableRead("", True, node.record, (at(7), at(8))))
    node.tick(FULL_S + PATIENCE_S + 2.0)
    assert (node.level(7), node.level(8)) == (-1, 0)
    node.tick(FULL_S)
    assert node.level(8) == -1, "it was not"


def test_what_storage_did_not_say_to_a_steward_that_begins_is_asked_again() -> None:
    """Once a failed read was over: a read that hangs is not repeated beside itself."""
    node = steward()

    def asked() -> int:
        return len([do for do in only(node.done, ins.ReadDurable) if not do.attempt])

    node.tick(3 * READ_AGAIN_S)
    assert asked() == 1
    node.feed(ev.DurableRead("", False, reason="EIO"))
    node.tick(READ_AGAIN_S + 1.0)
    assert asked() == 2
    node.feed(ev.DurableRead("", True, node.record, (at(4),)))
    node.tick(3 * READ_AGAIN_S)
    assert (asked(), at(4).at in node.machine.steward.table.durable) == (2, True)


@pytest.mark.parametrize("named", [None, EPOCH - 1])
def test_an_epoch_that_opened_without_its_claim_is_claimed_when_storage_answers(named: int | None) -> None:
    """P1: a start on other nodes asks those that storage names, and for ten minutes, until the first commit, it did not name this
    epoch's (a reader's history)."""
    node = steward()
    before = replace(node.record, number=named, nonce="before") if named is not None else None

    def claims() -> list[EpochRecord]:
        return [do.record for do in only(node.done, ins.ClaimEpoch)]

    node.feed(ev.DurableRead("", False, reason="EIO"))
    assert claims() == []
    node.feed(ev.DurableRead("", True, before))
    assert claims() == [node.record]
    node.feed(ev.EpochClaimed(node.record.nonce, EPOCH, False, 0, "storage is gone again"))
    since = node.mark
    node.tick(READ_AGAIN_S + 1.0)
    assert [type(do) for do in node.done[since:] if isinstance(do, ins.ReadDurable)], "nobody would have asked until a commit"
    node.feed(ev.EpochClaimed(node.record.nonce, EPOCH, True))
    for newest in (node.record, replace(node.record, number=EPOCH + 1, nonce="newer")):
        node.feed(ev.DurableRead("", True, newest))
    assert claims() == [node.record], "it has it, or a newer one"


def test_a_start_that_counts_its_steps_anew_is_flushed_by_its_own_steps() -> None:
    """It goes on from a durable step 1000, and nothing was written until it had come to 1005."""
    record = record_of(ancestry=(at(1000, EPOCH - 1),))
    node = Steward(record, Policy(replicas=1, durable=True, flush_every_steps=5))
    node.feed(ev.DurableRead("", True, record, (at(1000, EPOCH - 1),)))
    node.train().capture(7).protect(7)
    node.tick(1.0)
    assert step_of(node) == 7


@pytest.mark.parametrize(("own", "due"), [((), False), ((at(60),), True)])
def test_a_start_counts_from_what_was_durable_before_it_has_something_of_its_own(own: tuple[SnapshotId, ...], due: bool) -> None:
    """It has come as far as that by now, in steps that are counted anew."""
    old = at(100, EPOCH - 1)
    record = record_of(ancestry=(old,))
    node = Steward(record, Policy(replicas=1, durable=True, flush_every_steps=50))
    node.feed(ev.DurableRead("", True, record, (old, *own)))
    node.train(110).capture(111)
    node.tick(1.0)
    assert step_of(node) == (111 if due else None)
