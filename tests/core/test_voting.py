"""Two votes, all ranks or none; damage leads to another decision, anything else fails everybody (P1, P10, D11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.context import MEMBER_AWAY_S
from ckptd.core.protocol.machine.steward.gather import FRESH_S
from ckptd.core.protocol.machine.steward.restore import (
    AWAY_PAUSE_S_MAX,
    DECISIONS_MAX,
    LEFT_PATIENCE_S,
    STRAGGLERS_S,
)
from tests.core.elect import BEFORE, BOTH, LAYOUTS, OLD, A, B, C, Elect
from tests.core.machines import at, layout, only, sent

OLDER = tuple(replace(one, snapshot=at(3, OLD)) for one in BOTH)


def gos(done: list[ins.Instruction]) -> list[str]:
    return [do.to for do in only(done, ins.Send) if isinstance(do.message, msg.RestoreGo)]


def test_everybody_fetches_before_anybody_loads_and_loads_before_anybody_trains() -> None:
    node = Elect()
    node.open()
    assert gos(node.vote(0, "fetched")) == []
    assert gos(node.vote(0, "fetched")) == [], "the same vote again"
    assert gos(node.vote(1, "fetched")) == ["a", "b"]
    assert sent(node.vote(0, "loaded"), msg.RestoreDone) == []
    assert sent(node.vote(0, "loaded"), msg.RestoreDone) == []
    assert sent(node.vote(1, "loaded"), msg.RestoreDone, "b") != []
    assert node.machine.view()["is_steward"]


def test_ranks_that_restore_are_shown() -> None:
    node = Elect()
    node.open()
    assert node.machine.view()["ranks"] == {0: {"step": -1, "left": ""}}


def test_votes_of_another_round_do_not_count() -> None:
    node = Elect()
    node.open()
    node.vote(0, "fetched", round_=99)
    assert gos(node.vote(1, "fetched")) == []


def test_what_was_not_heard_is_said_again_to_who_lacks() -> None:
    node = Elect()
    node.open()
    node.vote(0, "fetched")
    mark = len(node.done)
    node.tick(0.75)
    told = [do.to for do in only(node.done[mark:], ins.Send) if isinstance(do.message, msg.EpochOpen)]
    assert told == ["b"], "not with every tick"
    node.vote(1, "fetched")
    node.vote(0, "loaded")
    mark = len(node.done)
    node.tick(0.75)
    assert set(gos(node.done[mark:])) == {"b"}


def test_a_late_report_is_answered_with_the_open_epoch() -> None:
    node = Elect()
    node.open()
    mark = len(node.done)
    node.report(opened=True)
    assert sent(node.done[mark:], msg.EpochOpen) == []
    node.report()
    assert len(sent(node.done[mark:], msg.EpochOpen, "b")) == 1


def test_outsiders_are_told_without_what_they_would_fetch() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known).start()
    node.answer("b", *BOTH, known=known, done=True)
    node.answer("c", known=known, done=True)
    node.claimed()
    (message,) = node.opens("c")
    assert (message.sources, message.record) == ((), node.opens()[0].record)
    assert node.opens()[0].sources != ()
    mark = len(node.done)
    node.tick(0.75)
    assert sent(node.done[mark:], msg.EpochOpen, "c"), "it learns that it is superseded"
    (abort,) = sent(node.vote(1, "fetched", ok=False, code="mismatch"), msg.RestoreAbort, "c")
    assert abort.epoch == message.record.number, "it holds what was to be restored until it hears the end of it"


@pytest.mark.parametrize(("phase", "code"), [("fetched", "mismatch"), ("loaded", "damage"), ("fetched", "")])
def test_a_vote_against_fails_everybody(phase: str, code: str) -> None:
    node = Elect()
    number = node.open().record.number
    done = node.vote(1, phase, ok=False, code=code, reason="why")
    expected = code or "unrecoverable"
    assert node.refusals() == [("now", expected)]
    assert sent(done, msg.RestoreAbort, "b") == [msg.RestoreAbort(number, number, expected, "rank 1: why")]
    assert node.machine.steward.restoring.restore is None


def test_damage_leads_to_another_decision_without_that_snapshot() -> None:
    message = refused_and_asked_anew(Elect(), (1, "damage", "block 3"), (0, "damage", "block 4"))
    assert (message.snapshot, message.record.number) == (at(3, OLD), OLD + 2)
    assert message.errors[0] == f"step 5 of epoch {OLD}: block 3"


def test_a_damaged_snapshot_is_tried_again_without_the_damaged_copies() -> None:
    node = Elect()
    copies = (*BOTH, replace(BOTH[0], tier=0))
    node.start().answer("b", *copies, known=BEFORE, done=True)
    node.claimed()
    node.vote(1, "fetched", ok=False, code="damage", reason="block 3")
    node.tick(STRAGGLERS_S)
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.claimed()
    assert node.opens()[-1].snapshot == at(5, OLD)


def test_when_every_snapshot_is_damaged_the_restore_is_refused() -> None:
    node = Elect()
    node.open()
    node.vote(1, "fetched", ok=False, code="damage", reason="block 3")
    node.tick(STRAGGLERS_S)
    node.answer("b", *BOTH, known=BEFORE, done=True)
    assert node.refusals() == [("now", "unrecoverable")]
    assert "block 3" in sent(node.done, msg.JoinRefused)[0].reason


def test_decisions_are_bounded() -> None:
    node = Elect()
    count = 40
    node.start().answer("b", *BOTH * count, known=BEFORE, done=True)
    for number in range(DECISIONS_MAX):
        node.claimed()
        assert node.refusals() == []
        node.vote(1, "fetched", ok=False, code="damage", reason="x")
        node.tick(STRAGGLERS_S)
        node.answer("b", *BOTH * (count - number - 1), known=BEFORE, done=True)
    assert node.refusals() == [("now", "unrecoverable")]
    assert sent(node.done, msg.JoinRefused)[0].reason == "every snapshot found is damaged"
    node.join("two")
    node.report("two")
    node.answer("b", *BOTH * count, attempt="two", known=BEFORE, done=True)
    node.claimed()
    message = node.opens()[-1]
    assert (message.record.nonce, message.snapshot) == ("two", at(5, OLD)), "another start tries anew"


def refused_and_asked_anew(node: Elect, *votes: tuple[int, str, str]) -> msg.EpochOpen:
    """Ranks could not fetch, for these codes and reasons; everyone answers as before, and it is decided anew."""
    node.start().answer("b", *BOTH, *OLDER, known=BEFORE, done=True)
    node.claimed()
    for rank, code, reason in votes:
        node.vote(rank, "fetched", ok=False, code=code, reason=reason)
    mark = len(node.done)
    node.tick(STRAGGLERS_S - 0.25)
    assert sent(node.done[mark:], msg.InventoryRequest) == []
    node.tick(0.25)
    assert sent(node.done[mark:], msg.InventoryRequest, "b"), "what is held now may be less"
    node.answer("b", *BOTH, *OLDER, known=BEFORE, done=True)
    node.claimed()
    return node.opens()[-1]


def away_again(node: Elect, pause_s: float) -> None:
    """Rank 1 could not reach a holder; everyone answers as before when asked anew, after the pause and not before."""
    node.vote(1, "fetched", ok=False, code="unreachable", reason="b: the stream broke")
    mark = len(node.done)
    if pause_s > 0.25:
        node.tick(pause_s - 0.25)
        assert sent(node.done[mark:], msg.InventoryRequest) == []
    node.tick(0.25)
    assert sent(node.done[mark:], msg.InventoryRequest, "b"), "who is there, and what it holds, may be different by now"
    node.answer("b", *BOTH, *OLDER, known=BEFORE, done=True)


def test_a_holder_that_cannot_be_reached_never_costs_a_step() -> None:
    """P1: the snapshot is not left out, however often; the restore's time bounds it, not the number of decisions."""
    node = Elect(restore_timeout_s=1000.0)
    node.start().answer("b", *BOTH, *OLDER, known=BEFORE, done=True)
    pause_s = STRAGGLERS_S
    for _ in range(DECISIONS_MAX + 3):
        node.claimed()
        assert node.refusals() == []
        assert node.opens()[-1].snapshot == at(5, OLD)
        away_again(node, pause_s)
        pause_s = min(AWAY_PAUSE_S_MAX, 2 * pause_s)


