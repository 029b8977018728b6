"""Which memory goes because of a certificate, and which stays (P3, P14)."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward import steward as steward_module
from ckptd.core.protocol.machine.steward.certify import REPEAT_S
from ckptd.core.protocol.machine.steward.draining import FOLLOWS_S
from ckptd.core.protocol.machine.steward.grants import RETURN_S
from ckptd.core.protocol.machine.steward.protecting import PATIENCE_S
from tests.core.certificates import BOTH, released, released_since, steward
from tests.core.flushes import step_of
from tests.core.machines import EPOCH, TICK_S, Steward, at, fact, layout, only, record_of


def test_a_newer_one_of_the_same_level_releases_an_older_one() -> None:
    node = steward(replicas=1).train().capture(7).protect(7).capture(8)
    assert (node.level(8), released(node)) == (0, set()), "step 7 survives a loss, step 8 does not yet (P3)"
    node.protect(8)
    assert released(node) == {7}
    assert len(only(node.done, ins.FreeSlot)) == 2, "this node's own slot and its replica of rank 1"


def test_after_a_loss_a_newer_one_of_the_level_that_is_left_releases() -> None:
    """A cluster that lost a node goes on, degraded (P14): the oldest one is protected again first, but not waited for for ever."""
    node = steward(record_of("ab", outside="c"), replicas=1).train().capture(7)
    for rank in (0, 1):
        node.copy(7, rank, to="c")
    node.capture(8)
    assert (node.level(7), released(node)) == (1, set())
    node.feed(ev.NodeDown("c"))
    assert released(node) == set()
    node.tick(PATIENCE_S + 1.0)
    assert released(node) == {7}


@pytest.mark.parametrize("goes", ["b", "ab"])
def test_where_nobody_else_can_hold_more_a_leaving_node_holds_up_no_release(goes: str) -> None:
    """P14: each snapshot kept the older ones for ten seconds, for copies that nobody could make, and of 110 steps 7 were taken (an
    operator who drained the only node)."""
    node = steward(replicas=1).train().capture(7).protect(7)
    for name in goes:
        node.feed(ev.DrainAsked(True)) if name == "a" else node.others[name].tell(msg.Leaving(EPOCH, True))
    node.capture(8)
    assert released(node) == set(), "step 7 survives a loss, step 8 does not yet (P3)"
    node.protect(8)
    assert released(node) == {7}


def test_a_leaving_nodes_newest_releases_what_does_without_it_once_it_does_so_itself() -> None:
    """P3: another node can take what the leaving one holds, and is going to."""
    node = steward(record_of("abc")).train().capture(7).protect(7).capture(8)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    node.protect(8)
    assert (node.level(8), released(node)) == (1, set())
    node.copy(8, 1, to="a")
    node.copy(8, 2, to="b")
    assert released(node) == {7}


def test_a_snapshot_that_a_grant_may_still_void_releases_nothing() -> None:
    """Copies may be faster than the last rank's own word."""
    node = steward(replicas=0).train().capture(7).capture(8, 0)
    node.others["b"].held(fact(8, 1))
    assert (node.level(8), released(node)) == (None, set())
    node.capture(8, 1)
    assert (node.level(8), released(node)) == (0, {7})


def test_a_void_one_releases_nothing() -> None:
    node = steward(replicas=0).train().capture(7).capture(8, 0)
    node.others["b"].missed(node.granted(8), 1, "no memory")
    assert (node.level(8), released(node)) == (None, set())
    assert node.level(7) == 0


def test_what_is_pinned_for_a_flush_is_not_released() -> None:
    node = steward(replicas=0).train().capture(7)
    node.machine.steward.certify.guards.pinned = {at(7)}
    node.capture(8)
    assert released(node) == set()
    node.machine.steward.certify.guards.pinned = set()
    node.capture(9)
    assert released(node) == {7, 8}


def test_a_marked_one_waits_for_its_flush() -> None:
    node = steward(replicas=0, durable=True).train().capture(7, keep=True).capture(8)
    assert released(node) == set()
    node.machine.steward.table.mark_durable([at(7)])
    node.capture(9)
    assert released(node) == {7, 8}


def test_what_lacks_a_part_while_members_are_away_is_not_taken_for_what_came_back() -> None:
    """P3: nodes remember its level, as this steward said it; with two of them away it was let go as one that was released before,
    for a newer one that is less safe (simulator, seed 7467380722)."""
    node = steward(record_of("abcd")).train().capture(7).protect(7).capture(8)
    node.copy(8, 2, to="a")
    node.copy(8, 3, to="b")
    assert (node.level(7), node.level(8)) == (1, 0)
    node.feed(ev.NodeDown("c"), ev.NodeDown("d"), ev.NodeDown("b"), ev.NodeUp("b"))
    held = fact(7, 1, world=4), fact(7, 0, 1, world=4), fact(8, 1, world=4), fact(8, 3, 1, world=4)
    node.others["b"].tell_inventory(*held, certified=((at(7), 1, False), (at(8), 0, False)))
    assert (node.level(7), node.level(8), released(node)) == (-1, 0, set())


