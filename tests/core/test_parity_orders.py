"""What a steward has made of parity, by whom and of what: the lanes of its snapshots, losses, and nodes that leave (D8, P2, P3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core import messages as msg
from ckptd.core.ladder import DOWN_S
from ckptd.core.lanes import Part, part_layout
from ckptd.core.machine.steward.certify import REPEAT_S
from ckptd.core.machine.steward.draining import AGAIN_S
from ckptd.core.machine.steward.flush import MEND_S
from ckptd.core.policy import Policy
from ckptd.core.redundancy import Parity
from tests.core.flushes import ask, step_of
from tests.core.machines import EPOCH, Steward, at, fact, layout, member, only, record_of

PATIENCE_S = 4.0
XOR = Parity(2, 1)
Ordered = set[tuple[str, int, bool]]  # (to, position, data)


def steward(
    ranks: str = "abc", spare: str = "d", parity: Parity = XOR, durable: bool = False, **more: float
) -> Steward:
    """Nodes of one rank each, all of one lane; ``spare`` ones have none."""
    record = record_of(ranks)
    record = replace(record, nodes=(*record.nodes, *map(member, spare)))
    policy = Policy(redundancy=parity, durable=durable, steward_timeout_s=PATIENCE_S, **more)  # type: ignore[arg-type]
    return Steward(record, policy).train()


def orders(node: Steward, since: int = 0, step: int = 7) -> list[tuple[str, msg.ParityOrder]]:
    """As they were sent, the last of each."""
    names = [member.node for member in node.record.nodes]
    found = {
        (to, order.part, order.data): (to, order)
        for to in names for order in node.said(msg.ParityOrder, to, since) if order.snapshot == at(step)
    }  # fmt: skip
    return list(found.values())


def ordered(node: Steward, since: int = 0, step: int = 7) -> Ordered:
    return {(to, order.part.position, order.data) for to, order in orders(node, since, step)}


def part_fact(part: Part, step: int = 7) -> msg.HoldingFact:
    made = part_layout(part.lane, 64)
    return msg.HoldingFact(at(step), part.lane.holding_rank, 0, made.layout_id, part=part)


def make(node: Steward, to: str, part: Part, step: int = 7) -> None:
    """The node holds this part now."""
    if to == "a":
        made = part_layout(part.lane, 64)
        layouts = tuple(layout(m.rank, part.lane.world) for m in part.lane.members)
        node.feed(ev.ParityMade(at(step), part, 2000 + 10 * step + part.lane.number, made, (), layouts))
    else:
        node.others[to].held(part_fact(part, step))


def protected(node: Steward, step: int = 7) -> Steward:
    node.capture(step)
    for to, order in orders(node, step=step):
        assert not order.data
        make(node, to, order.part, step)
    return node


def lose(node: Steward, *names: str) -> int:
    mark = node.mark
    node.feed(*map(ev.NodeDown, names))
    return mark


# --- making ---------------------------------------------------------------------------------------------------------
def test_parity_of_a_whole_snapshot_is_ordered_where_each_position_lives() -> None:
    node = steward()
    node.capture(7, 0, 1)
    node.tick(1.0)
    assert ordered(node) == set(), "rank 2 has not sealed"
    node.capture(7, 2)
    assert ordered(node) == {("a", 0, False), ("b", 1, False), ("c", 2, False)}
    for _, order in orders(node):
        assert [(s.node, s.rank, s.part) for s in order.sources] == [("a", 0, None), ("b", 1, None), ("c", 2, None)]


def test_the_level_rises_with_the_last_part_and_not_before() -> None:
    node = steward().capture(7)
    (first, a), (second, b), (third, c) = orders(node)
    make(node, first, a.part)
    make(node, second, b.part)
    node.tick(REPEAT_S + 0.5)
    assert node.level(7) == 0
    assert node.said(msg.Holders) == [], "no copies beside the parity"
    make(node, third, c.part)
    node.tick(1.0)
    assert node.level(7) == 1
    mark = node.mark
    node.tick(5.0)
    assert ordered(node, mark) == set(), "nothing is missing"


def test_a_part_that_was_lost_is_ordered_again_and_the_level_falls_meanwhile() -> None:
    node = protected(steward())
    (part,) = [order.part for to, order in orders(node) if to == "c"]
    mark = node.mark
    node.others["c"].held(part_fact(part), lost=True)
    node.tick(1.0)
    assert node.level(7) == 0
    assert ordered(node, mark) == {("c", 2, False)}
    (again,) = [order for _, order in orders(node, mark)]
    assert [(s.node, s.part.position) for s in again.sources if s.part is not None] == [("a", 0), ("b", 1)]


def test_what_was_encoded_under_another_policy_is_made_whole_in_its_own_lanes() -> None:
    """A lane's number must mean one lane: parts are held and asked for by it."""
    before = steward("abcd", "", Parity(2, 2)).capture(7)
    made = {to: order.part for to, order in orders(before)}
    node = steward("abcd", "", Parity(3, 1)).capture(7, 0, 1, 2)
    for to in ("b", "c"):
        make(node, to, made[to])
    node.capture(7, 3)
    assert {(to, order.part) for to, order in orders(node)} == {(to, made[to]) for to in ("a", "d")}


