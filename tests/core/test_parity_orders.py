"""What a steward has made of parity, by whom and of what: the parity sets of its snapshots, losses, and nodes that leave (D8,
P2, P3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.certify import IDLE_S, REPEAT_S
from ckptd.core.protocol.machine.steward.flush import MEND_S
from ckptd.core.protocol.machine.steward.grants import FULL_S
from ckptd.core.redundancy.parity_sets import Member as Position
from ckptd.core.redundancy.parity_sets import ParitySet, ParityShard, shard_layout
from ckptd.core.redundancy.policies import Parity
from tests.core.flushes import ask, step_of
from tests.core.machines import EPOCH, Steward, at, fact, layout, member, only, record_of
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


# --- making ---------------------------------------------------------------------------------------------------------
def test_parity_of_a_whole_snapshot_is_ordered_where_each_position_lives() -> None:
    node = steward()
    node.capture(7, 0, 1)
    node.tick(1.0)
    assert ordered(node) == set(), "rank 2 has not sealed"
    node.capture(7, 2)
    assert ordered(node) == {("a", 0, False), ("b", 1, False), ("c", 2, False)}
    for _, order in orders(node):
        assert [(s.node, s.rank, s.shard) for s in order.sources] == [("a", 0, None), ("b", 1, None), ("c", 2, None)]


def test_the_level_rises_with_the_last_part_and_not_before() -> None:
    node = steward().capture(7)
    (first, a), (second, b), (third, c) = orders(node)
    make(node, first, a.shard)
    make(node, second, b.shard)
    node.tick(REPEAT_S + 0.5)
    assert node.level(7) == 0
    assert node.said(msg.Holders) == [], "no copies beside the parity"
    make(node, third, c.shard)
    node.tick(1.0)
    assert node.level(7) == 1
    mark = node.mark
    node.tick(5.0)
    assert ordered(node, mark) == set(), "nothing is missing"


def test_a_part_that_was_lost_is_ordered_again_and_the_level_falls_meanwhile() -> None:
    node = protected(steward())
    (shard,) = [order.shard for to, order in orders(node) if to == "c"]
    mark = node.mark
    node.others["c"].held(shard_fact(shard), lost=True)
    node.tick(1.0)
    assert node.level(7) == 0
    assert ordered(node, mark) == {("c", 2, False)}
    (again,) = [order for _, order in orders(node, mark)]
    assert [(s.node, s.shard.position) for s in again.sources if s.shard is not None] == [("a", 0), ("b", 1)]


def test_what_was_encoded_under_another_policy_is_made_whole_in_its_own_parity_sets() -> None:
    """A parity set's number must mean one parity set: parts are held and asked for by it."""
    before = steward("abcd", "", Parity(2, 2)).capture(7)
    made = {to: order.shard for to, order in orders(before)}
    node = steward("abcd", "", Parity(3, 1)).capture(7, 0, 1, 2)
    for to in ("b", "c"):
        make(node, to, made[to])
    node.capture(7, 3)
    assert {(to, order.shard) for to, order in orders(node)} == {(to, made[to]) for to in ("a", "d")}


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
    make(node, "d", order.shard)
    node.tick(1.0)
    assert node.level(7) == 1


def test_a_node_that_comes_back_in_time_costs_nothing() -> None:
    node = protected(steward())
    held = [order.shard for to, order in orders(node) if to == "c"]
    mark = lose(node, "c")
    node.tick(PATIENCE_S - 1.0)
    node.feed(ev.NodeUp("c"))
    node.tick(0.5)
    node.others["c"].tell_inventory(fact(7, 2, world=3), *map(shard_fact, held))
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


def test_two_lost_positions_of_a_parity_set_go_to_two_domains() -> None:
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
    held = fact(7, 2, world=3), *(shard_fact(order.shard) for to, order in orders(node) if to == "c")
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
            make(node, to, order.shard)
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
    assert node.said(msg.Holders, since=mark) == [], "no copies beside what parity brings"