def test_without_storage_a_mark_keeps_nothing() -> None:
    node = steward(replicas=0, durable=False).train().capture(7, keep=True).capture(8)
    assert released(node) == {7}


def test_a_durable_one_that_lost_a_part_in_memory_gives_up_the_rest() -> None:
    """It kept its slots for ever, and with two slots per rank nothing was granted any more (P14)."""
    node = steward(replicas=0).train().capture(7).capture(8)
    node.machine.steward.table.mark_durable([at(8)])
    node.others["b"].held(fact(8, 1), lost=True)
    assert at(8) not in node.machine.steward.table.states, "before another one wants the slots"
    node.capture(9)
    assert released(node) == {7, 8}


def test_a_durable_one_keeps_what_it_has_while_a_node_is_away() -> None:
    node = steward(replicas=0).train().capture(7)
    node.machine.steward.table.mark_durable([at(7)])
    node.feed(ev.NodeDown("b"))
    assert at(7) in node.machine.steward.table.states


def test_the_newest_certificate_names_what_was_released_again_and_again() -> None:
    node = steward(replicas=0).train().capture(7).capture(8)
    mark = node.mark
    node.tick(REPEAT_S + 1.0)
    assert {s.step for c in node.certificates("b", mark) for s in c.releases} == {7}, (
        "for a node that missed it"
    )


def leaning() -> Steward:
    """Node b leaves and nobody can take what it has, so step 7 does not go for step 8 for a while. When it may, no slot has been
    free for so long that what storage has may go; and storage has just got step 8."""
    node = steward(replicas=0).train(free=2)
    node.others["b"].tell(msg.Leaving(EPOCH, True))
    node.capture(7).capture(8)
    node.others["b"].state(1, 12, free=0, asks=12)
    node.feed(ev.RankProgress(0, 12, asks=True))
    node.tick(FOLLOWS_S - TICK_S)
    node.machine.steward.table.mark_durable([at(8)])
    node.tick(2 * TICK_S)
    return node


def test_what_goes_for_the_newest_gives_room_and_the_newest_stays() -> None:
    """P14: the newest was given up in the same look, and with it the only word that named the one before, which storage did not
    have: its slots stayed for ever (simulator, seed 13946083531)."""
    node = leaning()
    assert (released(node), node.level(8)) == ({7}, 0)


def test_what_went_for_one_that_storage_alone_has_now_is_still_named() -> None:
    """P14: for a node that missed it, and that would keep its slots until something new is certified."""
    node = leaning()
    node.tick(RETURN_S + REPEAT_S)
    assert node.level(8) == -1, "given up: no slot has come back"
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert released_since(node, mark) == {7, 8}


def comes_back(node: Steward, *holdings: msg.HoldingFact, name: str = "c", **more: Any) -> int:
    """Node c, which was cut off, tells what it holds. The mark just before it told."""
    node.feed(ev.NodeDown(name), ev.NodeUp(name))
    node.tick(1.5)
    node.others[name].session = ""
    node.hear(name, msg.Inventory("", node.record, ()))
    mark = node.mark
    node.others[name].tell_inventory(*holdings, **more)
    return mark


def test_a_released_one_that_a_node_still_holds_is_weighed_anew() -> None:
    """P3: it was released without that node's copies, which may be better than what the newest has by now."""
    node = steward(record_of("ab", outside="c"), replicas=0).train().capture(7).capture(8)
    assert released(node) == {7}
    node.feed(ev.NodeDown("b"))
    comes_back(node, fact(7, 0), fact(7, 1))
    assert node.level(7, to="c") == 0, "step 8 lacks rank 1 now"
    assert at(7) not in node.certificates("c")[-1].releases


def test_of_a_released_one_a_part_that_a_node_brings_back_is_released_again_and_not_void() -> None:
    """Its ranks were told a level that held until a newer one took its place: that nobody has the rest any more is no news (P2)."""
    node = steward(record_of("ab", outside="c"), replicas=1).train().capture(7).protect(7).capture(8).protect(8)
    assert released(node) == {7}
    mark = comes_back(node, fact(7, 1, 1), layouts=BOTH)
    node.tick(2 * REPEAT_S)
    assert node.said(msg.Void, "c", mark) == []
    assert {c.snapshot for c in node.certificates("c", mark)} == {at(8)}
    assert at(7) in node.certificates("c", mark)[-1].releases


def test_that_is_so_too_when_the_newer_one_is_whole_again_with_the_same_word() -> None:
    """The newer one fell with the node's link, and rises with its inventory, in which the released one is not any more."""
    node = steward(record_of("ab", outside="c"), replicas=0).train().capture(7).capture(8)
    node.feed(ev.NodeDown("b"))
    comes_back(node, fact(7, 0), layouts=BOTH)
    assert at(7) in node.machine.steward.table.states and node.level(8, to="c") == -1
    mark = comes_back(node, fact(8, 1), name="b", layouts=BOTH)
    node.tick(2 * REPEAT_S)
    assert node.level(8, to="c") == 0
    assert node.said(msg.Void, "c", mark) == []
    assert at(7) in node.certificates("c", mark)[-1].releases