# --- losses -----------------------------------------------------------------------------------------------------------
def test_lost_data_is_made_again_on_a_spare_after_a_while_and_its_parity_follows() -> None:
    node = protected(steward())
    mark = lose(node, "c")
    node.tick(PATIENCE_S - 1.0)
    assert ordered(node, mark) == set(), "it may come back"
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == {("d", 2, True)}
    (order,) = [order for _, order in orders(node, mark)]
    assert {s.node for s in order.sources} == {"a", "b"}
    node.others["d"].held(fact(7, 2, 1, world=3))
    node.tick(2.5)
    assert ordered(node, mark) == {("d", 2, True), ("d", 2, False)}
    make(node, "d", order.part)
    node.tick(1.0)
    assert node.level(7) == 1


def test_a_node_that_comes_back_in_time_costs_nothing() -> None:
    node = protected(steward())
    held = [order.part for to, order in orders(node) if to == "c"]
    mark = lose(node, "c")
    node.tick(PATIENCE_S - 1.0)
    node.feed(ev.NodeUp("c"))
    node.tick(0.5)
    node.others["c"].tell_inventory(fact(7, 2, world=3), *map(part_fact, held))
    node.tick(2 * PATIENCE_S)
    assert ordered(node, mark) == set()
    assert node.level(7) == 1


def test_what_a_flush_lacks_is_made_again_at_once_and_then_written() -> None:
    node = protected(steward(durable=True))
    assert node.level(7) == 1
    mark = lose(node, "c")
    node.tick(2 * MEND_S)
    assert ordered(node, mark) == set(), "otherwise it gets the time to come back"
    ask(node, 7)
    assert (ordered(node, mark), step_of(node)) == ({("d", 2, True)}, None), "however short ago it was lost"
    node.tick(MEND_S - 0.25)
    assert len(node.said(msg.ParityOrder, "d", mark)) == 1
    node.tick(0.25)
    assert len(node.said(msg.ParityOrder, "d", mark)) == 2, "it may have been lost"
    node.others["d"].held(fact(7, 2, 1, world=3))
    node.tick(MEND_S)
    assert step_of(node) == 7
    assert {piece.rank for order in node.said(msg.WriteOrder, "d") for piece in order.pieces} == {2}


def test_more_losses_than_parity_rows_order_nothing() -> None:
    """There is nothing to make it of."""
    node = protected(steward("abcd", "e", Parity(3, 1)))
    mark = lose(node, "c", "d")
    node.tick(3 * PATIENCE_S)
    assert {what for what in ordered(node, mark) if what[2]} == set()


def test_two_lost_positions_of_a_lane_go_to_two_domains() -> None:
    """Else the next loss takes both."""
    node = protected(steward("abcd", "ef", Parity(2, 2)))
    mark = lose(node, "c", "d")
    node.tick(2 * PATIENCE_S)
    found = {(to, at) for to, at, data in ordered(node, mark) if data}
    assert {at for _, at in found} == {2, 3}
    assert {to for to, _ in found} == {"e", "f"}


def test_without_a_free_domain_nothing_is_ordered_to_where_another_position_lives() -> None:
    node = protected(steward(spare=""))
    mark = lose(node, "c")
    node.tick(3 * PATIENCE_S)
    assert node.said(msg.ParityOrder, since=mark) == []


def comes_back(node: Steward, name: str, *held: msg.HoldingFact) -> None:
    node.feed(ev.NodeUp(name))
    node.tick(0.5)
    node.others[name].tell_inventory(*held)
    node.tick(0.5)


def test_each_loss_waits_anew() -> None:
    """Else a node that is restarted twice has its slot made anew at once the second time."""
    node = protected(steward())
    held = fact(7, 2, world=3), *(part_fact(order.part) for to, order in orders(node) if to == "c")
    lose(node, "c")
    node.tick(PATIENCE_S - 1.0)
    comes_back(node, "c", *held)
    node.tick(PATIENCE_S)
    mark = lose(node, "c")
    node.tick(PATIENCE_S - 1.0)
    assert ordered(node, mark) == set()
    node.machine.steward.parities.forget(set())
    node.tick(PATIENCE_S - 1.0)
    assert ordered(node, mark) == set(), "as if it were another snapshot"
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == {("d", 2, True)}


