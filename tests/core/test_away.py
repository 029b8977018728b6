"""What memory still has of an earlier epoch while somebody who may have the rest is away: it waits for him (P3, P2, P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.certify import REPEAT_S
from ckptd.core.protocol.machine.steward.grants import FULL_S
from tests.core import elect
from tests.core.certificates import BOTH, OLD, released, steward
from tests.core.elect import BEFORE, A, B, C, Elect
from tests.core.machines import EPOCH, TICK_S, Member, Node, Other, Steward, at, fact, layout, only, record_of

RECORD = record_of("ab", outside="c", ancestry=(at(5, OLD),))


def voided(node: Steward, since: int = 0) -> set[int]:
    return {void.snapshot.step for void in node.said(msg.Void, "b", since) if void.snapshot is not None}


def parts_left(*steps: int, record: EpochRecord = RECORD) -> Steward:
    """Of steps that this epoch continued (it was opened from storage) node b holds rank 1; node c, cut off, holds rank 0."""
    node = steward(record)
    node.feed(ev.NodeDown("c"))
    del node.others["c"]
    node.others["b"].tell_inventory(*(fact(step, 1, epoch=OLD) for step in steps), layouts=BOTH)
    node.tick(2 * REPEAT_S)
    return node


def comes_back(node: Steward, *holdings: msg.HoldingFact) -> None:
    node.feed(ev.NodeUp("c"))
    node.others["c"] = Other(node, "c")
    node.others["c"].tell_inventory(*holdings)


def test_a_part_is_kept_while_a_holder_of_the_rest_is_away() -> None:
    """P3: it was protected against the loss of one node, one node was lost, and the parts of the two that were left would have
    been all of it (simulator, seed 54065223863 of that day)."""
    node = parts_left(5)
    assert voided(node) == set()
    comes_back(node, fact(5, 0, epoch=OLD))
    assert (node.level(5, epoch=OLD), voided(node)) == (0, set())


def test_it_is_void_when_the_holder_has_told_that_he_has_nothing() -> None:
    node = parts_left(5)
    comes_back(node)
    assert voided(node) == {5}


def test_what_the_epoch_left_behind_is_not_waited_for() -> None:
    """Step 6 was being captured when the epoch before ended; a slot is needed more than a part of it."""
    assert voided(parts_left(5, 6)) == {6}


def test_what_a_declared_fresh_start_left_behind_is_waited_for_until_it_has_something_of_its_own() -> None:
    """P3: an older step that was whole here was taken for the better one (simulator, seed 43867)."""
    node = parts_left(5, record=record_of("ab", outside="c"))
    node.others["b"].held(fact(4, 1, epoch=OLD))
    node.feed(ev.ReplicaArrived(at(4, OLD), 0, 1, 77, layout(0), ()))
    node.tick(2 * REPEAT_S)
    assert (node.level(4, epoch=OLD), voided(node), released(node)) == (0, set(), set())
    node.feed(ev.NodeUp("c"), ev.NodeDown("c"))
    assert (voided(node), released(node)) == (set(), set()), "what is certified of the old lineage is nothing of its own"
    node.train(6).capture(7)
    node.tick(2 * REPEAT_S)
    assert (node.level(7), released(node) | voided(node)) == (0, {4, 5})


def test_it_is_released_for_a_newer_one_at_the_level_that_is_wanted() -> None:
    node = parts_left(5).train().capture(7)
    assert (node.level(7), released(node)) == (0, set()), "with node c's it may survive as much, or more"
    node.protect(7)
    assert (released(node), voided(node)) == ({5}, set())


def test_a_steward_who_hears_nobody_gives_nothing_up() -> None:
    """P2, P3: cut off from all others it declared its own copies void; to the steward of the rest its inventory came late, and
    that one certified what was not there any more (simulator, seed 54065222023 of that day)."""
    node = Steward(record_of("abc", ancestry=(at(5, OLD),)))
    node.feed(ev.NodeDown("b"), ev.NodeDown("c"))
    node.feed(ev.HoldingFound(9, at(5, OLD), 1, 1, False, layout(1, 3), ()))
    node.tick(20.0)
    assert (only(node.done, ins.FreeSlot), node.said(msg.Void)) == ([], [])


def test_what_is_durable_keeps_its_parts_in_memory_too() -> None:
    node = parts_left(5)
    node.machine.steward.table.mark_durable([at(5, OLD)])
    node.tick(2 * REPEAT_S)
    assert (released(node), voided(node)) == (set(), set())


def test_the_oldest_goes_when_a_rank_has_had_no_slot_for_long() -> None:
    """P14: who is away may never come back."""
    node = parts_left(4, 5).train(free=0)
    node.tick(FULL_S)
    assert voided(node) == set()
    node.tick(1.0)
    assert voided(node) == {4}
    node.others["b"].held(fact(4, 1, epoch=OLD), lost=True)
    node.tick(1.0)
    assert voided(node) == {4, 5}, "no slot came of the first"


def test_what_nobody_will_ever_read_holds_up_nothing_for_which_a_slot_is_needed() -> None:
    """P14: it is newer, and what it is not known to be cannot be the better one for ever."""
    strange = replace(fact(9, 1, epoch=OLD), layout_id="of a release that is to come")
    node = steward(RECORD, replicas=1).train(free=0)
    node.others["b"].tell_inventory(fact(4, 1, epoch=OLD), strange, layouts=BOTH)
    node.others["c"].tell_inventory()
    node.tick(FULL_S)
    assert voided(node) == set()
    node.tick(1.0)
    assert voided(node) == {4}


def test_a_slot_that_comes_of_it_ends_the_need() -> None:
    node = parts_left(4, 5).train(free=0)
    node.tick(FULL_S + 1.0)
    node.others["b"].held(fact(4, 1, epoch=OLD), lost=True)
    node.train(free=1)
    assert node.said(msg.Grant, "b"), "the job goes on"
    node.tick(1.0)
    assert voided(node) == {4}


def test_how_long_a_rank_lacks_slots_counts_anew_when_one_has_been_away() -> None:
    """It may bring slots along: what is kept for the other one must not go in the second of its return."""
    node = parts_left(4, 5).train(free=0)
    node.tick(FULL_S - 1.0)
    node.others["b"].state(1, 6, 0, left="died")
    node.tick(5.0)
    node.others["b"].state(1, 6, 0)
    node.tick(FULL_S)
    assert voided(node) == set()
    node.tick(1.0)
    assert voided(node) == {4}


def test_what_a_node_told_before_its_link_went_counts_no_more() -> None:
    """P2: cut off, it obeyed another steward and released what it had told the first one of; that word came when the link was
    back (simulator, seed 426004435805 of that day)."""
    node = steward(RECORD)
    held = fact(5, 1, epoch=OLD)
    node.others["c"].tell_inventory(fact(5, 0, epoch=OLD), layouts=BOTH)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    node.others["b"].tell_inventory(held, turn=0)
    node.tick(2 * REPEAT_S)
    assert (node.level(5, epoch=OLD), node.machine.steward.sessions.live("b")) == (None, False), "said who knows when"
    node.others["b"].tell_inventory(held)
    assert node.level(5, epoch=OLD) == 0


def test_a_node_names_the_newest_question_of_its_steward() -> None:
    node = Member(record_of("abc"))
    node.hello("s1")
    for turn, named in ((2, 2), (1, 2)):  # one hello was overtaken by the other
        mark = node.mark
        node.hear("a", msg.OpenSession(EPOCH, "s1", turn))
        (answer,) = node.said(msg.Inventory, "a", mark)
        assert answer.turn == named
    node.hello("s2")
    assert node.said(msg.Inventory, "a")[-1].turn == 0, "another session"


def test_who_released_something_for_itself_does_not_hear_that_it_is_held() -> None:
    """P2: it had been its own steward for a while; then it told what it had left, and heard what had been certified before
    (simulator, seed 448859066102 of that day)."""
    node = steward(record_of("ab")).train().capture(7)
    node.protect(7)
    assert node.level(7) == 1
    node.hear("b", msg.OpenSession(EPOCH, "its own"))
    mark = node.mark
    node.others["b"].tell_inventory(fact(7, 1))
    said = [certificate.level for certificate in node.certificates("b", mark) if certificate.snapshot.step == 7]
    assert said and set(said) == {0}, "rank 1 is on node b alone, and rank 0 on this one"


def test_only_the_newest_certificate_names_what_was_released() -> None:
    """P3: an older one still did, after another steward had certified what it named anew (simulator, seed 5194560886)."""
    node = steward(record_of("ab")).train()
    for step in (7, 8):
        node.capture(step)
        node.protect(step)
    node.capture(9)
    assert (node.level(8), node.level(9)) == (1, 0)
    mark = node.mark
    node.others["b"].tell_inventory(fact(8, 0), fact(8, 1), fact(9, 1))
    said = node.certificates("b", mark)
    assert {certificate.snapshot.step for certificate in said} == {8, 9}
    assert {certificate.snapshot.step for certificate in said if certificate.releases} == {9}


# --- who may have the rest ------------------------------------------------------------------------------------------------
THREE = replace(BEFORE, ranks=tuple("abc"), nodes=(A, B, C))


def holders(node: Elect) -> list[str]:
    return [info.node for info in node.claim.holders]


def test_who_is_away_stays_a_holder_when_the_start_is_tried_again() -> None:
    """P3: node b could not be reached for a moment; the second try knew of the first one's members alone, so that the start after
    it did not ask node c, which had been cut off meanwhile (a reader's history)."""
    held = tuple(msg.HoldingFact(at(5, OLD), rank, 0, layout(rank, 3).layout_id) for rank in range(3))
    layouts = {layout(rank, 3).layout_id: layout(rank, 3).encoded for rank in range(3)}
    node = Elect(THREE).start(known=THREE)
    node.answer("b", *held, known=THREE, done=True, layouts=layouts)
    node.tick(3.0)
    node.claimed()
    first = node.claim
    assert holders(node) == ["c"]
    node.vote(1, "fetched", False, code="unreachable", reason="b's link was reset")
    node.tick(2.0)
    node.answer("b", *held, known=first, ran=THREE, never=True, layouts=layouts)
    node.tick(3.0)
    assert node.claim.number > first.number
    assert holders(node) == ["c"]


@pytest.mark.parametrize(
    ("certified", "stay"),
    [((), ["c"]), (((at(5, OLD), 0, False),), ["c"]), (((at(5, OLD), 1, False),), []), (((at(5, OLD), 0, True),), [])],
)
def test_who_is_away_at_one_start_after_the_other_stays_a_holder_until_something_newer_is_safe(
    certified: tuple[tuple[SnapshotId, int, bool], ...], stay: list[str]
) -> None:
    """P3: what the epoch before had continued was all that there was, and the record of the next one did not name node c (a
    reader's history). Nobody is asked for ever (P14)."""
    before = replace(BEFORE, ancestry=(at(4, 2),), holders=(C,))
    node = Elect(before).start(known=before)
    continued = tuple(replace(one, snapshot=at(4, 2)) for one in elect.BOTH)
    node.answer("b", *continued, *elect.BOTH, known=before, done=True, certified=certified)
    node.tick(4.0)
    assert holders(node) == stay


def test_a_member_of_the_epoch_in_which_it_became_safe_stays_a_holder_when_a_start_that_knew_nothing_came_between() -> None:
    other = replace(BEFORE, number=9, nonce="other", before=(-1, ()))
    node = Elect(THREE).start(known=other)
    node.answer("b", *elect.BOTH, known=other, ran=THREE, never=True, certified=((at(5, OLD), 1, False),))
    node.tick(4.0)
    assert holders(node) == ["c"]


def heard_by_each_other(*nodes: Node, seconds: float, since: dict[str, int]) -> None:
    """What they tell each other arrives at once. since: what each had said before they could be heard."""
    names = {node.name: node for node in nodes}
    for _ in range(round(seconds / TICK_S)):
        while any(since[node.name] < node.mark for node in nodes):
            for node in nodes:
                done, since[node.name] = node.done[since[node.name] :], node.mark
                for do in done:
                    if isinstance(do, ins.Send) and do.to != node.name and do.to in names:
                        names[do.to].hear(node.name, do.message)
        for node in nodes:
            node.tick()


def test_what_the_job_continued_is_not_released_for_what_it_left_behind() -> None:
    """P3: node c was cut off with a newer snapshot, and the job went back without it. Its inventory came before it heard of that:
    the newer one was certified, the continued one released for it, and then the newer one dropped (a reader's history)."""
    policy = Policy(replicas=1, durable=False)
    a = Steward(record_of("aa", outside="c", ancestry=(at(50, OLD),)), policy)
    a.feed(*(ev.HoldingFound(1 + rank, at(50, OLD), rank, rank, not rank, layout(rank), ()) for rank in (0, 1)))
    a.feed(ev.NodeDown("c"))
    a.tick(5.0)
    c = Node("c", record_of("ac", number=OLD, nonce="before"), policy, running=False)
    c.feed(*(ev.HoldingFound(11 + rank, at(60, OLD), rank, 1 - rank, bool(rank), layout(rank), ()) for rank in (0, 1)))
    c.feed(ev.NodeDown("a"))
    c.tick(5.0)
    since = {"a": a.mark, "c": c.mark}
    a.feed(ev.NodeUp("c"))
    c.feed(ev.NodeUp("a"))
    heard_by_each_other(a, c, seconds=10.0, since=since)
    assert {slot.fact.snapshot for slot in a.machine.slots.holdings() if slot.fact} == {at(50, OLD)}
    assert not list(c.machine.slots.holdings()), "it belongs to no branch any more"


def test_nor_where_both_are_protected() -> None:
    node = steward(record_of("ab", outside="cd", ancestry=(at(50, OLD),)), replicas=1)
    node.feed(*(ev.HoldingFound(1 + rank, at(50, OLD), rank, rank, not rank, layout(rank), ()) for rank in (0, 1)))
    node.feed(ev.NodeDown("c"), ev.NodeDown("d"))
    node.others["b"].tell_inventory(fact(50, 1, epoch=OLD), fact(50, 0, 1, epoch=OLD), layouts=BOTH)
    node.tick(2 * REPEAT_S)
    assert node.level(50, epoch=OLD) == 1
    node.feed(ev.NodeUp("c"), ev.NodeUp("d"))
    for name in "cd":
        node.others[name].tell_inventory(fact(60, 0, epoch=OLD), fact(60, 1, epoch=OLD), done=False)
    node.tick(30.0)
    assert (released(node), voided(node)) == (set(), set())
