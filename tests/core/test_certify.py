"""Certificates at one steward: what is certified, when it is void, what is released and what stays (P2, P3, P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine import view
from ckptd.core.protocol.machine.steward.certify import REPEAT_S
from ckptd.core.state_map.agreement import TENSORS, object_name
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, REPLICA
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.certificates import BOTH, BOTH_HELD, OLD, OLD_ONES, released, released_since, steward
from tests.core.machines import EPOCH, Member, Steward, at, fact, layout, only, record_of


# --- levels -----------------------------------------------------------------------------------------------------------
def test_the_level_is_that_of_the_slice_with_the_fewest_holders() -> None:
    node = steward().train().capture(7, 0)
    assert node.level(7) is None, "one rank is not a snapshot"
    node.capture(7, 1)
    assert node.level(7) == 0
    node.copy(7, 0, to="b")
    assert node.level(7) == 0, "rank 1 is on node b alone"
    node.copy(7, 1, to="a")
    assert (node.level(7), node.level(7, to="a")) == (1, 1)


def test_a_copy_in_the_same_domain_protects_from_nothing() -> None:
    record = record_of("abc")
    nodes = tuple(replace(node, domain="rack" if node.node in "ab" else "other") for node in record.nodes)
    node = steward(replace(record, nodes=nodes)).train().capture(7).protect(7)
    assert node.level(7) == 0, "rank 0 and its replica lie in one rack"
    node.copy(7, 0, to="c")
    assert node.level(7) == 1


def test_more_copies_than_the_policy_wants_are_not_promised() -> None:
    node = steward(replicas=0).train().capture(7).protect(7)
    assert (node.level(7), {c.wanted for c in node.certificates()}) == (0, {0})


def test_more_than_the_nodes_can_give_is_not_wanted() -> None:
    node = steward(replicas=2).train().capture(7)
    assert {c.wanted for c in node.certificates()} == {1}


def test_nothing_is_certified_before_everybody_has_told_what_it_holds() -> None:
    """P3: what is not known yet would be taken for lost."""
    node = steward(record_of("ab", outside="c"), steward_timeout_s=3.0)
    node.others["b"].tell_inventory(*BOTH_HELD, layouts=BOTH)
    assert node.level(7) is None
    node.tick(2.0)
    node.others["b"].held(BOTH_HELD[0])
    assert node.level(7) is None
    node.tick(1.5)
    node.others["b"].held(BOTH_HELD[0])
    assert node.level(7) == 0, "who was silent for long does not hold up the others"


def test_whoever_is_known_to_be_down_is_not_waited_for() -> None:
    node = steward(record_of("ab", outside="c"))
    node.others["b"].tell_inventory(*BOTH_HELD, layouts=BOTH)
    node.feed(ev.NodeDown("c"))
    assert node.level(7) == 0


def test_a_level_falls_with_the_node_that_held_a_copy() -> None:
    node = steward().train().capture(7).protect(7)
    node.feed(ev.NodeDown("b"))
    assert node.level(7, to="a") == 0, "rank 1 is held by node a alone now (P2)"


def test_copies_of_a_lost_node_do_not_count_when_it_is_back_until_it_has_told() -> None:
    """It may be another process, without memory (P2)."""
    node = steward().train().capture(7).protect(7)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    assert node.level(7, to="a") == 0
    node.tick(1.0)
    node.others["b"].tell_inventory(fact(7, 1), fact(7, 0, 1))
    assert node.level(7, to="a") == 1


def test_a_node_that_begins_anew_has_what_it_says_and_nothing_more() -> None:
    node = steward().train().capture(7).protect(7)
    node.tick(1.0)
    node.hear("b", msg.Inventory("", node.record, ()))  # it registers: it knows of no session
    assert node.level(7, to="a") == 1, "nothing is said before it has told"
    node.others["b"].tell_inventory()
    assert node.level(7) == 0


def test_a_damaged_copy_does_not_count() -> None:
    node = steward().train().capture(7).protect(7)
    node.others["b"].held(fact(7, 0, 1), lost=True)
    assert node.level(7) == 0


def test_a_session_that_begins_is_told_what_holds() -> None:
    node = steward(record_of("ab", outside="c"), replicas=0).train()
    node.feed(ev.NodeDown("c"))
    node.capture(7).capture(8)
    node.feed(ev.NodeUp("c"))
    node.tick()
    mark = node.mark
    node.others["c"].tell_inventory()
    assert [(c.snapshot.step, c.level) for c in node.certificates("c", mark)] == [(8, 0)], (
        "step 7 was released"
    )
    assert {c.session for c in node.certificates("c", mark)} == {node.others["c"].session}


# --- voids ------------------------------------------------------------------------------------------------------------
def alarms(node: Steward, kind: str) -> list[str]:
    return [do.text for do in only(node.done, ins.Alarm) if do.kind == kind]


def holding(sharing: str, *digests: bytes) -> Steward:
    """Node b holds what both ranks have of tensor w, each with one of these sums of it, and of an object of its own."""
    held, layouts = [], []
    for rank, digest in enumerate(digests):
        layouts.append(build_layout(rank, 2, [LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", sharing, 1)], 64))
        sums = ((TENSORS, digest), (object_name("rng"), bytes([rank]) * 16))
        held.append(msg.HoldingFact(at(7), rank, 0, layouts[rank].layout_id, sums))
    node = steward()
    node.others["b"].tell_inventory(*held, layouts=layouts)
    return node


def test_what_each_rank_has_for_itself_is_known_where_the_steward_is() -> None:
    """D7: by the sums of each snapshot. Nobody is sent it, and nobody else knows it."""
    node = holding(MAYBE, b"x" * 16, b"y" * 16)
    assert node.level(7) == 0
    assert view.own_values(node.machine, at(7)) == ("o:rng", "t:w")
    assert view.own_values(holding(MAYBE, b"x" * 16, b"x" * 16).machine, at(7)) == ("o:rng",)
    assert view.own_values(node.machine, at(8)) == ()
    member = Member(record_of())
    member.certify(1, 7, 0)
    assert view.own_values(member.machine, at(7)) == ()


def test_copies_that_must_be_equal_and_differ_void_the_snapshot() -> None:
    node = holding(REPLICA, b"x" * 16, b"y" * 16)
    assert len(alarms(node, "silent_corruption")) == 1
    void = node.said(msg.Void, "b")[0]
    assert (void.snapshot, void.grant, void.session) == (at(7), 0, node.others["b"].session)
    assert void.reason in alarms(node, "silent_corruption")[0]
    assert not [c for c in node.certificates() if c.level >= 0]


def test_a_snapshot_of_which_a_part_is_nowhere_is_void() -> None:
    """P14: the parts that are left would keep their slots for ever."""
    node = steward().greet()
    node.hear("a", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in BOTH}))
    node.others["b"].held(fact(7, 1))
    void = node.said(msg.Void, "b")[0]
    assert (void.grant, void.snapshot) == (0, at(7))
    assert node.level(7) is None


@pytest.mark.parametrize("epoch", [EPOCH, OLD])
def test_a_part_that_went_before_its_layout_was_read_is_nowhere_too(epoch: int) -> None:
    """P14: nobody can read any more what node c had of it, and what the others have would keep its slots for ever."""
    node = steward(record_of("abc"))
    rest = fact(7, 1, epoch=epoch, world=3)
    node.others["b"].tell_inventory(rest, layouts=[layout(1, 3)])
    node.others["c"].tell_inventory(fact(7, 2, epoch=epoch, world=3))
    assert node.said(msg.LayoutRequest, "c") == node.said(msg.Void) == []
    node.others["c"].tell_inventory()
    node.tick()
    assert {void.snapshot for void in node.said(msg.Void, "b")} == {rest.snapshot}


def test_a_snapshot_whose_every_copy_is_lost_is_forgotten() -> None:
    node = steward().train().capture(7)
    node.others["b"].held(fact(7, 1), lost=True)
    assert node.level(7) == -1
    for slot in [slot.id for slot in node.machine.slots.holdings()]:
        node.feed(ev.SlotDamaged(slot, "x"))
    assert node.machine.steward.table.states == {}


def test_a_part_under_a_grant_that_stands_is_waited_for() -> None:
    node = steward().train().capture(7, 1)
    node.tick(5.0)
    assert node.said(msg.Void) == []


def test_a_copy_may_be_faster_than_its_ranks_own_word() -> None:
    """P2: it was void before anyone had said that it was captured, and certified when they did (simulator, seed 3413)."""
    node = steward(record_of("abc")).train()
    told = [layout(rank, 3) for rank in range(3)]
    node.hear("c", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in told}))
    node.copy(7, 1, to="c")
    assert [void for void in node.said(msg.Void) if void.snapshot] == []
    node.capture(7)
    assert node.level(7) == 0


def test_a_copy_is_void_when_no_grant_can_bring_the_rest() -> None:
    node = steward(record_of("abc")).train().capture(8)
    told = [layout(rank, 3) for rank in range(3)]
    node.hear("c", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in told}))
    node.copy(6, 1, to="c")
    assert {void.snapshot for void in node.said(msg.Void, "c")} == {at(6)}, "of a step before all that are granted"
    node.copy(7, 1, to="c")
    assert {void.snapshot for void in node.said(msg.Void, "c")} == {at(6)}, "ranks may still seal it under its grant"
    node.others["c"].held(fact(7, 1, 1, grant=99, world=3))
    assert {void.snapshot for void in node.said(msg.Void, "c")} == {at(6), at(7, grant=99)}


def test_a_part_whose_node_is_away_is_waited_for() -> None:
    node = steward().train().capture(7)
    node.feed(ev.NodeDown("b"))
    node.tick(1.0)
    assert not [v for v in node.said(msg.Void) if v.snapshot == at(7)], "node b may come back with it"
    assert node.level(7, to="a") == -1, "reported as fallen (P2)"


def test_the_last_copy_of_all_may_be_lost_at_once() -> None:
    node = steward(record_of("a"), replicas=0)
    node.machine.steward._done = node.machine.ctx.done = True  # else another node's inventory would say so
    node.train(-1).capture(2)
    (slot,) = [slot.id for slot in node.machine.slots.holdings()]
    node.feed(ev.SlotDamaged(slot, "x"))
    assert node.machine.steward.table.states == {}


def test_nothing_that_was_certified_is_void_before_storage_has_said_whether_it_has_it() -> None:
    """P2: the steward's daemon was killed behind its commit; ranks heard that the checkpoint they waited for is void."""
    node = steward(durable=True)
    node.others["b"].tell_inventory(fact(7, 1), fact(8, 1), layouts=BOTH, certified=((at(7), 0, False),))
    node.tick(3.0)
    assert {void.snapshot for void in node.said(msg.Void, "b")} == {at(8)}, "nobody certified it, so nobody wrote it"
    node.feed(ev.DurableRead("", True, node.record, ()))
    node.tick(1.0)
    assert {void.snapshot for void in node.said(msg.Void, "b")} == {at(7), at(8)}
    node = steward(durable=True)
    node.others["b"].tell_inventory(fact(7, 1), layouts=BOTH, certified=((at(7), 0, False),))
    node.feed(ev.DurableRead("", True, node.record, (at(7),)))
    node.tick(3.0)
    assert node.said(msg.Void, "b") == []