def test_what_was_asked_of_a_node_is_not_asked_of_another_meanwhile() -> None:
    """The data of one parity set is there already, and its parity; the other's is still under way."""
    node = protected(steward("aabbcc", "de"))
    mark = lose(node, "c")
    node.tick(2 * PATIENCE_S)
    asked = {order.shard: to for to, order in orders(node, mark) if order.data}
    assert sorted(asked.values()) == ["d", "e"]
    (shard, to), (_, other) = asked.items()
    node.others[to].held(fact(7, shard.member.rank, 1, world=6))
    make(node, to, shard)
    mark = node.mark
    node.tick(PATIENCE_S)
    assert {to for to, order in orders(node, mark) if order.data} == {other}


def test_a_position_without_a_rank_has_its_parity_where_it_sits() -> None:
    node = steward("aabbc", "A").capture(7)
    nobody = {to for to, order in orders(node) if order.shard.parity_set.number == 1 and order.shard.position == 2}
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
    make(node, "g", order.shard)
    node.tick(1.0)
    assert node.level(7) == 1
    mark = lose(node, "f")
    node.tick(PATIENCE_S + 1.0)
    assert ordered(node, mark) == {("h", 2, True)}


def test_a_seat_that_was_given_away_is_not_asked_for_its_own_position_again() -> None:
    """It holds another shard of that parity set, and one at most."""
    node = protected(steward("abc", "d"))
    shards = {order.shard.position: order.shard for _, order in orders(node)}

    def moves(to: str, rank: int) -> None:
        node.tick(2 * PATIENCE_S)
        node.others[to].held(fact(7, rank, 1, world=3))
        make(node, to, shards[rank])

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
    """Parity set 1 has no rank at c: its parity waits for a domain that no other position lives in."""
    node = protected(steward("aabbc", ""))
    lose(node, "c")
    speaking = node.machine.steward
    speaking.parities.order(speaking.table.states[at(7)], at_once=True)
    (do,) = only(node.machine.ctx.out, ins.Send)
    assert isinstance(do.message, msg.ParityOrder)
    shard = do.message.shard
    assert (do.to, shard.parity_set.number, shard.position, do.message.data) == ("a", 0, 2, True)


def mended_beside_another(*, leaving: bool = False) -> tuple[Steward, ParityShard]:
    """Node a holds another shard of that parity set, and one at most; it made data of node c, which was away, for a flush."""
    node = protected(steward(spare="", durable=True))
    if leaving:
        leaves(node, "c")
    lose(node, "c")
    node.tick(1.0)
    node.hear("b", msg.FlushAsk(EPOCH, 7))
    node.tick()
    ((to, shard),) = [(to, order.shard) for to, order in orders(node) if order.data]
    assert (to, shard.position) == ("a", 2)
    node.feed(ev.ReplicaArrived(at(7), 2, 1, 77, layout(2, 3), (), False))
    return node, shard


def test_data_that_a_flush_had_made_anywhere_moves_to_where_its_parity_can_be() -> None:
    node, shard = mended_beside_another()
    mark = node.mark
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == set(), "nowhere yet"
    comes_back(node, "c")
    assert ordered(node, mark) == {("c", 2, True), ("c", 2, False)}
    node.others["c"].held(fact(7, 2, 1, world=3))
    make(node, "c", shard)
    node.tick(1.0)
    assert node.level(7) == 1


def test_a_leaving_node_with_its_data_gets_its_parity_when_only_one_with_another_part_stays() -> None:
    node, shard = mended_beside_another(leaving=True)
    mark = node.mark
    comes_back(node, "c", fact(7, 2, world=3))
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    node.tick(PATIENCE_S)
    assert ordered(node, mark) == {("c", 2, False)}
    make(node, "c", shard)
    node.tick(1.0)
    assert node.level(7) == 1


def test_a_parity_set_of_which_two_positions_came_to_live_in_one_domain_is_made_good_by_copies() -> None:
    """P14: it was whole, and survived nothing: the newest stayed below an older one, and with two slots neither could go
    (simulator, seed 83712297 of that day)."""
    node = protected(steward(rack="ad", durable=True))
    lose(node, "c")
    node.tick(1.0)
    node.hear("b", msg.FlushAsk(EPOCH, 7))
    node.tick()
    ((to, shard),) = [(to, order.shard) for to, order in orders(node) if order.data]
    assert (to, shard.position) == ("d", 2), "anywhere, for the flush"
    node.others["d"].held(fact(7, 2, 1, world=3))
    node.tick(PATIENCE_S)
    make(node, "d", shard)
    assert node.level(7) == 0, "nodes a and d are in one rack"
    mark = node.mark
    node.tick(REPEAT_S)
    assert {asked.rank for to in "ad" for asked in node.said(msg.Holders, to, mark)} == {0, 2}
    for rank in (0, 2):
        node.others["b"].held(fact(7, rank, 1, world=3))
    assert node.level(7) == 1