def test_what_lost_a_part_beside_a_newer_one_that_is_no_better_goes_at_once() -> None:
    """P2: while its copies were under way it was the one that nothing newer may take the place of, and its level stood."""
    node = steward().train(free=3).capture(7).capture(8)
    assert (node.level(7), node.level(8), released(node)) == (0, 0, set())
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    node.others["b"].tell_inventory(fact(7, 1), fact(8, 1), certified=((at(7), 0, False), (at(8), 0, False)))
    node.others["b"].held(fact(7, 1), lost=True)
    assert (node.level(8), released(node)) == (0, {7})


def test_of_a_released_one_that_is_needed_again_the_fall_is_told() -> None:
    """P2: it was weighed anew and certified, and a flush reads it now, so no release takes its certificate back."""
    node = steward(record_of("ab", outside="c"), replicas=0).train().capture(7).capture(8)
    node.machine.steward.certify.guards.pinned = {at(7)}
    comes_back(node, fact(7, 0), fact(7, 1))
    assert node.level(7, to="c") == 0
    node.others["c"].held(fact(7, 1), lost=True)
    assert node.level(7, to="c") == -1


def test_a_released_one_that_a_late_message_names_stays_released() -> None:
    """Only an inventory that begins a session may have been away so long; any other message crossed the release."""
    node = steward(replicas=0).train().capture(7).capture(8)
    node.others["b"].held(fact(7, 1))
    assert at(7) not in node.machine.steward.table.states
    assert released(node) == {7}


@pytest.mark.parametrize("readable", ["at once", "when a layout has come", "when they have been looked at together"])
@pytest.mark.parametrize("epoch", [EPOCH, EPOCH - 1])
def test_what_a_steward_before_this_one_released_is_no_news_to_a_node_that_had_not_heard(epoch: int, readable: str) -> None:
    """It died after it had certified step 8 and before node c heard that step 7 went for it: step 7 was void (P2)."""
    ancestry = (at(8, epoch),) if epoch < EPOCH else ()
    node = steward(record_of("abc", ancestry=ancestry), replicas=1)
    node.thread.slow = "together" in readable
    three, told = [layout(rank, 3) for rank in range(3)], ((at(7, epoch), 1, False), (at(8, epoch), 1, False))
    own = [(1, 0, 0, True), (2, 2, 1, False)]
    node.feed(*(ev.HoldingFound(slot, at(8, epoch), rank, tier, mine, three[rank], ()) for slot, rank, tier, mine in own))
    for name, held in (("b", [(8, 1, 0), (8, 0, 1)]), ("c", [(8, 2, 0), (8, 1, 1), (7, 2, 0)])):
        facts = [fact(step, rank, tier, epoch=epoch, world=3) for step, rank, tier in held]
        node.others[name].tell_inventory(*facts, layouts=[] if "has come" in readable else three, certified=told)
    node.tick(REPEAT_S)
    node.hear("b", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in three}))
    node.computed()
    node.tick(REPEAT_S)
    assert node.level(8, to="c", epoch=epoch) == 1
    assert [void.snapshot for void in node.said(msg.Void, "c")] == []
    assert at(7, epoch) in node.certificates("c")[-1].releases


def test_a_marked_one_that_is_being_flushed_does_not_go_because_a_link_blinks() -> None:
    """All of it was there a moment before and after, and it was released as outdone without a word (P15)."""
    node = steward(durable=True).train().capture(7, keep=True)
    node.tick(1.0)
    assert step_of(node) == 7
    node.capture(8).protect(8)
    node.feed(ev.NodeDown("b"))
    node.tick(0.5)
    node.feed(ev.NodeUp("b"))
    node.others["b"].tell_inventory(fact(7, 1), fact(8, 1), fact(8, 0, 1))
    node.tick(2.0)
    assert at(7) in node.machine.steward.table.states
    assert 7 not in released(node)


def test_a_tick_releases_nothing_by_a_level_that_is_still_to_be_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: with hundreds of ranks the books are looked through after a pause, and a tick did not wait for it."""
    node = steward(replicas=1).train().capture(7).protect(7)
    guards, table = node.machine.steward.certify.guards, node.machine.steward.table
    guards.pinned = {at(7)}
    node.capture(8).protect(8)
    assert (node.level(8), released(node)) == (1, set())
    monkeypatch.setattr(steward_module, "RANKS_AT_ONCE_MAX", 0)
    monkeypatch.setattr(steward_module, "PAUSE_PER_RANK_S", 1.0)
    monkeypatch.setattr(node.machine.steward.grants, "held_up", lambda: True)
    node.others["b"].held(fact(8, 0), lost=True)
    assert at(8) in table.dirty, "its level has fallen, and nobody has looked"
    guards.pinned = set()
    node.machine.steward.certify.on_tick()
    assert at(7) in table.states, "step 8 survives no loss any more"
    node.tick(3.0)
    assert node.level(8) == 0 and at(7) in table.states