def test_a_durable_one_is_not_void_because_memory_lost_a_part() -> None:
    node = steward().greet()
    node.machine.steward.table.mark_durable([at(7)])
    node.others["b"].held(fact(7, 1))
    assert node.said(msg.Void) == []


def test_a_durable_one_that_lost_a_part_goes_although_nothing_certified_can_name_it() -> None:
    """P14: it went from the books, and whoever held the rest of it never heard: with two own slots it had none left."""
    node = steward()
    node.machine.steward.table.mark_durable([at(7), at(6)])
    node.others["b"].tell_inventory(fact(6, 1), fact(7, 1), layouts=BOTH)
    node.tick(REPEAT_S + 0.5)
    (said,) = {(c.snapshot, c.level, c.durable, c.releases) for c in node.certificates("b") if c.releases}
    assert said == (at(7), -1, True, (at(6), at(7)))
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert released_since(node, mark) == {6, 7}, "said again: it may have been lost"
    node.train(step=10).capture(11)
    mark = node.mark
    node.tick(2 * REPEAT_S)
    naming = {c.snapshot for c in node.certificates("b", mark) if c.releases}
    assert naming == {at(11, grant=node.granted(11))}, "now there is one that names them"
    assert released_since(node, mark) == {6, 7}


def test_what_was_released_and_is_not_durable_is_only_named_by_what_took_its_place() -> None:
    """P3: a node that missed it may have the last copy of all."""
    node = steward().train().capture(7).protect(7).capture(8).protect(8)
    assert released(node) == {7}
    for holding in (fact(8, 0, 1), fact(8, 1)):
        node.others["b"].held(holding, lost=True)
    node.feed(*(ev.SlotDamaged(slot.id, "x") for slot in list(node.machine.slots.holdings())))
    assert not any(facts.level >= 0 for facts in node.machine.steward.table.states.values())
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert released_since(node, mark) == set()