def of_the_epoch_before(ranks: int, **held: int) -> Steward:
    """One parity set of so many ranks, of which these nodes hold a position each, with its parity. No rank has a free slot."""
    members = tuple(Position(rank, 64, layout(rank, ranks).layout_id) for rank in range(ranks))
    parity_set, step = ParitySet(ranks, 0, 1, members), at(7, EPOCH - 1)
    layouts = tuple(layout(rank, ranks) for rank in range(ranks))
    node = Steward(record_of("abc", ancestry=(step,)), Policy(redundancy=XOR, durable=False, steward_timeout_s=PATIENCE_S))
    node.feed(ev.HoldingFound(50, step, 0, 0, True, layouts[0], ()))
    own = shard_layout(parity_set, 64), (), False, ParityShard(parity_set, 0), layouts
    node.feed(ev.HoldingFound(51, step, parity_set.holding_rank, 0, False, *own))
    for name, rank in held.items():
        whole = fact(7, rank, epoch=EPOCH - 1, world=ranks), replace(shard_fact(ParityShard(parity_set, rank)), snapshot=step)
        node.others[name].tell_inventory(*whole, layouts=layouts)
    return node.train(free=0)


def test_without_slots_for_long_copies_take_the_place_of_parity_that_cannot_be_made() -> None:
    """P14: of a parity set of the epoch before one node is gone, and there is no other domain for its position."""
    node = of_the_epoch_before(4, b=1, c=2)
    mark = node.mark
    node.tick(FULL_S)
    assert (node.level(7, epoch=EPOCH - 1), node.said(msg.Holders, "b", mark)) == (0, [])
    node.tick(IDLE_S)
    assert [asked.rank for asked in node.said(msg.Holders, "b", mark)][:1] == [1]


