"""An epoch on a member: older ones are refused, ranks fetch, vote and load together, and nobody waits for ever (P12, D10, D11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.ids import EpochRecord
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.joining import RESTORE_PATIENCE
from ckptd.core.protocol.machine.opening import REJOIN_S, STEWARD_AWAY_S
from tests.core.machines import EPOCH, Node, at, layout, only, record_of, sent
from tests.core.restoring import (
    ASK,
    BEFORE,
    POLICY,
    RECORD,
    WHOLE,
    fetched,
    go,
    join,
    loaded,
    member,
    opened,
    restoring,
    votes,
)


@pytest.fixture
def node() -> Node:
    return member()


# --- the whole way ----------------------------------------------------------------------------------------------------
def test_ranks_fetch_vote_load_vote_and_train(node: Node) -> None:
    join(node, 1, 2)
    done = opened(node)
    assert only(done, ins.PersistEpoch) == [ins.PersistEpoch(RECORD, BEFORE)]
    (prepare,) = only(done, ins.PrepareRestore)
    assert (prepare.record, prepare.round, prepare.ranks, prepare.snapshot) == (RECORD, EPOCH, (1, 2), WHOLE)
    assert prepare.errors == ("why",)
    assert node.machine.view()["phase"] == "restoring"
    assert votes(fetched(node, 1, 2)) == [(1, "fetched", True, ""), (2, "fetched", True, "")]
    assert only(go(node), ins.LoadNow) == [ins.LoadNow(EPOCH)]
    assert votes(loaded(node, 1, 2)) == [(1, "loaded", True, ""), (2, "loaded", True, "")]
    assert only(node.hear("a", msg.RestoreDone(EPOCH, EPOCH)), ins.FinishRestore) == [ins.FinishRestore(EPOCH)]
    assert (node.machine.view()["phase"], set(node.machine.ranks.here)) == ("running", {1, 2})


def test_what_is_restored_stays_in_memory_until_all_have_it(node: Node) -> None:
    """P1."""
    restoring(node)
    node.machine.slots.release(WHOLE)
    assert only(node.done, ins.FreeSlot) == []
    done = node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert len(only(done, ins.FreeSlot)) == 2


def test_what_an_epoch_is_opened_on_is_nobodys_to_release_any_more(node: Node) -> None:
    """P3: the epoch before had a newer one certified while the decision was made without it."""
    node.hear("a", msg.InventoryRequest("now", ()))
    node.machine.slots.release(WHOLE)
    restoring(node)
    done = node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert only(done, ins.FreeSlot) == []
    assert {fact.snapshot for fact in node.machine.slots.facts()} == {WHOLE}


def test_when_there_is_nothing_to_restore_ranks_are_ready_at_once(node: Node) -> None:
    join(node, 1, 2)
    done = opened(node, replace(RECORD, ancestry=()), snapshot=None)
    assert len(only(done, ins.PrepareRestore)) == 1
    assert votes(done) == [(1, "loaded", True, ""), (2, "loaded", True, "")]


def test_fetching_begins_when_the_last_local_rank_stands_there(node: Node) -> None:
    join(node, 1)
    assert only(opened(node), ins.PrepareRestore) == []
    done = join(node, 2)
    assert len(only(done, ins.PrepareRestore)) == 1
    assert only(opened(node), ins.PrepareRestore) == [], "once"


def test_a_holder_without_ranks_learns_of_the_epoch_and_fetches_nothing() -> None:
    node = Node("x", replace(BEFORE, nodes=(*BEFORE.nodes,), holders=record_of("x").nodes), POLICY, running=False)
    done = opened(node, replace(RECORD, holders=record_of("x").nodes))
    assert len(only(done, ins.PersistEpoch)) == 1
    assert only(node.tick(REJOIN_S + 1.0), ins.PrepareRestore) == []
    assert votes(node.done) == []


def test_a_daemon_that_restarted_in_mid_restore_begins_it_anew(node: Node) -> None:
    node = Node("b", RECORD, POLICY, running=False)
    join(node, 1, 2)
    assert len(only(opened(node), ins.PrepareRestore)) == 1, "it was in that epoch before it heard of it again"
    node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert only(opened(node), ins.PrepareRestore) == [], "late"
    assert node.machine.view()["phase"] == "running"


def test_a_second_restore_owes_the_first_one_nothing(node: Node) -> None:
    """It loads when its own ranks have voted, and repeats its own votes alone."""
    restoring(node)
    fetched(node, 1, 2)
    go(node)
    newer = replace(RECORD, number=EPOCH + 1, nonce="then")
    join(node, 1, 2, attempt="then")
    opened(node, newer)
    mark = node.mark
    node.tick(POLICY.inventory_timeout_s)
    assert votes(node.done[mark:]) == []
    node.feed(*(ev.RankFetched(rank, EPOCH + 1, True, "") for rank in (1, 2)))
    assert only(go(node, EPOCH + 1, EPOCH + 1), ins.LoadNow) == [ins.LoadNow(EPOCH + 1)]


def test_what_is_heard_of_from_the_side_ends_a_restore_and_may_have_trained(node: Node) -> None:
    restoring(node)
    fetched(node, 1, 2)
    assert inventory(node).never
    mark = node.mark
    node.hear("a", msg.Stale(record_of("abbc", number=EPOCH + 1, nonce="then")))
    assert not inventory(node).never
    assert "c" in node.machine.ctx.nodes
    node.tick(POLICY.inventory_timeout_s)
    assert votes(node.done[mark:]) == [], "nobody waits for them any more"


def test_an_epoch_that_is_done_has_trained_whether_or_not_our_ranks_said_that_they_loaded(node: Node) -> None:
    restoring(node)
    node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert (inventory(node).never, inventory(node).done) == (False, True)


def test_the_nodes_of_a_world_are_known_from_the_first_rank_on(node: Node) -> None:
    nodes = record_of("cbb").nodes
    node.feed(ev.RankJoined(1, "now", ("c", "b", "b"), nodes, ASK, running=False))
    assert "c" in node.machine.ctx.nodes, "the report goes there"


# --- who is refused ---------------------------------------------------------------------------------------------------
def test_an_older_epoch_and_another_of_the_same_number_are_refused(node: Node) -> None:
    """P12."""
    join(node, 1, 2, attempt="other")
    for record in (replace(BEFORE, number=EPOCH - 2, nonce="other"), replace(BEFORE, nonce="other")):
        done = opened(node, record)
        assert only(done, ins.PersistEpoch) == []
        assert sent(done, msg.Stale, "a") == [msg.Stale(BEFORE)]
    assert node.machine.ctx.record == BEFORE


def test_a_newer_epoch_ends_what_the_ranks_of_the_old_one_do(node: Node) -> None:
    done = opened(node, replace(RECORD, nonce="elsewhere"))
    assert [(do.rank, do.epoch) for do in only(done, ins.Supersede)] == [(1, EPOCH), (2, EPOCH)]


def test_ranks_of_an_older_epoch_are_superseded_once(node: Node) -> None:
    """Nor told of: the steward of the new one knows no such ranks, and would wait for them."""
    opened(node, replace(RECORD, nonce="elsewhere"))
    assert node.machine.ranks.here == {}
    assert only(opened(node, replace(RECORD, number=EPOCH + 1, nonce="again")), ins.Supersede) == []


def test_ranks_that_stand_at_the_new_epoch_or_are_gone_are_not_superseded(node: Node) -> None:
    node.feed(ev.RankLeft(2, clean=False))
    join(node, 1)
    assert only(opened(node), ins.Supersede) == []


def test_a_restore_under_way_is_ended_by_a_newer_epoch(node: Node) -> None:
    restoring(node)
    newer = replace(RECORD, number=EPOCH + 1, nonce="elsewhere")
    done = opened(node, newer)
    assert [(do.round, do.code) for do in only(done, ins.FailRestore)] == [(EPOCH, "superseded")]


def test_another_decision_for_the_same_attempt_fails_nobody(node: Node) -> None:
    """Damage was found: the same ranks fetch another snapshot under a new number."""
    restoring(node)
    newer = replace(RECORD, number=EPOCH + 1)
    done = opened(node, newer)
    assert only(done, ins.FailRestore) == []
    assert [do.round for do in only(done, ins.PrepareRestore)] == [EPOCH + 1]
    assert fetched(node, 1) == [], "of the round before"


def test_a_newer_start_of_the_job_makes_the_older_ones_epoch_void(node: Node) -> None:
    join(node, 1, 2, attempt="later still")
    done = opened(node)
    assert votes(done) == [(1, "fetched", False, "superseded"), (2, "fetched", False, "superseded")]
    assert only(done, ins.PrepareRestore) == []


# --- votes ------------------------------------------------------------------------------------------------------------
def test_votes_are_repeated_until_the_restore_ends(node: Node) -> None:
    restoring(node)
    fetched(node, 1, 2)
    node.tick(0.25)
    assert len(votes(node.tick(0.5))) == 2
    assert len(votes(opened(node))) == 2, "the steward asks"
    node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert votes(node.tick(2.0)) == []


def test_a_failed_fetch_says_why(node: Node) -> None:
    restoring(node)
    assert votes(fetched(node, 1, ok=False, code="damage")) == [(1, "fetched", False, "damage")]


def test_a_failed_load_says_so(node: Node) -> None:
    restoring(node)
    fetched(node, 1, 2)
    assert loaded(node, 1) == [], "nobody said go"
    go(node)
    assert votes(loaded(node, 1, ok=False)) == [(1, "loaded", False, "load")]


def test_only_the_round_that_is_open_is_loaded_once(node: Node) -> None:
    restoring(node)
    fetched(node, 1, 2)
    assert only(go(node, EPOCH + 1), ins.LoadNow) == []
    assert len(only(go(node), ins.LoadNow)) == 1
    assert only(go(node), ins.LoadNow) == []


def test_nothing_is_loaded_before_it_was_prepared(node: Node) -> None:
    join(node, 1)
    opened(node)
    assert only(go(node), ins.LoadNow) == []


@pytest.mark.parametrize("went", [False, True])
def test_a_rank_that_dies_in_between_fails_the_restore(node: Node, went: bool) -> None:
    restoring(node)
    fetched(node, 1, 2)
    if went:
        go(node)
    done = node.feed(ev.RankLeft(2, clean=False))
    assert votes(done) == [(2, "loaded" if went else "fetched", False, "left")]
    assert votes(node.feed(ev.RankLeft(0, clean=False))) == [], "no rank of ours"


# --- ends that are no success -----------------------------------------------------------------------------------------
def test_an_aborted_restore_fails_its_ranks(node: Node) -> None:
    restoring(node)
    abort = msg.RestoreAbort(EPOCH, EPOCH, "mismatch", "another model")
    assert only(node.hear("a", replace(abort, round=EPOCH + 1)), ins.FailRestore) == []
    assert only(node.hear("a", abort), ins.FailRestore) == [ins.FailRestore(EPOCH, "mismatch", "another model")]
    assert only(node.hear("a", abort), ins.FailRestore) == []
    assert node.machine.view()["phase"] == "idle"


def test_a_steward_that_is_not_heard_of_any_more_fails_the_restore(node: Node) -> None:
    restoring(node)
    limit = RESTORE_PATIENCE * POLICY.restore_timeout_s
    assert only(node.tick(limit), ins.FailRestore) == []
    (failed,) = only(node.tick(0.5), ins.FailRestore)
    assert failed.code == "timeout"
    assert only(node.tick(limit + 1.0), ins.FailRestore) == []


@pytest.mark.parametrize("back", [False, True])
def test_a_steward_whose_node_is_gone_fails_the_restore_soon(back: bool) -> None:
    """Nobody takes its place in a restore: its own ranks are gone as well, and the others hung for 900 s."""
    node = restoring(member(replace(POLICY, restore_timeout_s=600.0)))
    node.feed(ev.NodeDown("a"))
    assert only(node.tick(POLICY.steward_timeout_s + STEWARD_AWAY_S - 1.0), ins.FailRestore) == []
    if back:
        node.feed(ev.NodeUp("a"))
    assert [failed.code for failed in only(node.tick(2.0), ins.FailRestore)] == ([] if back else ["left"])


def test_ranks_that_are_not_back_after_their_daemon_restarted_are_given_up(node: Node) -> None:
    """Their restore() raised, so all must raise (D11)."""
    opened(node)
    assert votes(node.tick(REJOIN_S)) == []
    assert votes(node.tick(0.25)) == [(1, "fetched", False, "left"), (2, "fetched", False, "left")]


def test_a_go_after_a_restart_is_answered_with_a_vote_against() -> None:
    node = Node("b", RECORD, POLICY, running=False)
    assert votes(go(node)) == [(1, "loaded", False, "left"), (2, "loaded", False, "left")]
    node = Node("b", RECORD, POLICY)
    assert votes(go(node)) == [], "its ranks train"


def inventory(node: Node) -> msg.Inventory:
    return sent(node.hear("a", msg.InventoryRequest("asks", ())), msg.Inventory, "a")[0]


def test_whether_an_epoch_ran_is_told_as_far_as_it_is_known(node: Node) -> None:
    """What certainly never ran left nothing behind; everything else may have trained."""
    join(node, 1, 2)
    opened(node)
    assert (inventory(node).never, inventory(node).done) == (True, False), "nobody has loaded"
    fetched(node, 1, 2)
    go(node)
    loaded(node, 1)
    assert inventory(node).never
    loaded(node, 2)
    assert not inventory(node).never, "the others may have, too"
    node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert (inventory(node).never, inventory(node).done) == (False, True)


def test_a_restore_that_was_called_off_never_ran(node: Node) -> None:
    restoring(node)
    fetched(node, 1, 2)
    go(node)
    loaded(node, 1, 2)
    node.hear("a", msg.RestoreAbort(EPOCH, EPOCH, "timeout", "x"))
    assert inventory(node).never


def test_the_newest_epoch_that_trained_here_is_told_beside_a_newer_one(node: Node) -> None:
    assert inventory(node).ran is None
    opened(node)
    assert inventory(node).ran == BEFORE
    opened(node, replace(RECORD, number=EPOCH + 1))
    assert inventory(node).ran == BEFORE, "the one in between never did"


def test_an_epoch_that_left_snapshots_here_has_trained() -> None:
    node = Node("b", BEFORE, POLICY, running=False)
    opened(node)
    assert inventory(node).ran is None
    node = Node("b", BEFORE, POLICY, running=False)
    node.machine.slots.hold(*held(BEFORE))
    opened(node)
    assert inventory(node).ran == BEFORE


def held(record: EpochRecord) -> tuple[Any, Any, Any]:
    from ckptd.core.protocol.machine.slots import Slot

    one = layout(1, 3)
    return Slot(9, 1, own=True), msg.HoldingFact(at(5, record.number), 1, 0, one.layout_id), one


def test_a_bystander_lets_go_when_the_restore_is_called_off() -> None:
    """It kept the snapshot pinned, and the job from being over or forgotten, for 1.5 times restore_timeout_s."""
    node = Node("c", record_of("ab", number=EPOCH - 1, outside="c"), POLICY, running=False)
    record = record_of("ab", outside="c", nonce="new")
    node.hear("a", msg.EpochOpen("new", record, EPOCH, at(5, EPOCH - 1), False))
    assert node.machine.slots.pinned(at(5, EPOCH - 1)) and node.machine.lifetime.here()
    node.hear("a", msg.RestoreAbort(EPOCH, EPOCH, "mismatch", "another model"))
    assert not node.machine.slots.pinned(at(5, EPOCH - 1)) and not node.machine.lifetime.here()