def test_who_cannot_be_reached_within_the_restores_time_is_refused() -> None:
    node = Elect(restore_timeout_s=2.0)
    node.start().answer("b", *BOTH, *OLDER, known=BEFORE, done=True)
    node.claimed()
    for pause_s in (STRAGGLERS_S, 2 * STRAGGLERS_S):
        away_again(node, pause_s)
        node.claimed()
        assert node.refusals() == []
    node.vote(1, "fetched", ok=False, code="unreachable", reason="b: the stream broke")
    node.vote(0, "fetched", ok=False, code="unreachable", reason="something else")
    node.tick(4 * STRAGGLERS_S)
    assert node.refusals() == [("now", "unreachable")]
    assert sent(node.done, msg.JoinRefused)[0].reason == "rank 1: b: the stream broke", "the first one's"


def test_another_start_knows_nothing_of_who_could_not_be_reached() -> None:
    node = Elect(restore_timeout_s=2.0)
    node.start().answer("b", *BOTH, *OLDER, known=BEFORE, done=True)
    for pause_s in (STRAGGLERS_S, 2 * STRAGGLERS_S):
        node.claimed()
        away_again(node, pause_s)
    node.claimed()
    node.vote(1, "fetched", ok=False, code="unreachable", reason="b: the stream broke")
    node.tick(4 * STRAGGLERS_S)
    assert node.refusals() == [("now", "unreachable")]
    node.join("two")
    node.report("two")
    assert node.machine.steward.restoring.away == ""
    node.answer("b", *BOTH, *OLDER, attempt="two", known=BEFORE, done=True)
    node.claimed()
    mark = len(node.done)
    node.vote(1, "fetched", ok=False, code="unreachable", reason="b: the stream broke")
    node.tick(STRAGGLERS_S)
    assert sent(node.done[mark:], msg.InventoryRequest, "b"), "its first pause is the shortest again"