def test_the_wait_for_lost_data_begins_with_its_loss() -> None:
    node = steward().capture(7)
    for to, order in orders(node):
        if to != "c":
            make(node, to, order.part)
    node.tick(2 * PATIENCE_S)
    mark = lose(node, "c")
    node.tick(PATIENCE_S - 1.0)
    assert ordered(node, mark) == set()


def test_data_that_was_lost_beside_its_parity_is_made_anew_there() -> None:
    node = protected(steward())
    mark = node.mark
    node.others["c"].held(fact(7, 2, world=3), lost=True)
    node.tick(2 * PATIENCE_S)
    assert ordered(node, mark) == {("c", 2, True)}


def test_what_was_asked_of_a_node_is_not_asked_of_another_meanwhile() -> None:
    """The data of one lane is there already, and its parity; the other's is still under way."""
    node = protected(steward("aabbcc", "de"))
    mark = lose(node, "c")
    node.tick(2 * PATIENCE_S)
    found = [(to, order.part) for to, order in orders(node, mark) if order.data]
    assert {to for to, _ in found} == {"d"}
    part = found[0][1]
    node.others["d"].held(fact(7, part.member.rank, 1, world=6))
    make(node, "d", part)
    mark = node.mark
    node.tick(PATIENCE_S)
    assert {to for to, order in orders(node, mark) if order.data} == {"d"}


def test_a_position_without_a_rank_has_its_parity_where_it_sits() -> None:
    node = steward("aabbc", "A").capture(7)
    nobody = {to for to, order in orders(node) if order.part.lane.number == 1 and order.part.position == 2}
    assert nobody == {"c"}, "and not on a spare that would be first by name"


def test_data_that_is_lost_again_before_its_parity_was_made_waits_anew() -> None:
    node = protected(steward("abc", "de"))
    lose(node, "c")
    node.tick(PATIENCE_S + 1.0)
    node.others["d"].held(fact(7, 2, 1, world=3))
    node.tick(3.0)
    mark = lose(node, "d")
    node.tick(PATIENCE_S - 1.0)
    assert ordered(node, mark) == set()
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == {("e", 2, True)}


def test_the_spare_that_holds_less_parity_takes_it() -> None:
    node = protected(steward("abcdef", "gh"))
    mark = lose(node, "c")
    node.tick(PATIENCE_S + 1.0)
    (order,) = [order for to, order in orders(node, mark)]
    node.others["g"].held(fact(7, 2, 1, world=6))
    make(node, "g", order.part)
    node.tick(1.0)
    assert node.level(7) == 1
    mark = lose(node, "f")
    node.tick(PATIENCE_S + 1.0)
    assert ordered(node, mark) == {("h", 2, True)}


def test_a_seat_that_was_given_away_is_not_asked_for_its_own_position_again() -> None:
    """It holds another part of that lane, and one at most."""
    node = protected(steward("abc", "d"))
    parts = {order.part.position: order.part for _, order in orders(node)}

    def moves(to: str, rank: int) -> None:
        node.tick(2 * PATIENCE_S)
        node.others[to].held(fact(7, rank, 1, world=3))
        make(node, to, parts[rank])

    lose(node, "c")
    moves("d", 2)
    comes_back(node, "c")
    lose(node, "b")
    moves("c", 1)
    assert node.level(7) == 1
    mark = lose(node, "d")
    node.tick(2 * PATIENCE_S)
    assert ordered(node, mark) == set(), "no domain is free"
    comes_back(node, "b")
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == {("b", 2, True)}


def test_what_a_flush_needs_is_made_at_once_and_anywhere_and_nothing_else_is() -> None:
    """Lane 1 has no rank at c: its parity waits for a domain that no other position lives in."""
    node = protected(steward("aabbc", ""))
    lose(node, "c")
    speaking = node.machine.steward
    speaking.parities.order(speaking.ledger.facts[at(7)], at_once=True)
    (do,) = only(node.machine.ctx.out, ins.Send)
    assert isinstance(do.message, msg.ParityOrder)
    part = do.message.part
    assert (do.to, part.lane.number, part.position, do.message.data) == ("a", 0, 2, True)


def mended_beside_another(*, leaving: bool = False) -> tuple[Steward, Part]:
    """Node a holds another part of that lane, and one at most; it made data of node c, which was away, for a flush."""
    node = protected(steward(spare="", durable=True))
    if leaving:
        leaves(node, "c")
    lose(node, "c")
    node.tick(1.0)
    node.hear("b", msg.FlushAsk(EPOCH, 7))
    node.tick()
    ((to, part),) = [(to, order.part) for to, order in orders(node) if order.data]
    assert (to, part.position) == ("a", 2)
    node.feed(ev.ReplicaArrived(at(7), 2, 1, 77, layout(2, 3), (), False))
    return node, part


