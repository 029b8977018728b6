"""A flush whose writers, storage or steward go away (D11 to D13, P4, P14)."""

from __future__ import annotations

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.flush import (
    BACKOFF_ASKED_MAX_S,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    MEND_S,
    Flush,
)
from ckptd.core.protocol.machine.steward.grants import FULL_S
from ckptd.core.protocol.machine.steward.guards import KEEP_FAILURES_MAX
from tests.core import parity_rig
from tests.core.flushes import (
    alarms,
    ask,
    committed,
    flushing,
    orders,
    step_of,
    steward,
    written,
    wrote,
)
from tests.core.machines import EPOCH, TICK_S, Steward, at, fact, only, sent


# --- what goes wrong --------------------------------------------------------------------------------------------------
def test_a_failed_write_cancels_the_try_and_the_next_one_has_another_name() -> None:
    node = steward().train().capture(7)
    ask(node, 7)
    flush = flushing(node)
    assert flush is not None
    done = wrote(node, "b", ok=False, reason="no space")
    assert alarms(node, "flush") == ["step 7: b: no space"]
    assert {m.attempt for m in sent(done, msg.WriteCancel, "b")} == {flush.attempt}
    assert step_of(node) is None
    node.tick(BACKOFF_FIRST_S - 0.25)
    assert step_of(node) is None
    node.tick(0.5)
    again = flushing(node)
    assert again is not None and again.attempt != flush.attempt


def test_two_tries_within_one_instant_have_two_names() -> None:
    """Somebody asks at once; what the first one has left under its name is not taken for the second one's."""
    node = steward().train().capture(7)
    ask(node, 7)
    names = []
    for step in (6, 5):
        flush = flushing(node)
        assert flush is not None
        names.append(flush.attempt)
        wrote(node, "b", ok=False)
        node.hear("b", msg.FlushAsk(EPOCH, step))
        node.feed(ev.Tick())
    last = flushing(node)
    assert last is not None and len({*names, last.attempt}) == 3


def waits(node: Steward) -> float:
    """Seconds from a failure to the next try."""
    wrote(node, "b", ok=False)
    began = node.now
    while step_of(node) is None:
        node.tick()
        assert node.now - began < 2 * BACKOFF_MAX_S
    return node.now - began


