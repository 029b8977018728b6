"""Copies when peers take no more, when degradation moves, and when nodes are about to go (P8, P14)."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.ids import EpochRecord
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.replicate import FIRST_RETRY_S, VOID
from ckptd.core.redundancy.policies import parse
from tests.core.copying import FOUR, copies, holders, member, sent
from tests.core.machines import EPOCH, Member, at, fact, record_of


# --- peers that take no more ------------------------------------------------------------------------------------------
def full() -> Member:
    """Node a holds as many generations of rank 1 as it takes; nobody else has a copy."""
    node = member()
    for slot, step in ((1, 7), (2, 8)):
        node.capture(slot, step, rank=1)
        sent(node, step, "a")
    return node


def test_a_peer_with_as_many_older_ones_as_it_takes_is_not_asked_until_one_is_released() -> None:
    node = full()
    assert copies(node.capture(3, 9, rank=1) + node.tick(10.0)) == [], "nor is another one"
    assert copies(node.certify(1, 8, 1, releases=(at(7),))) == [(9, 1, "a")]


def test_the_generations_of_another_rank_fill_no_places() -> None:
    node = Member(record_of("abb"), Policy(replicas=1, durable=False))
    node.slots(1, 1, 2)
    for slot, step in ((1, 7), (2, 8)):
        node.capture(slot, step, rank=1)
        sent(node, step, "a")
    node.slots(2, 3)
    assert copies(node.capture(3, 9, rank=2)) == [(9, 1, "a")]


def copied_elsewhere(node: Member, slot: int, step: int) -> str:
    """Node a cannot be reached at that moment. Returns who has it."""
    node.grant(step)
    node.feed(ev.NodeDown("a"))
    ((_, _, to),) = copies(node.seal(slot, step, 1))
    sent(node, step, to)
    node.feed(ev.NodeUp("a"))
    return to


def test_copies_of_older_ones_elsewhere_fill_no_places() -> None:
    node = member()
    for slot, step in ((1, 7), (2, 8)):
        assert copied_elsewhere(node, slot, step) in "cd"
    assert copies(node.capture(3, 9, rank=1)) == [(9, 1, "a")]


def test_newer_generations_do_not_keep_an_older_one_from_a_peer() -> None:
    """It takes an older one in beside them (P14)."""
    node = member()
    other = copied_elsewhere(node, 1, 7)
    for slot, step in ((2, 8), (3, 9)):
        node.capture(slot, step, rank=1)
        sent(node, step, "a")
    assert copies(node.hear(other, msg.Held(EPOCH, fact(7, 1, 1, world=4), lost=True))) == [(7, 1, "a")]


def test_what_is_void_for_a_peer_is_not_offered_to_it_again_and_nothing_waits_behind_it() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    node.capture(2, 8, rank=1)
    ((step, _, second),) = copies(sent(node, 7, "a", ok=False, why=VOID))
    assert (step, second in "cd") == (7, True)
    ((step, _, third),) = copies(sent(node, 7, second, ok=False, why=VOID))
    assert (step, {second, third}) == (7, {"c", "d"})
    assert copies(sent(node, 7, third, ok=False, why=VOID)) == [(8, 1, "a")]
    sent(node, 8, "a")
    assert copies(node.tick(10.0)) == []


def test_another_epoch_asks_whoever_refused_in_the_one_before() -> None:
    node = member(record_of("ab"))
    node.capture(1, 7, rank=1)
    assert copies(sent(node, 7, "a", ok=False, why=VOID) + node.tick(10.0)) == []
    node.record = replace(node.record, number=EPOCH + 1, nonce="then", ancestry=(at(7),))
    node.hear("a", msg.Stale(node.record))
    assert copies(node.tick(0.25)) == [(7, 1, "a")]


def test_a_void_snapshot_makes_room_on_the_peers_too() -> None:
    """They heard it as well."""
    node = member(record_of("ab"), replicate_retry_s=60.0)
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    node.capture(2, 8, rank=1)
    for _ in range(8):
        assert copies(sent(node, 8, "a", ok=False)) == []
        node.now += 2 * FIRST_RETRY_S * 2**8
        assert copies(node.feed(ev.Tick())) == [(8, 1, "a")]
    sent(node, 8, "a", ok=False)
    assert copies(node.tick(1.0)) == [], "it waits for long by now"
    assert copies(node.order(msg.Void(EPOCH, 0, "copies differ", at(7))) + node.tick()) == [(8, 1, "a")]


# --- degradation -------------------------------------------------------------------------------------------------------
def in_force(node: Member, redundancy: str) -> list[ins.Instruction]:
    return node.order(msg.DegradationChanged(EPOCH, "", redundancy))


def of_parity(record: EpochRecord = FOUR, name: str = "b") -> Member:
    node = Member(record, Policy(redundancy=parse("xor(4)"), durable=False), name=name)
    for rank in node.ranks:
        node.slots(rank, 10 * rank + 1, 10 * rank + 2)
    return node


def test_a_level_of_copies_makes_them_at_once() -> None:
    node = of_parity()
    assert copies(node.capture(11, 7, rank=1)) == []
    assert copies(in_force(node, "1")) == [(7, 1, "a")]


def test_what_was_asked_for_under_another_level_is_not_made_again_unless_it_is_asked_for_anew() -> None:
    node = of_parity()
    node.capture(11, 7, rank=1)
    ((_, _, to),) = copies(holders(node, 7, ("b", 0)))
    sent(node, 7, to)
    lost = msg.Held(EPOCH, fact(7, 1, 1, world=4), lost=True)
    in_force(node, "xor(4)")
    assert len(copies(node.hear(to, lost))) == 1, "the same level again changes nothing"
    sent(node, 7, to)
    in_force(node, "xor(3)")
    assert copies(node.hear(to, lost)) == []
    assert len(copies(holders(node, 7, ("b", 0)))) == 1
    sent(node, 7, to)
    in_force(node, "xor(3)")
    assert len(copies(node.hear(to, lost))) == 1, "it is that level still"


def test_a_rank_that_is_in_no_parity_set_is_copied_unasked() -> None:
    """One group, and one place in it for the two nodes of the rack."""
    record = record_of("abc")
    record = replace(record, nodes=tuple(replace(n, domain="a" if n.node == "a" else "rack") for n in record.nodes))
    node = of_parity(record, "c")
    assert copies(node.capture(21, 7, rank=2)) == [(7, 1, "a")]
    assert copies(of_parity(record).capture(11, 7, rank=1)) == [], "parity protects it"


# --- extra copies and nodes that go -----------------------------------------------------------------------------------
def test_an_extra_copy_that_found_no_place_is_asked_for_anew_when_a_node_it_kept_away_from_is_lost() -> None:
    node = member(steward_timeout_s=4.0)
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    everywhere = [(name, 0) for name in "bacd"]
    assert copies(holders(node, 7, *everywhere, tier=0)) == []
    node.feed(ev.NodeDown("c"))
    node.tick(4.25)
    node.feed(ev.NodeUp("c"))
    assert copies(holders(node, 7, *(one for one in everywhere if one[0] != "c"), tier=0)) == [(7, 0, "c")]


def test_an_extra_copy_may_share_the_domain_of_a_node_that_is_about_to_go() -> None:
    nodes = tuple(replace(one, domain="rack" if one.node in "ac" else one.domain) for one in FOUR.nodes)
    node = member(replace(FOUR, nodes=nodes))
    node.feed(ev.NodeDown("d"))
    ((_, _, first),) = copies(node.capture(1, 7, rank=1))
    sent(node, 7, first)
    node.order(msg.Departures(EPOCH, "", (first,)))
    (stays,) = {"a", "c"} - {first}
    assert copies(holders(node, 7, ("b", 0), (first, 0), tier=0)) == [(7, 0, stays)]


def test_an_extra_copy_goes_to_a_node_that_is_about_to_go_where_there_is_no_other() -> None:
    """P14: a drain that cannot end kept a slice that had lost a capture on that node below what is wanted (as seed 552)."""
    node = member(record_of("ab"))
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    node.order(msg.Departures(EPOCH, "", ("a",)))
    assert copies(holders(node, 7, ("b", 0), tier=0)) == [(7, 0, "a")]
    node.feed(ev.ReplicaSent(at(7), 1, 0, "a", True, ""))
    node.tick(4.0)
    assert copies(holders(node, 7, ("b", 0), ("a", 0), tier=0)) == [], "it has one"