def test_a_part_without_its_layout_is_not_judged() -> None:
    """A steward that has just begun certified whole snapshots at -1 until their layouts arrived (P2)."""
    node = steward()
    node.others["b"].tell_inventory(*BOTH_HELD, certified=((at(7), 1, False),))
    assert (node.certificates(), node.said(msg.Void)) == ([], [])
    node.tick()
    asked = [request.layout_id for request in node.said(msg.LayoutRequest, "b")]
    assert sorted(asked) == sorted(one.layout_id for one in BOTH)
    node.tick()
    assert len(node.said(msg.LayoutRequest, "b")) == 2, "not before RESEND_S"
    node.tick(0.5)
    assert len(node.said(msg.LayoutRequest, "b")) == 4
    node.hear("b", msg.LayoutReply(EPOCH, {"": b"no layout", **{one.layout_id: one.encoded for one in BOTH}}))
    assert node.level(7) == 0
    node.tick(1.0)
    assert len(node.said(msg.LayoutRequest, "b")) == 4


@pytest.mark.parametrize("level", [-1, 1])
def test_what_was_certified_and_is_not_whole_is_reported_as_fallen(level: int) -> None:
    """What nobody was ever told of is not spoken of."""
    node = steward(record_of("abc"))
    three = [layout(rank, 3) for rank in range(3)]
    node.others["c"].tell_inventory()
    node.feed(ev.NodeDown("c"))
    node.others["b"].tell_inventory(fact(7, 1, world=3), certified=((at(7), level, False),), layouts=three)
    assert node.level(7) == (-1 if level >= 0 else None)


