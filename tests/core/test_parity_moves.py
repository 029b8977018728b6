"""Parity when nodes leave, and when degradation has left its level (D8, P8, P3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.context import MEMBER_AWAY_S
from ckptd.core.protocol.machine.steward.certify import IDLE_S, REPEAT_S
from ckptd.core.protocol.machine.steward.draining import AGAIN_S, FOLLOWS_S
from ckptd.core.redundancy.degradation import DOWN_S, UP_S
from ckptd.core.redundancy.linear import linear_bytes
from ckptd.core.redundancy.parity_sets import Member, ParitySet, ParityShard
from ckptd.core.redundancy.policies import Parity
from tests.core.certificates import OLD, released
from tests.core.machines import EPOCH, Steward, at, fact, layout, only, record_of
from tests.core.parity_rig import (
    PATIENCE_S,
    XOR,
    leaves,
    lose,
    make,
    ordered,
    orders,
    protected,
    shard_fact,
    steward,
)


def protected_by(
    ranks: str, spare: str, parity: Parity, shards: dict[int, str], copies: dict[int, str], rack: str = ""
) -> Steward:
    """Step 7, with these shards and copies: position or rank -> nodes."""
    node = steward(ranks, spare=spare, parity=parity, rack=rack).capture(7)
    parity_set = orders(node)[0][1].shard.parity_set
    for at_, names in shards.items():
        for name in names:
            make(node, name, ParityShard(parity_set, at_))
    for rank, names in copies.items():
        for name in names:
            node.copy(7, rank, name)
    node.tick()
    return node


# --- nodes that leave -------------------------------------------------------------------------------------------------
def remainder(node: Steward, name: str, since: int) -> msg.Remainder:
    return node.said(msg.Remainder, name, since)[-1]


def left_while_copied(node: Steward, name: str, to: str) -> list[int]:
    """So many slots this node, which leaves, is told are left, look by look; what copies are asked for come to be on another."""
    mark, left = leaves(node, name), []
    for _ in range(3):
        node.tick(AGAIN_S)
        left.append(remainder(node, name, mark).slots)
        for rank in {ask.rank for asked in "abcd" for ask in node.said(msg.Holders, asked, mark)}:
            node.others[to].held(fact(7, rank, world=3))
    return left


def test_what_a_leaving_node_holds_of_a_parity_set_moves_to_a_spare() -> None:
    node = protected(steward())
    mark = leaves(node, "c")
    node.tick(1.0)
    assert ordered(node, mark) == {("d", 2, True), ("d", 2, False)}
    assert all("c" in {s.node for s in order.sources} for _, order in orders(node, mark)), "it is the best source"
    left = remainder(node, "c", mark)
    assert (left.slots, left.stuck) == (2, 0)
    assert left.falls == ((at(7), 1, 0),)
    node.others["d"].held(fact(7, 2, 1, world=3))
    (shard,) = [order.shard for to, order in orders(node, mark) if not order.data]
    make(node, "d", shard)
    node.tick(AGAIN_S)
    left = remainder(node, "c", mark)
    assert (left.slots, left.falls) == (0, ())


def test_with_nowhere_to_go_it_is_stuck_and_said() -> None:
    node = protected(steward(spare=""))
    mark = leaves(node, "c")
    node.tick(1.0)
    assert ordered(node, mark) == set()
    left = remainder(node, "c", mark)
    assert left.slots == left.stuck == 2
    assert left.reasons == ("step 7, position 2 of parity group 0: no failure domain is left that could take it",)


def test_data_that_came_to_live_beside_another_position_is_copied_to_a_domain_of_its_own() -> None:
    """P3: each part had a place without node c, rank 2's data in the rack of node b; the loss of that would have cost two
    positions, and c was told that nothing is left (simulator, seed 900249)."""
    node = protected(steward(spare="def", rack="be"))
    node.others["e"].held(fact(7, 2, world=3))
    (shard,) = [order.shard for to, order in orders(node) if to == "c"]
    make(node, "d", shard)
    mark = leaves(node, "c")
    node.tick(1.0)
    left = remainder(node, "c", mark)
    assert (left.slots, left.falls) == (1, ((at(7), 1, 0),))
    assert {(ask.rank, ask.nodes) for ask in node.said(msg.Holders, "c", mark)} == {(2, (("e", 0),))}
    node.others["f"].held(fact(7, 2, world=3))
    node.tick(AGAIN_S)
    assert remainder(node, "c", mark).slots == 0
    mark = leaves(node, "f")
    node.tick(1.0)
    left = [remainder(node, name, mark).slots for name in "cf"]
    assert left == [1, 1], "each could go alone (a reader's history)"


def test_parity_that_came_to_live_beside_another_position_is_made_up_for_by_copies() -> None:
    """P14: node c has nothing else, and no position lacks anything: it would have waited for ever (a reader's history)."""
    node = protected(steward(spare="def", rack="be"))
    (shard,) = [order.shard for to, order in orders(node) if to == "c"]
    make(node, "e", shard)
    node.others["d"].held(fact(7, 2, world=3))
    left = left_while_copied(node, "c", to="f")
    assert left[0] > 0 == left[-1], left


def test_copies_that_stand_in_for_parity_not_made_yet_are_needed() -> None:
    """P3: each rank's data had a copy elsewhere, those of rank 1 on a node that leaves (simulator, seed 71000149)."""
    node = steward(spare="de").capture(7)
    for rank, name in enumerate("dcd"):
        node.others[name].held(fact(7, rank, 1, world=3))
    left = left_while_copied(node, "c", to="e")
    assert (node.level(7), left[0] > 0, left[-1]) == (1, True, 0), left


def test_who_holds_the_parity_of_data_that_no_slot_has_is_not_told_to_go() -> None:
    """P3: no copy of it can be asked for, all other data has its copies, and each position a place: in one rack."""
    node = protected(steward("abcd", spare="efgh", parity=Parity(2, 2), rack="bea"))
    (shard,) = [order.shard for to, order in orders(node) if to == "c"]
    for name in "eg":
        make(node, name, shard)
    node.others["c"].held(shard_fact(shard), lost=True)
    for name in "fh":
        for rank in (0, 1, 2):
            node.others[name].held(fact(7, rank, world=4))
    lose(node, "d")
    node.tick(PATIENCE_S + MEMBER_AWAY_S + 1.0)
    mark = leaves(node, "g")
    node.tick(1.0)
    assert remainder(node, "g", mark).slots > 0


def test_each_leaving_node_that_parity_leans_on_is_told_also_beside_one_whose_copies_are_needed() -> None:
    """P3: rank 1 is in no slot any more; without node c that costs a level, and without d rank 0 does (a reader's history)."""
    node = protected_by("abc", "def", Parity(2, 2), {0: "a", 2: "cf"}, {0: "df", 2: "ef"})
    for rank, name in ((2, "c"), (1, "b")):
        node.others[name].held(fact(7, rank, world=3), lost=True)
        node.tick()
    node.copy(7, 2, "a")
    node.tick()
    mark, _ = (leaves(node, name) for name in "cd")
    node.tick(1.0)
    assert node.machine.steward.table.states[at(7)].level == 2
    assert [min(said.slots for said in node.said(msg.Remainder, name, mark)) > 0 for name in "cd"] == [True, True]


def test_data_of_which_no_slot_is_left_and_that_no_domain_could_take_is_stuck_and_said() -> None:
    """P14: nothing was asked of anybody, and the drain waited for ever (a reader's history)."""
    node = protected_by("abf", "cd", XOR, {0: "ac", 2: "fd"}, {0: "f", 2: "d"}, rack="ad")
    lose(node, "b")
    node.tick(PATIENCE_S + MEMBER_AWAY_S + 1.0)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    left = remainder(node, "c", mark)
    assert (left.slots, left.stuck) == (1, 1)
    assert left.reasons == ("step 7, position 1 of parity group 0: no failure domain is left that could take it",)


def test_what_leaves_goes_to_several_nodes() -> None:
    """Of 512 nodes, 16 parts of ten that left all went to one, and its memory had to take them (a reader's measurement)."""
    node = protected(steward("abcdef", spare="gh"))
    mark, _ = (leaves(node, name) for name in "cf")
    node.tick(AGAIN_S)
    assert {(to, order.shard.parity_set.number) for to, order in orders(node, mark)} in ({("g", 0), ("h", 1)}, {("h", 0), ("g", 1)})


def test_who_has_no_memory_for_what_leaves_is_asked_last() -> None:
    """P14: it was asked for ever, and the drain waited beside a node that has room (a reader's history)."""
    node = protected(steward(spare="de"))
    mark = leaves(node, "c")
    assert {to for to, _, _ in ordered(node, mark)} == {"d"}
    node.others["d"].tell(msg.Shortage(EPOCH, True, "no memory"))
    mark = node.mark
    node.tick(AGAIN_S)
    assert {to for to, _, _ in ordered(node, mark)} == {"e"}
    node.others["d"].tell(msg.Shortage(EPOCH, False, ""))
    mark = node.mark
    node.tick(AGAIN_S)
    assert {to for to, _, _ in ordered(node, mark)} == {"e"}, "where it is being made"


def test_what_has_no_parity_yet_is_not_made_of_parity_elsewhere() -> None:
    node = steward().capture(7)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert {what for what in ordered(node, mark) if what[2]} == set()


def test_with_nowhere_to_go_it_gets_the_part_that_it_lacks_and_not_the_data_that_it_has() -> None:
    node = steward(spare="").capture(7)
    for to, order in orders(node):
        if to != "c":
            make(node, to, order.shard)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert ordered(node, mark) == {("c", 2, False)}


@pytest.mark.parametrize("part_too", [False, True])
def test_what_a_leaving_node_lost_to_damage_is_made_there_where_nobody_else_can_take_it(part_too: bool) -> None:
    """P14: the newest stayed below an older one, neither of the two could go, and with two slots nothing was captured any more
    until the drain was ended (simulator, seed 552 of its day)."""
    node = protected(steward(spare=""))
    leaves(node, "c")
    node.tick(AGAIN_S)
    protected(node, 8)
    assert (node.level(8), released(node)) == (1, set()), "it leans on node c"
    (shard,) = [order.shard for to, order in orders(node, step=8) if to == "c"]
    node.others["c"].held(fact(8, 2, world=3), lost=True)
    if part_too:
        node.others["c"].held(shard_fact(shard, 8), lost=True)
    assert node.level(8) == 0
    mark = node.mark
    node.tick(PATIENCE_S + REPEAT_S)
    assert ("c", 2, True) in ordered(node, mark, 8)
    node.others["c"].held(fact(8, 2, 1, world=3))
    if part_too:
        node.tick(REPEAT_S)
        make(node, "c", shard, 8)
    node.tick(FOLLOWS_S + 1.0)
    assert (node.level(8), released(node)) == (1, {7})


def test_who_stays_after_all_holds_no_release_back() -> None:
    """P14: node c was to go and stayed before anybody had been told, and the older one was kept for ever (simulator, seed 202611276
    of that day)."""
    node = protected(steward(spare=""))
    leaves(node, "c")
    protected(node, 8)
    assert (node.level(8), released(node)) == (1, set()), "it leans on node c"
    leaves(node, "c", False)
    assert released(node) == {7}


def test_where_all_that_could_take_it_leave_a_position_stays_together() -> None:
    node = steward("abc", "de").capture(7)
    node.others["e"].held(fact(7, 2, 1, world=3))
    leaves(node, "d")
    leaves(node, "e")
    mark = lose(node, "c")
    node.tick(AGAIN_S)
    assert {what for what in ordered(node, mark) if what[1] == 2} == {("e", 2, False)}


def test_a_leaving_node_gets_nothing_new_where_another_can_take_it() -> None:
    node = steward("abc", "de")
    leaves(node, "c")
    node.tick(1.0)
    node.capture(7)
    node.tick(1.0)
    assert ("c", 2, False) not in ordered(node)
    assert {to for to, position, _ in ordered(node) if position == 2} <= {"d", "e"}


@pytest.mark.parametrize(("spare", "to"), [("", "b"), ("d", "d")])
def test_what_moves_takes_no_place_of_another_position(spare: str, to: str) -> None:
    """In parity set 1 node c has no rank and, as yet, no parity: with another shard of the parity set it could never take its
    own."""
    node = steward("aabbc", spare)
    leaves(node, "b")
    node.tick(1.0)
    node.capture(7)
    node.tick(AGAIN_S)
    found = [(where, order.shard.position) for where, order in orders(node) if order.shard.parity_set.number == 1]
    assert set(found) == {("a", 0), (to, 1), ("c", 2)}


def test_what_moves_does_not_take_the_place_of_a_position_that_is_made_at_the_same_time() -> None:
    """P14: one node was asked for two shards of a parity set and makes one at most, so the snapshot was never protected."""
    node = steward("aabc", "d")  # parity set 1 has no rank at b and c
    leaves(node, "b")
    node.tick(1.0)
    node.capture(7)
    assert ordered(node) == {("a", 0, False), ("d", 1, False), ("c", 2, False)}


def test_a_copy_of_the_data_beside_another_position_does_not_bring_the_part_there() -> None:
    """P14: copies of what leaves were made while degradation had left parity; when it was back, c had the parts of b and not its
    own."""
    node = steward("abc", "")
    leaves(node, "b")
    node.tick(1.0)
    node.capture(7)
    node.others["c"].held(fact(7, 1, 1, world=3))
    mark = node.mark
    node.tick(AGAIN_S)
    assert ordered(node, mark) == {("a", 0, False), ("b", 1, False), ("c", 2, False)}
    for to, order in orders(node, mark):
        make(node, to, order.shard)
    node.tick(1.0)
    assert node.level(7) == 1


def test_a_copy_that_a_drain_asked_for_does_not_keep_the_position_of_its_node_from_being_made_anew() -> None:
    """P14: node c was to go and stays; a copy of its data lies on node b, beside which b's own position was never made again
    (simulator, seed 913938 of that day)."""
    node = protected(steward(spare=""))
    leaves(node, "c")
    node.tick(1.0)
    node.others["b"].held(fact(7, 2, 0, world=3))
    leaves(node, "c", False)
    mark = node.mark
    (shard,) = [order.shard for to, order in orders(node) if to == "b"]
    node.others["b"].held(fact(7, 1, world=3), lost=True)
    node.others["b"].held(shard_fact(shard), lost=True)
    node.tick(PATIENCE_S + REPEAT_S)
    assert ordered(node, mark) == {("b", 1, True)}
    node.others["b"].held(fact(7, 1, world=3))
    node.tick(REPEAT_S)
    assert ordered(node, mark) == {("b", 1, True), ("b", 1, False)}
    make(node, "b", shard)
    assert node.level(7) == 1


def test_parity_moves_although_degradation_has_left_it() -> None:
    node = protected(steward())
    node.others["b"].tell(msg.Shortage(EPOCH, True, "b: no memory"))
    node.tick(DOWN_S + 1.0)
    assert node.said(msg.DegradationChanged, "b")[-1].redundancy == "replicas=0"
    mark = node.mark
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()
    mark = leaves(node, "c")
    node.tick(1.0)
    assert ("d", 2, False) in ordered(node, mark)


@pytest.mark.parametrize("name", ["b", "c"])
def test_who_stays_after_all_is_not_moved(name: str) -> None:
    node = protected(steward())
    leaves(node, name)
    mark = leaves(node, name, False)
    node.tick(2 * AGAIN_S)
    assert ordered(node, mark) == set()


# --- degradation -------------------------------------------------------------------------------------------------------
def left(node: Steward) -> int:
    """Parity is left. Where that begins."""
    node.others["b"].tell(msg.Shortage(EPOCH, True, "b: no memory"))
    node.tick(DOWN_S - 1.0)
    while True:
        mark = node.mark
        if [do for do in only(node.tick(), ins.Alarm) if do.kind == "degradation"]:
            return mark
        assert node.now < 1000


def test_from_the_moment_its_level_is_left_no_parity_is_ordered() -> None:
    node = steward().capture(7)
    assert ordered(node)
    mark = left(node)
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()


def test_what_has_no_parity_gets_none_for_a_node_that_leaves_when_the_level_was_left() -> None:
    node = steward().capture(7)
    left(node)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()
    assert {asked.rank for asked in node.said(msg.Holders, "c", mark)} == {2}, "what only it holds is copied (P3)"


def test_what_has_lost_all_its_parity_is_copied_for_a_node_that_leaves_when_the_level_was_left() -> None:
    node = steward().capture(7)
    shards = {to: order.shard for to, order in orders(node) if to != "a"}
    for to, shard in shards.items():
        make(node, to, shard)
    left(node)
    for to, shard in shards.items():
        node.others[to].held(shard_fact(shard), lost=True)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert {asked.rank for asked in node.said(msg.Holders, "c", mark)} == {2}


def copies_again() -> Steward:
    """A level of copies, once more; step 7 has parity of the time in which memory was short."""
    node = Steward(record_of("abcd"), Policy(replicas=1, durable=False, steward_timeout_s=PATIENCE_S)).train()
    node.others["b"].tell(msg.Shortage(EPOCH, True, "b: no memory"))
    node.tick(DOWN_S + 1.0)
    node = protected(node)
    node.others["b"].tell(msg.Shortage(EPOCH, False, ""))
    node.tick(UP_S + 1.0)
    assert list(dict.fromkeys(said.redundancy for said in node.said(msg.DegradationChanged, "b"))) == ["replicas=1", "xor(4)"]
    assert node.said(msg.DegradationChanged, "b")[-1].redundancy == "replicas=1"
    return node


def test_on_a_level_of_copies_a_loss_is_made_good_by_copies_also_where_there_was_parity() -> None:
    """P14: neither copies nor parity were asked for, as long as some of its parity was left."""
    node = copies_again()
    node.protect(7)
    mark = lose(node, "b")
    node.tick(2 * REPEAT_S)
    assert {asked.rank for asked in node.said(msg.Holders, "a", mark) + node.said(msg.Holders, "c", mark)} >= {0, 1}


def test_on_a_level_of_copies_data_that_no_slot_holds_is_made_of_parity_and_then_copied() -> None:
    """P14: copies are made of slots, and of this one only parity was left. A job that was over had nothing newer to come, and
    would have lost it with the next node (simulator, seed 338651136089 and three more of that day)."""
    node = copies_again()
    mark = lose(node, "b")
    node.tick(PATIENCE_S - 1.0)
    assert ordered(node, mark) == set(), "it may come back"
    node.tick(IDLE_S + PATIENCE_S)
    assert ordered(node, mark) == {("a", 1, True)}, "its data, and no parity on this level"
    node.feed(ev.ReplicaArrived(at(7), 1, 1, 77, layout(1, 4), (), False))
    mark = node.mark
    node.tick(IDLE_S)
    assert 1 in {asked.rank for asked in node.said(msg.Holders, "a", mark)}
    assert ordered(node, mark) == set()


def test_parity_that_is_lost_is_not_made_anew_when_the_level_was_left() -> None:
    node = protected(steward())
    mark = left(node)
    (shard,) = [order.shard for to, order in orders(node) if to == "c"]
    node.others["c"].held(shard_fact(shard), lost=True)
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()


def test_a_copy_beside_a_position_does_not_keep_another_one_from_the_last_domain() -> None:
    """Of an earlier epoch's snapshot nobody knows positions. Node d came back empty and got a copy of rank 2's slot; when node c
    was to leave, its position went there, and what d had lost had no place: the newest one got no parity for it (P14;
    simulator, seed 3209592684 of that day)."""
    layouts = [layout(rank, 4) for rank in range(4)]
    members = tuple(Member(rank, linear_bytes(one), one.layout_id) for rank, one in enumerate(layouts))
    parity_set, old = ParitySet(4, 0, 2, members), at(7, OLD)
    policy = Policy(redundancy=Parity(2, 2), durable=False, steward_timeout_s=PATIENCE_S)
    node = Steward(record_of("abcd", ancestry=(old,)), policy)
    node.feed(ev.HoldingFound(9, old, 0, 0, True, layouts[0], ()))
    for name, rank in (("b", 1), ("c", 2)):
        shard = replace(shard_fact(ParityShard(parity_set, rank)), snapshot=old)
        node.others[name].tell_inventory(fact(7, rank, epoch=OLD, world=4), shard, layouts=layouts)
    node.others["d"].tell_inventory(fact(7, 2, epoch=OLD, world=4))
    node.tick(PATIENCE_S + REPEAT_S)
    assert last_orders(node, old) == {("a", 0, False), ("d", 3, True)}
    node.others["d"].held(fact(7, 3, 1, epoch=OLD, world=4))
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert {(to, position) for to, position, _ in last_orders(node, old, mark) if to == "d"} == {("d", 3)}


def last_orders(node: Steward, snapshot: SnapshotId, since: int = 0) -> set[tuple[str, int, bool]]:
    said = [(name, order) for name in "abcd" for order in node.said(msg.ParityOrder, name, since)]
    return {(name, order.shard.position, order.data) for name, order in said if order.snapshot == snapshot}