def test_damage_beside_a_holder_that_cannot_be_reached_leaves_the_snapshot_out() -> None:
    message = refused_and_asked_anew(Elect(), (1, "unreachable", "b: the stream broke"), (0, "damage", "block 3"))
    assert message.snapshot == at(3, OLD)
    assert message.errors[0] == f"step 5 of epoch {OLD}: block 3"


def test_storage_is_read_anew_after_damage() -> None:
    """It may have been what was damaged, or have more by now."""
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, BEFORE))
    node.claimed()
    node.vote(1, "fetched", ok=False, code="damage", reason="block 3")
    mark = len(node.done)
    node.tick(STRAGGLERS_S)
    assert [do for do in only(node.done[mark:], ins.ReadDurable) if do.attempt == "now"] != []
    node.answer("b", known=BEFORE, done=True)
    assert node.refusals() == []


def test_a_restore_that_takes_too_long_fails_everybody_and_names_who_lacks() -> None:
    node = Elect()
    node.open()
    for rank in (0, 1):
        node.vote(rank, "fetched")
    node.vote(0, "loaded")
    node.tick(20.0)
    assert node.refusals() == []
    node.tick(0.5)
    assert node.refusals()[0] == ("now", "timeout")
    assert sent(node.done, msg.JoinRefused)[0].reason == "ranks 1 did not restore in time"


def lost_amid(node: Elect, *, patience: float) -> None:
    """Node b goes, which says nothing of its rank any more."""
    node.feed(ev.NodeDown("b"))
    node.tick(patience - 1.0, reporting=False)
    assert node.refusals() == []


@pytest.mark.parametrize("loads", [True, False])
def test_a_node_that_is_lost_amid_a_restore_is_not_waited_for_until_its_end(loads: bool) -> None:
    """Its own ranks raise at once; the others waited for restore_timeout_s, where no launcher ended them (an outsider)."""
    node = Elect(restore_timeout_s=600.0)
    node.open()
    if loads:
        for rank in (0, 1):
            node.vote(rank, "fetched")
        node.vote(0, "loaded")
    lost_amid(node, patience=node.machine.ctx.policy.steward_timeout_s + MEMBER_AWAY_S)
    node.tick(2.0, reporting=False)
    assert sent(node.done, msg.JoinRefused, "a")[0].reason == "b, which the job was being restored to, cannot be reached any more"
    assert [abort.code for abort in sent(node.done, msg.RestoreAbort, "a")] == ["left"]


def test_a_node_whose_link_comes_back_amid_a_restore_goes_on_with_it() -> None:
    node = Elect(restore_timeout_s=600.0)
    node.open()
    for _ in range(3):
        lost_amid(node, patience=node.machine.ctx.policy.steward_timeout_s + MEMBER_AWAY_S)
        node.feed(ev.NodeUp("b"))
        node.tick(2.0)
    for phase in ("fetched", "loaded"):
        for rank in (0, 1):
            node.vote(rank, phase)
    assert (node.refusals(), node.machine.view()["is_steward"]) == ([], True)