@pytest.mark.parametrize("goes", ["c", "a"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_lost_position_is_made_before_what_a_drain_moves_takes_its_place(goes: str, copied: bool) -> None:
    """P14: while its data was waited for, what a leaving node holds went to the only node that could have taken it. So did a copy
    that an earlier drain had made there (simulator, seeds 3806116441, 3806117333)."""
    node = of_the_epoch_before(3, c=2)
    if copied:
        node.others["b"].held(fact(7, 0 if goes == "a" else 2, 1, epoch=EPOCH - 1, world=3))
    node.feed(ev.DrainAsked(True)) if goes == "a" else leaves(node, goes)
    node.tick(1.0)
    assert {order.shard.position for order in node.said(msg.ParityOrder, "b")} == {1}


@pytest.mark.parametrize(("goes", "position", "beside"), [("c", 2, "a"), ("a", 0, "b")])
def test_without_slots_for_long_data_that_no_slot_holds_is_made_beside_another_position_and_copied(
    goes: str, position: int, beside: str
) -> None:
    """P14: a node was to go, and what it holds was moved to node b, the only one that could have taken a position that was lost
    then; there was no slot of that to make copies of (simulator, seed 77 of its day)."""
    node, before, step = of_the_epoch_before(3, c=2), EPOCH - 1, at(7, EPOCH - 1)
    moved = ParityShard(next(iter(node.machine.steward.table.states[step].shards)), position)
    node.others["b"].held(fact(7, position, 1, epoch=before, world=3))
    node.others["b"].held(replace(shard_fact(moved), snapshot=step))
    node.feed(ev.DrainAsked(True)) if goes == "a" else leaves(node, goes)
    mark = node.mark
    node.tick(FULL_S)
    assert node.said(msg.ParityOrder, since=mark) == [], "it has no place"
    node.tick(IDLE_S)
    lost = {(to, o.shard.position, o.data) for to in "abc" for o in node.said(msg.ParityOrder, to, mark)}
    assert lost == {(beside, 1, True)}, "beside another position, and on no node that goes"
    if beside == "a":
        node.feed(ev.ReplicaArrived(step, 1, 1, 77, layout(1, 3), (), False))
    else:
        node.others[beside].held(fact(7, 1, 1, epoch=before, world=3))
    node.tick(IDLE_S)
    assert 1 in {asked.rank for asked in node.said(msg.Holders, beside, mark)}
    assert node.level(7, epoch=before) == 0
    for rank in range(3):
        node.others["b"].held(fact(7, rank, 1, epoch=before, world=3))
        node.others["c"].held(fact(7, rank, 1, epoch=before, world=3))
    assert node.level(7, epoch=before) == 1


def test_two_positions_whose_data_lies_on_one_node_have_their_parity_on_two() -> None:
    """One that holds another one's parity, or is about to make it, takes no second: a loss would take both."""
    node, step = of_the_epoch_before(3, b=1), at(7, EPOCH - 1)
    (parity_set,) = node.machine.steward.table.states[step].shards
    node.others["b"].held(fact(7, 2, 1, epoch=step.epoch, world=3))
    node.others["b"].held(replace(shard_fact(ParityShard(parity_set, 1)), snapshot=step), lost=True)
    mark = node.mark
    node.tick(2 * REPEAT_S)
    found = {(to, order.shard.position) for to in "abc" for order in node.said(msg.ParityOrder, to, mark)}
    assert found == {("b", 1), ("c", 2)}


def test_parity_does_not_join_another_ones_where_its_data_lies_although_no_other_node_is_left() -> None:
    node, step = of_the_epoch_before(3, b=1), at(7, EPOCH - 1)
    mark = lose(node, "c")
    node.others["b"].held(fact(7, 2, 1, epoch=step.epoch, world=3))
    node.tick(2 * PATIENCE_S)
    assert node.said(msg.ParityOrder, since=mark) == []


def test_a_parity_set_of_which_one_position_came_to_live_in_two_domains_is_made_good_by_copies() -> None:
    """Its parity was made at b and, when b was away, at c, so that position 2 has no place left: nothing more was ordered, and no
    newer snapshot found room beside it and an older, better one (P14; simulator, seed 3209135199)."""
    node, step = of_the_epoch_before(3, b=1, c=2), at(7, EPOCH - 1)
    (parity_set,) = node.machine.steward.table.states[step].shards
    node.others["c"].held(fact(7, 1, 1, epoch=step.epoch, world=3))
    node.others["c"].held(replace(shard_fact(ParityShard(parity_set, 2)), snapshot=step), lost=True)
    node.others["c"].held(replace(shard_fact(ParityShard(parity_set, 1)), snapshot=step))
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert node.said(msg.ParityOrder, since=mark) == [], "position 2 has no place"
    assert {asked.rank for to in "bc" for asked in node.said(msg.Holders, to, mark)} >= {2}
    mark = lose(node, "b")
    node.tick(REPEAT_S)
    assert node.said(msg.Holders, since=mark) == [], "what is missing may come back with b"


def test_a_position_that_came_to_lie_in_two_domains_comes_together_for_one_that_was_lost() -> None:
    """P14: a drain had moved its parity when a copy of its data was made in the domain of another position, which had no place any
    more when it was lost (simulator, seed 43382420485)."""
    record, domains = record_of("abc"), {"b": "x", "d": "x", "c": "y", "e": "y"}
    nodes = [replace(node, domain=domains.get(node.node, node.domain)) for node in (*record.nodes, member("d"), member("e"))]
    policy = Policy(redundancy=XOR, steward_timeout_s=PATIENCE_S)
    node = protected(Steward(replace(record, nodes=tuple(nodes)), policy).train())
    (parity_set,) = node.machine.steward.table.states[at(7)].shards
    moved, lost = ParityShard(parity_set, 2), ParityShard(parity_set, 1)
    leaves(node, "c")
    make(node, "e", moved)
    node.others["c"].held(shard_fact(moved), lost=True)
    node.others["d"].held(fact(7, 2, 1, world=3))
    lose(node, "b")
    mark = node.mark
    comes_back(node, "b")
    node.tick(2 * PATIENCE_S)
    assert ordered(node, mark) == {("e", 2, True)}, "the lost one has no place yet"
    node.others["e"].held(fact(7, 2, 1, world=3))
    node.tick(2 * REPEAT_S)
    assert ("b", 1, True) in ordered(node, mark)
    node.others["b"].held(fact(7, 1, 1, world=3))
    make(node, "b", lost)
    node.tick(1.0)
    assert node.level(7) == 1