def test_leftovers_of_an_earlier_epoch_are_void_once_the_new_one_runs() -> None:
    node = steward(record_of("ab", ancestry=(at(5, OLD),)))
    node.others["b"].tell_inventory(OLD_ONES[0][1], layouts=BOTH)
    assert [v.snapshot for v in node.said(msg.Void, "b")] == [at(4, OLD)]


def test_leftovers_that_were_to_be_kept_are_void_when_nobody_has_the_rest() -> None:
    """P14: there is nothing left to flush, and they would keep their slots for ever."""
    node = steward(record_of("ab", ancestry=(at(5, OLD),)), durable=True)
    node.feed(ev.DurableRead("", True, node.record, ()))
    node.others["b"].tell_inventory(fact(4, 1, epoch=OLD, keep=True), layouts=BOTH)
    assert [v.snapshot for v in node.said(msg.Void, "b")] == [at(4, OLD)]


def test_leftovers_that_are_durable_go_without_being_void() -> None:
    """The next start read it from storage, and its ranks were told of a level after it had been void (simulator, seeds
    2671575901 and 4897527247 of that day)."""
    node = steward(record_of("ab", ancestry=(at(4, OLD),)))
    node.machine.steward.table.mark_durable([at(4, OLD)])
    node.others["b"].tell_inventory(OLD_ONES[0][1], layouts=BOTH)
    node.tick(REPEAT_S + 1.0)
    assert (node.said(msg.Void), released(node)) == ([], {4})