def test_what_broke_while_we_stood_still_may_be_whole_again() -> None:
    """A process that is stopped hears nothing: the first thing that it sees may be how late it is (a reader's history)."""
    node = Elect(restore_timeout_s=600.0)
    node.open()
    lost_amid(node, patience=13.0)
    node.now += 20.0
    node.feed(ev.Tick())
    assert node.refusals() == []
    node.tick(node.machine.ctx.policy.steward_timeout_s + MEMBER_AWAY_S - 1.0, reporting=False)
    assert node.refusals() == []
    node.tick(2.0, reporting=False)
    assert node.refusals()[0] == ("now", "left")


def test_a_holder_that_is_lost_amid_a_restore_ends_nothing() -> None:
    """What could not be fetched from it is decided upon anew."""
    node = Elect(restore_timeout_s=600.0)
    node.start().answer("b", *BOTH, known=replace(BEFORE, nodes=(A, B, C)), done=True)
    node.answer("c", *BOTH)
    node.claimed()
    assert {source.node for source in node.opens()[-1].sources} == {"b", "c"}
    node.feed(ev.NodeDown("c"))
    node.tick(100.0)
    assert node.refusals() == []


def test_ranks_that_never_came_are_named() -> None:
    node = Elect(join_timeout_s=6.0)
    node.join()
    node.tick(6.0, reporting=False)
    assert node.refusals() == []
    node.tick(0.5, reporting=False)
    assert sent(node.done, msg.JoinRefused, "b")[0].reason == "ranks 1 did not join, or left again"


def test_ranks_that_left_again_are_waited_for_shortly() -> None:
    node = Elect(join_timeout_s=100.0, inventory_timeout_s=50.0).start()
    node.tick(2.0)
    node.tick(LEFT_PATIENCE_S, reporting=False)
    assert node.refusals() == [], "counted from when they were all heard last"
    node.tick(FRESH_S + 0.5, reporting=False)
    assert node.refusals() == [("now", "timeout")]


def test_a_higher_epoch_that_somebody_knows_is_decided_above() -> None:
    node = Elect()
    node.open()
    other = EpochRecord(9, "other", ("b", "b"), (B, C))
    node.hear("b", msg.Stale(other))
    assert sent(node.done, msg.InventoryRequest, "c"), "its members may hold memory"
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.answer("c")
    node.report()
    node.tick(2.5)
    assert node.claim.number > 9


def test_who_is_faster_than_our_own_word_does_not_make_us_decide_again() -> None:
    """A member votes, or registers, in the epoch that this node opens and has not come to itself: each epoch was followed by
    another, and a job that had no checkpoint was told that it may have had one."""
    node = Elect()
    node.start().answer("b", known=None)
    node.answer("a", known=None)
    claim = node.claim
    for do in node.machine.handle(ev.EpochClaimed("now", claim.number, True, 0, ""), node.now):
        node.done.append(do)  # what it says to itself is on its way
    before = node.machine.steward.restoring.restore
    assert (before is not None, node.machine.ctx.record) == (True, None)
    node.hear("b", msg.Stale(claim))
    node.hear("b", msg.Inventory("", claim, ()))
    assert node.machine.steward.restoring.restore is before
    assert node.machine.ctx.record is None, "it enters by its own word"
    node.hear("a", node.opens("a")[-1])
    node.vote(1, "loaded")
    assert sent(node.done, msg.RestoreDone, "b"), "the first epoch is the one that trains"


def test_a_lower_epoch_changes_nothing() -> None:
    node = Elect()
    node.open()
    before = node.machine.steward.restoring.restore
    node.hear("b", msg.Stale(replace(BEFORE, number=2)))
    assert node.machine.steward.restoring.restore is before


def test_a_layout_that_is_none_leaves_its_holdings_unused() -> None:
    node = Elect().start()
    node.answer("b", *BOTH, known=BEFORE, done=True, layouts={**LAYOUTS, layout(1).layout_id: b"junk"})
    assert node.refusals() == [("now", "unrecoverable")]


def test_snapshots_order_by_epoch_then_step() -> None:
    assert SnapshotId(4, 9) < SnapshotId(5, 1)