def test_data_that_a_flush_had_made_anywhere_moves_to_where_its_parity_can_be() -> None:
    node, part = mended_beside_another()
    mark = node.mark
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == set(), "nowhere yet"
    comes_back(node, "c")
    assert ordered(node, mark) == {("c", 2, True), ("c", 2, False)}
    node.others["c"].held(fact(7, 2, 1, world=3))
    make(node, "c", part)
    node.tick(1.0)
    assert node.level(7) == 1


def test_a_leaving_node_with_its_data_gets_its_parity_when_only_one_with_another_part_stays() -> None:
    node, part = mended_beside_another(leaving=True)
    mark = node.mark
    comes_back(node, "c", fact(7, 2, world=3))
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == {("c", 2, False)}
    make(node, "c", part)
    node.tick(1.0)
    assert node.level(7) == 1


# --- nodes that leave -------------------------------------------------------------------------------------------------
def leaves(node: Steward, name: str, yes: bool = True) -> int:
    mark = node.mark
    node.others[name].tell(msg.Leaving(EPOCH, yes))
    return mark


def remainder(node: Steward, name: str, since: int) -> msg.Remainder:
    return node.said(msg.Remainder, name, since)[-1]


def test_what_a_leaving_node_holds_of_a_lane_moves_to_a_spare() -> None:
    node = protected(steward())
    mark = leaves(node, "c")
    node.tick(1.0)
    assert ordered(node, mark) == {("d", 2, True), ("d", 2, False)}
    assert all("c" in {s.node for s in order.sources} for _, order in orders(node, mark)), "it is the best source"
    left = remainder(node, "c", mark)
    assert (left.slots, left.stuck) == (2, 0)
    assert left.falls == ((at(7), 1, 0),)
    node.others["d"].held(fact(7, 2, 1, world=3))
    (part,) = [order.part for to, order in orders(node, mark) if not order.data]
    make(node, "d", part)
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


def test_what_has_no_parity_yet_is_not_made_of_parity_elsewhere() -> None:
    node = steward().capture(7)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert {what for what in ordered(node, mark) if what[2]} == set()


def test_with_nowhere_to_go_it_gets_the_part_that_it_lacks_and_not_the_data_that_it_has() -> None:
    node = steward(spare="").capture(7)
    for to, order in orders(node):
        if to != "c":
            make(node, to, order.part)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert ordered(node, mark) == {("c", 2, False)}


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
def test_what_moves_takes_no_seat_of_another_position(spare: str, to: str) -> None:
    """In lane 1 node c has no rank and, as yet, no parity: with another part of the lane it could never take its own."""
    node = steward("aabbc", spare)
    leaves(node, "b")
    node.tick(1.0)
    node.capture(7)
    node.tick(AGAIN_S)
    found = [(where, order.part.position) for where, order in orders(node) if order.part.lane.number == 1]
    assert set(found) == {("a", 0), (to, 1), ("c", 2)}


def test_parity_moves_although_the_ladder_has_left_it() -> None:
    node = protected(steward())
    node.others["b"].tell(msg.Shortage(EPOCH, True, "b: no memory"))
    node.tick(DOWN_S + 1.0)
    assert node.said(msg.InForce, "b")[-1].redundancy == "replicas=0"
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


# --- the ladder -------------------------------------------------------------------------------------------------------
def left(node: Steward) -> int:
    """The rung of parity is left. Where that begins."""
    node.others["b"].tell(msg.Shortage(EPOCH, True, "b: no memory"))
    node.tick(DOWN_S - 1.0)
    while True:
        mark = node.mark
        if [do for do in only(node.tick(), ins.Alarm) if do.kind == "ladder"]:
            return mark
        assert node.now < 1000


def test_from_the_moment_its_rung_is_left_no_parity_is_ordered() -> None:
    node = steward().capture(7)
    assert ordered(node)
    mark = left(node)
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()


def test_what_has_no_parity_gets_none_for_a_node_that_leaves_when_the_rung_was_left() -> None:
    node = steward().capture(7)
    left(node)
    mark = leaves(node, "c")
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()


def test_parity_that_is_lost_is_not_made_anew_when_the_rung_was_left() -> None:
    node = protected(steward())
    mark = left(node)
    (part,) = [order.part for to, order in orders(node) if to == "c"]
    node.others["c"].held(part_fact(part), lost=True)
    node.tick(AGAIN_S)
    assert ordered(node, mark) == set()