def test_a_steward_of_an_older_epoch_gives_up_nothing_of_a_newer_one() -> None:
    """Its record could not be written down, the disk being full; the daemon came back with the memory of it, cut off from who
    would have told: it took office, and the newer epoch's part was void to it (P3; a reader's history)."""
    node = steward(record_of("ab"), running=False)
    node.feed(ev.NodeDown("b"))
    node.feed(ev.HoldingFound(8, at(3), 0, 0, True, layout(0), ()))
    node.feed(ev.HoldingFound(9, at(9, EPOCH + 2), 0, 0, True, layout(0), ()))
    node.tick(20.0)
    assert (only(node.done, ins.FreeSlot), node.said(msg.Void)) == ([], [])


def test_leftovers_that_are_durable_are_kept_for_a_member_who_is_away() -> None:
    node = steward(record_of("ab", ancestry=(at(4, OLD),), outside="c"))
    node.machine.steward.table.mark_durable([at(4, OLD)])
    node.feed(ev.NodeDown("c"))
    node.others["b"].tell_inventory(OLD_ONES[0][1], layouts=BOTH)
    node.tick(REPEAT_S + 1.0)
    assert (node.said(msg.Void), released(node)) == ([], set())


def test_leftovers_are_kept_until_the_new_epoch_runs() -> None:
    """Its restore may still be called off."""
    node = steward(record_of("ab", ancestry=(at(5, OLD),)), running=False)
    node.others["b"].tell_inventory(OLD_ONES[0][1], layouts=BOTH, done=False)
    assert node.said(msg.Void) == []


def test_an_ancestor_that_is_whole_is_kept() -> None:
    node = steward(record_of("ab", ancestry=(at(5, OLD),)))
    node.others["b"].tell_inventory(*OLD_ONES[1], layouts=BOTH)
    assert (node.level(5, epoch=OLD), node.said(msg.Void, "b")) == (0, [])


def test_what_a_trainer_gives_back_says_that_its_epoch_runs() -> None:
    """P14: a daemon without a keeper was started again; the steward had heard that its epoch does not run, and granted nothing any
    more (a trainer's author)."""
    node = steward(running=False)
    mark = node.mark
    node.feed(ev.HoldingFound(8, at(7), 0, 0, True, layout(0), ()))
    assert node.said(msg.Inventory, "a", mark)[-1].done


def test_of_a_lineage_left_behind_only_the_best_one_is_kept() -> None:
    """A declared fresh start: until the new lineage has something of its own the old one is not thrown away."""
    node = steward()
    node.others["b"].tell_inventory(*OLD_ONES[1], layouts=BOTH)
    node.others["b"].tell_inventory(*OLD_ONES[0], *OLD_ONES[1])
    assert {v.snapshot for v in node.said(msg.Void, "b")} == {at(4, OLD)}
    assert node.level(5, epoch=OLD) == 0
    node.train().capture(7)
    assert released(node) == {5}, "now there is something of its own"


def test_of_a_lineage_left_behind_what_is_durable_goes_without_being_void() -> None:
    """A later start may ask for it."""
    node = steward()
    node.machine.steward.table.mark_durable([at(4, OLD)])
    node.others["b"].tell_inventory(*OLD_ONES[0], *OLD_ONES[1], layouts=BOTH)
    node.tick(REPEAT_S + 1.0)
    assert (node.said(msg.Void), released(node), node.level(5, epoch=OLD)) == ([], {4}, 0)


def test_which_one_of_a_lineage_left_behind_is_the_best_is_asked_whenever_one_of_them_is_weighed() -> None:
    """P14: the layouts of the better one came last. The other was not looked at again, and kept one of two own slots."""
    node, three = steward(), [layout(rank, 3) for rank in range(3)]
    other = node.others["b"]
    other.tell_inventory(*(fact(4, rank, epoch=OLD, world=3) for rank in range(3)), *OLD_ONES[1], layouts=three)
    assert (node.level(4, epoch=OLD), node.said(msg.Void)) == (0, [])
    node.hear("b", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in BOTH}))
    node.tick()
    assert {v.snapshot for v in node.said(msg.Void, "b")} == {at(4, OLD)}
    assert node.level(5, epoch=OLD) == 0