def test_the_pause_grows_up_to_a_limit_and_is_short_while_somebody_waits() -> None:
    node = steward(flush_every_steps=1).train().capture(7)
    node.tick()
    assert [round(waits(node)) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    node = steward(flush_every_steps=1).train().capture(7)
    node.hear("b", msg.FlushAsk(EPOCH, 7))
    node.tick()
    assert [round(waits(node)) for _ in range(5)] == [
        1,
        2,
        4,
        round(BACKOFF_ASKED_MAX_S),
        round(BACKOFF_ASKED_MAX_S),
    ]


def test_a_new_wish_is_tried_at_once_and_a_success_forgives_failures() -> None:
    node = steward(flush_every_steps=1).train().capture(7)
    node.tick()
    for _ in range(4):
        waits(node)
    wrote(node, "b", ok=False)
    ask(node, 7)
    assert step_of(node) == 7, "storage may be back"
    written(node)
    committed(node)
    assert node.machine.steward.flushing.trouble == ""
    node.capture(8)
    node.tick()
    assert round(waits(node)) == 1


def test_failures_are_counted_for_what_was_to_be_kept() -> None:
    node = steward().train().capture(7, keep=True)
    node.tick()
    for failures in (1, 2, 3):
        waits(node)
        assert node.machine.steward.table.states[at(7)].failures == failures


def no_storage(node: Steward, seconds: float, *, until: int = 0) -> None:
    """Each write fails, for so long, or until so many marked ones have gone."""
    for _ in range(round(seconds / TICK_S)):
        if until and len(alarms(node, "kept")) == until:
            return
        if step_of(node) is not None:
            wrote(node, "b", ok=False, reason="read-only file system")
        node.tick()


@pytest.mark.parametrize("asks", [None, 9])
def test_a_marked_one_goes_unstored_only_when_its_slots_are_wanted_and_that_is_said(asks: int | None) -> None:
    """It went as soon as storage had failed three times, was never heard of again, and nobody was told (P15). Where a rank waited
    with must=True it went after 5 s, not after a minute (a trainer's author)."""
    node = steward(replicas=0, breakpoint_grace_s=1e6, flush_every_s=0.0).train(free=2).capture(7, keep=True).capture(8)
    while node.machine.steward.table.states[at(7)].failures < KEEP_FAILURES_MAX:
        no_storage(node, TICK_S)
    node.others["b"].state(1, 8, free=0, asks=asks)
    node.tick(FULL_S / 2)
    assert (node.level(7), alarms(node, "kept")) == (0, [])
    node.tick(FULL_S / 2)
    (said,) = alarms(node, "kept")
    assert said.startswith("step 7 was to be kept: ") and said.endswith("its memory is needed: it is gone")
    assert any(at(7) in certificate.releases for certificate in node.certificates("b"))


def test_marked_ones_that_cannot_be_stored_go_one_by_one() -> None:
    """Two went at the same instant, where one slot was enough (a trainer's author)."""
    node = steward(replicas=0, breakpoint_grace_s=1e6, flush_every_s=0.0).train(free=3)
    node.capture(7, keep=True).capture(8, keep=True).capture(9)
    no_storage(node, 20 * FULL_S, until=1)
    assert len(alarms(node, "kept")) == 1
    no_storage(node, FULL_S - 1.0)
    assert len(alarms(node, "kept")) == 1
    no_storage(node, FULL_S)
    assert len(alarms(node, "kept")) == 2


def begun() -> tuple[Steward, Flush]:
    """The flush of a step of which either node has all."""
    node = steward().train().capture(7).protect(7)
    ask(node, 7)
    flush = flushing(node)
    assert flush is not None
    return node, flush


def lose_b(node: Steward) -> None:
    node.feed(ev.NodeDown("b"))
    node.tick()


def test_a_writer_that_goes_away_is_no_failure_of_storage() -> None:
    node, _ = begun()
    lose_b(node)
    assert (alarms(node, "flush"), node.machine.steward.flushing._failures) == ([], 0)
    node.tick()
    assert step_of(node) == 7, "at once, from those who are left"
    assert set(flushing(node).orders) == {"a"}  # type: ignore[union-attr]


def test_a_writer_that_has_reported_may_go() -> None:
    node, before = begun()
    wrote(node, "b")
    lose_b(node)
    assert flushing(node) is before


def test_a_writer_may_go_while_it_is_committed() -> None:
    node, before = begun()
    written(node)
    before.reports.clear()
    lose_b(node)
    assert flushing(node) is before


def test_orders_are_said_again_to_who_has_not_reported() -> None:
    node, _ = begun()
    wrote(node, "b")
    mark = node.mark
    node.tick(0.75)
    assert orders(node.done[mark:]) == []
    node.tick(0.5)
    assert (len(orders(node.done[mark:], "a")), orders(node.done[mark:], "b")) == (1, [])


@pytest.mark.parametrize("committing", [False, True])
def test_writing_and_committing_have_a_limit_each(committing: bool) -> None:
    node = steward(write_timeout_s=6.0).train().capture(7)
    ask(node, 7)
    node.tick(5.0)
    if committing:
        written(node)
        mark = node.mark
        node.tick(5.0)
        assert orders(node.done[mark:]) == [], "there is nothing to write any more"
    assert alarms(node, "flush") == []
    node.tick(1.5)
    what = "the commit" if committing else "writing"
    assert alarms(node, "flush") == [f"step 7: {what} took longer than write_timeout_s"]


def test_reports_of_another_try_or_of_strangers_do_not_count() -> None:
    node, _ = begun()
    assert only(wrote(node, "b", attempt="another"), ins.Commit) == []
    assert only(wrote(node, "x"), ins.Commit) == []
    assert only(wrote(node, "a"), ins.Commit) == [], "node b has not reported of this try"
    assert len(written(node)) == 1
    assert only(wrote(node, "b"), ins.Commit) == [], "not twice"


def test_a_commit_that_fails_is_tried_anew() -> None:
    node = steward().train().capture(7)
    ask(node, 7)
    written(node)
    committed(node, ok=False, reason="EIO")
    assert (step_of(node), alarms(node, "flush")) == (None, ["step 7: EIO"])
    assert not node.certificates()[-1].durable


def test_an_earlier_try_that_fails_late_changes_nothing_and_one_that_succeeds_ends_the_flush() -> None:
    node = steward().train().capture(7)
    ask(node, 7)
    written(node)
    before = flushing(node)
    committed(node, ok=False, attempt="an earlier try")
    assert flushing(node) is before
    done = committed(node, attempt="an earlier try")
    assert step_of(node) is None
    assert {m.attempt for m in sent(done, msg.WriteCancel)} == {before.attempt}  # type: ignore[union-attr]
    assert node.certificates()[-1].durable


def test_a_commit_of_another_snapshot_is_noted_and_this_one_goes_on() -> None:
    node = steward().train().capture(7).protect(7).capture(8)
    ask(node, 8)
    node.feed(ev.CommitDone(at(7), "earlier", True))
    assert (step_of(node), set(node.machine.steward.table.durable.values())) == (8, {at(7)})


def test_a_snapshot_that_went_while_it_was_written_is_not_committed() -> None:
    node = steward().train().capture(7)
    ask(node, 7)
    del node.machine.steward.table.states[at(7)]
    assert written(node) == []
    assert alarms(node, "flush") == ["step 7: the snapshot is gone"]


def test_a_snapshot_that_goes_while_it_is_written_holds_up_no_other() -> None:
    node = steward().train().capture(7).protect(7).capture(8)
    ask(node, 7)
    part = fact(7, 1)
    node.others["b"].held(part, lost=True)
    node.others["b"].held(fact(7, 0, 1), lost=True)
    node.feed(*(ev.SlotDamaged(slot.id, "x") for slot in node.machine.slots.sealed[at(7)] if slot.rank == 1))
    node.tick()
    assert alarms(node, "flush") == ["step 7: the snapshot is gone"]
    node.tick(BACKOFF_FIRST_S)
    assert step_of(node) == 8


def test_a_snapshot_that_goes_while_it_is_committed_is_durable_all_the_same() -> None:
    """All of it is written."""
    node, before = begun()
    written(node)
    node.machine.steward.table.states[at(7)].become_void("nowhere", "why")
    node.tick()
    assert (flushing(node), alarms(node, "flush")) == (before, [])
    committed(node)
    assert at(7).at in node.machine.steward.table.durable


def test_a_flush_pins_its_snapshot_and_its_end_unpins_it() -> None:
    node = steward(replicas=0).train().capture(7)
    ask(node, 7)
    node.capture(8)
    assert at(7) in node.machine.steward.table.states
    written(node)
    committed(node)
    assert at(7) not in node.machine.steward.table.states, "released by step 8, which is as well protected"


def test_the_end_of_a_flush_that_failed_unpins_its_snapshot_too() -> None:
    node = steward(replicas=0).train().capture(7)
    ask(node, 7)
    node.capture(8)
    assert at(7) in node.machine.steward.table.states
    wrote(node, "b", ok=False)
    assert at(7) not in node.machine.steward.table.states


def test_whoever_leaves_office_leaves_its_flush() -> None:
    node = steward().train().capture(7)
    ask(node, 7)
    node.machine.steward.stop()
    assert (step_of(node), node.machine.steward.certify.guards.pinned) == (None, set())


def test_a_new_office_knows_no_wishes_and_no_failures() -> None:
    node = steward(flush_every_s=10.0).train().capture(7)
    ask(node, 7)
    wrote(node, "b", ok=False)
    node.hear("b", msg.FlushAsk(EPOCH, 9))
    node.now += 10.0  # its process stood still
    node.tick()
    flushing_ = node.machine.steward.flushing
    assert (flushing_.asked, flushing_._failures, flushing_._not_before, flushing_.trouble) == (set(), 0, 0.0, "")
    node.others["b"].tell_inventory(fact(7, 1))
    node.others["b"].state(1, 7)
    node.tick(0.5)
    assert step_of(node) == 7, "flush_every_s goes on counting: a job that starts again and again has its turn"


def test_a_new_office_begins_no_flush_where_the_one_before_stood() -> None:
    node = steward().train().capture(7)
    ask(node, 7)
    node.now += 10.0  # its process stood still
    node.tick()
    assert (step_of(node), node.machine.steward.certify.guards.pinned) == (None, set())
    assert alarms(node, "flush") == [], "nothing is wrong with the snapshot"


def test_a_new_office_waits_for_the_ranks_anew_and_says_again_that_they_are_gone() -> None:
    node = steward().train().capture(7)
    node.others["b"].state(1, 7, left="died")
    node.tick(3.5)
    assert len(alarms(node, "breakpoint")) == 1
    node.now += 10.0  # its process stood still
    node.tick()
    node.others["b"].tell_inventory(fact(7, 1))
    node.others["b"].state(1, 7, left="died")
    node.tick(2.5)
    assert step_of(node) is None
    node.tick(1.0)
    assert (step_of(node), len(alarms(node, "breakpoint"))) == (7, 2)


def test_data_that_is_lost_again_is_waited_for_anew() -> None:
    """The first wait was over when its flush began, and an alarm told of a timeout that had not passed (P15)."""
    node = parity_rig.protected(parity_rig.steward(durable=True, write_timeout_s=10.0), keep=True)
    parity_rig.lose(node, "c")
    node.tick(5.0)
    node.others["d"].held(fact(7, 2, 1, world=3))
    node.tick(MEND_S)
    assert step_of(node) == 7
    node.tick(7.0)
    parity_rig.lose(node, "d")
    node.tick(2 * MEND_S)
    assert (step_of(node), node.machine.steward.table.states[at(7)].failures, alarms(node, "flush")) == (None, 0, [])