def test_of_a_lineage_left_behind_the_newer_one_goes_when_an_older_one_turns_out_to_be_better() -> None:
    """What becomes of the newer one is asked again when the older one has been weighed, which is after it."""
    node, three = steward(record_of("abc")), [layout(rank, 3) for rank in range(3)]
    newer = (fact(5, rank, epoch=OLD, world=3) for rank in range(3))
    node.others["b"].tell_inventory(*OLD_ONES[0], *newer, layouts=three)
    node.others["c"].tell_inventory(*OLD_ONES[0])
    assert (node.level(5, epoch=OLD), node.said(msg.Void)) == (0, [])
    node.hear("b", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in BOTH}))
    assert {v.snapshot for v in node.said(msg.Void, "b")} == {at(5, OLD)}
    assert node.level(4, epoch=OLD) == 1


def test_what_is_void_stands_in_for_nothing_that_was_left_behind() -> None:
    node, three = steward(), [layout(rank, 3) for rank in range(3)]
    void = [fact(5, rank, epoch=OLD, world=3) for rank in range(3)]
    node.others["b"].tell_inventory(*OLD_ONES[0], *void, layouts=three)
    node.machine.steward.table.states[at(5, OLD)].become_void("left_behind", "why")
    node.hear("b", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in BOTH}))
    assert node.level(4, epoch=OLD) == 0
    assert at(4, OLD) not in {v.snapshot for v in node.said(msg.Void, "b")}


# --- degraded ---------------------------------------------------------------------------------------------------------
def test_a_fallen_level_is_alarmed_once_and_again_after_it_had_risen() -> None:
    node = steward(record_of("abc")).train().capture(7)
    for rank in range(3):
        for to in "bc":
            node.copy(7, rank, to)
    assert (node.level(7), alarms(node, "degraded")) == (1, []), "a level that is still rising is no alarm"
    node.copy(7, 1, "a")
    node.feed(ev.NodeDown("c"))
    node.feed(ev.NodeDown("b"))
    assert len(alarms(node, "degraded")) == 1
    assert "step 7 survives the loss of 0 domains, 1 are wanted; gone: c" in alarms(node, "degraded")[0]
    node.machine.steward.table.mark_durable([at(7)])
    node.tick(1.0)
    assert len(alarms(node, "degraded")) == 1, "another certificate, and no news"
    node.feed(ev.NodeUp("c"))
    node.tick(1.0)
    node.others["c"].tell_inventory(*(fact(7, rank, world=3) for rank in range(3)))
    node.feed(ev.NodeUp("b"))
    node.tick(1.0)
    node.others["b"].tell_inventory(*(fact(7, rank, world=3) for rank in range(3)))
    assert node.level(7) == 1
    node.feed(ev.NodeDown("c"))
    assert len(alarms(node, "degraded")) == 2


def test_a_shared_slice_that_lost_a_capture_gets_one_more_copy() -> None:
    """Every rank has its copies, but a slice that ranks captured by contract lies in too few domains."""
    item = LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", REPLICA, 0)
    node = steward(record_of("abc"))
    layouts = [build_layout(rank, 3, [item] if rank < 2 else [], 64) for rank in range(3)]
    every = [msg.HoldingFact(at(7), rank, 0, layouts[rank].layout_id) for rank in range(3)]
    node.others["c"].tell_inventory(*(replace(one, tier=1) for one in every[:2]), every[2], layouts=layouts)
    node.others["b"].tell_inventory(*every)
    assert node.level(7) == 0, "both captures of w lie on node b; node c has only the objects of these ranks"
    node.tick(REPEAT_S + 0.5)
    b = node.others["b"].session
    assert set(node.said(msg.Holders)) == {msg.Holders(EPOCH, b, at(7), 0, (("b", 0),), 0)}
