"""Which copies a node makes, where, in which order, and when it makes one again (P3, P14, D8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptd.core.ids import EpochRecord
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.replicate import EXTRAS_MAX, FIRST_RETRY_S, RECHECK_S, REFUSALS_MAX
from ckptd.core.redundancy.policies import parse
from tests.core.copying import FOUR, copies, holders, member, sent
from tests.core.machines import EPOCH, Member, at, fact, layout, only, record_of


def test_a_sealed_slot_is_copied_to_the_chosen_peer_at_once() -> None:
    node = member()
    done = node.capture(1, 7, rank=1)
    assert only(done, ins.Replicate) == [ins.Replicate(at(7), 1, 1, 1, "a")]
    assert copies(sent(node, 7, "a")) == []
    assert copies(node.tick(30.0)) == []


def test_each_tier_has_its_copy_in_another_domain() -> None:
    node = member(replicas=2)
    found = copies(node.capture(1, 7, rank=1))
    assert [tier for _, tier, _ in found] == [1, 2]
    assert len({"b", *(to for _, _, to in found)}) == 3


def test_without_replicas_nothing_is_copied() -> None:
    assert copies(member(replicas=0).capture(1, 7, rank=1)) == []


def test_a_domain_that_has_a_copy_gets_no_second_one() -> None:
    nodes = tuple(replace(one, domain="rack" if one.node in "bc" else one.domain) for one in FOUR.nodes)
    node = member(replace(FOUR, nodes=nodes))
    node.grant(7)
    node.feed(ev.NodeDown("a"))
    assert [to for _, _, to in copies(node.seal(1, 7, 1))] == ["d"], "node c is in our own rack"


def test_the_oldest_snapshot_of_a_rank_goes_first() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    assert copies(node.capture(2, 8, rank=1)) == [], "two at once would halve the speed of both"
    assert copies(sent(node, 7, "a")) == [(8, 1, "a")]


def test_what_a_fresh_start_left_behind_is_not_copied_and_holds_nothing_up() -> None:
    """It stays until the new lineage has a certificate (P3), which waits for copies where slots are few (P14)."""
    node = member()
    left = at(5, EPOCH - 1)
    node.feed(ev.HoldingFound(9, left, 1, 0, True, layout(1, 4), ()))
    assert copies(node.order(msg.Holders(EPOCH, "", left, 1, (("b", 0),)))) == []
    assert copies(node.capture(1, 7, rank=1)) == [(7, 1, "a")]


def test_another_rank_does_not_wait_for_it() -> None:
    node = Member(record_of("abb"), Policy(replicas=1, durable=False))
    node.slots(1, 1)
    node.slots(2, 2)
    node.grant(7)
    assert copies(node.seal(1, 7, 1)) == [(7, 1, "a")]
    assert copies(node.seal(2, 7, 2)) == [(7, 1, "a")]


def test_a_peer_that_refuses_is_asked_again_later_and_later() -> None:
    node = member(replicate_retry_s=0.4)
    node.capture(1, 7, rank=1)
    waited = []
    for _ in range(REFUSALS_MAX - 1):
        began = node.now
        assert copies(sent(node, 7, "a", ok=False)) == []
        while not copies(node.feed(ev.Tick())):
            node.now += 0.01
            assert node.now - began < 2.0, "it is not asked again"
        waited.append(node.now - began)
    assert copies(node.done)[-1] == (7, 1, "a")
    assert FIRST_RETRY_S <= waited[0] < waited[1] < waited[2] <= 0.5


def nearly_passed_over() -> Member:
    """Step 7 is to go to node a, which has refused it as often as it may."""
    node = member()
    node.capture(1, 7, rank=1)
    for _ in range(REFUSALS_MAX - 1):
        sent(node, 7, "a", ok=False)
        node.tick(1.0)
    return node


def test_a_peer_that_keeps_refusing_is_passed_over() -> None:
    node = nearly_passed_over()
    assert {to for _, _, to in copies(node.done)} == {"a"}
    ((_, _, to),) = copies(sent(node, 7, "a", ok=False))
    assert to in "cd"


def test_a_newer_one_does_not_overtake_while_the_older_one_waits_for_a_peer() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    node.capture(2, 8, rank=1)
    assert copies(sent(node, 7, "a", ok=False)) == []
    assert copies(node.tick(0.25)) == [(7, 1, "a")]


def test_where_there_is_no_other_peer_a_newer_one_is_not_held_up() -> None:
    node = member(record_of("ab"))
    node.grant(7)
    node.feed(ev.NodeDown("a"))
    assert copies(node.seal(1, 7, 1)) == []
    assert copies(node.feed(ev.NodeUp("a"))) == [(7, 1, "a")]


def test_a_copy_that_succeeded_forgives_what_was_refused() -> None:
    node = nearly_passed_over()
    sent(node, 7, "a")
    node.order(msg.Holders(EPOCH, "", at(7), 1, (("b", 0),)))
    assert copies(node.tick(RECHECK_S + 1.0)) == []
    holders(node, 7, ("b", 0))
    sent(node, 7, "a", ok=False)
    assert {to for _, _, to in copies(node.done)} == {"a"}, "it begins to count anew"


def test_what_was_on_its_way_to_a_node_that_went_goes_to_another_one() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    node.capture(2, 8, rank=1)
    (step, _, to), *_ = copies(node.feed(ev.NodeDown("a")))
    assert (step, to in "cd") == (7, True)


def test_a_copy_that_arrived_counts_until_its_node_is_gone_for_good() -> None:
    node = member(steward_timeout_s=4.0)
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    node.feed(ev.NodeDown("a"))
    assert copies(node.tick(3.75)) == []
    assert [step for step, _, _ in copies(node.tick(0.5))] == [7]


def test_a_copy_whose_holder_says_that_it_is_damaged_is_made_again() -> None:
    """P10."""
    node = member()
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    assert copies(node.hear("c", msg.Held(EPOCH, fact(7, 1, 1, world=4), lost=True))) == [], (
        "node c has none of ours"
    )
    assert copies(node.hear("a", msg.Held(EPOCH, fact(8, 1, 1, world=4), lost=True))) == []
    assert copies(node.hear("a", msg.Held(EPOCH, fact(7, 1, 1, world=4), lost=True))) == [(7, 1, "a")]


def test_a_result_that_comes_after_the_flight_was_given_up_still_counts() -> None:
    node = member(record_of("ab"))
    node.capture(1, 7, rank=1)
    node.feed(ev.NodeDown("a"))
    assert copies(sent(node, 7, "a")) == []
    assert copies(node.feed(ev.NodeUp("a"))) == [], "it arrived all the same"


def test_a_late_failure_is_no_copy() -> None:
    node = member(record_of("ab"))
    node.capture(1, 7, rank=1)
    node.feed(ev.NodeDown("a"))
    sent(node, 7, "a", ok=False)
    assert copies(node.feed(ev.NodeUp("a"))) == [(7, 1, "a")]


def test_a_result_about_another_snapshot_or_rank_changes_nothing() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    sent(node, 8, "a")
    sent(node, 7, "a", rank=0)
    node.feed(ev.NodeDown("a"))
    assert len(copies(node.done)) == 2


def test_nothing_is_copied_any_more_of_what_was_released() -> None:
    node = member()
    node.feed(ev.NodeDown("a"), ev.NodeDown("c"), ev.NodeDown("d"))
    node.capture(1, 7, rank=1)
    node.feed(ev.NodeUp("a"))
    node.certify(1, 8, 0, releases=(at(7),))
    sent(node, 7, "a", ok=False)
    assert copies(node.tick(5.0)) == []


def test_what_is_found_after_a_restart_waits_for_the_steward_to_say_which_copies_there_are() -> None:
    node = Member(FOUR, Policy(replicas=1, durable=False), running=False)
    done = node.feed(ev.HoldingFound(1, at(7), 1, 0, True, layout(1, 4), ()))
    assert copies(done + node.tick(10.0)) == []
    assert copies(holders(node, 7, ("b", 0), ("c", 1))) == [], "there is one"
    assert copies(holders(node, 7, ("b", 0))) == [(7, 1, "a")]


def test_a_replica_that_is_found_is_not_ours_to_copy_unless_we_are_asked() -> None:
    node = Member(FOUR, Policy(replicas=1, durable=False), running=False)
    node.feed(ev.HoldingFound(9, at(7), 0, 0, False, layout(0, 4), ()))
    assert copies(node.tick(10.0)) == []
    (one,) = only(holders(node, 7, ("b", 0), rank=0), ins.Replicate)
    assert (one.rank, one.slot, one.tier) == (0, 9, 1)


def test_a_prefix_is_copied_from_its_own_tier_on() -> None:
    """A tier-2 holding has not what belongs into tier 1."""
    node = Member(record_of("abcde"), Policy(replicas=2, durable=False), running=False)
    node.feed(ev.HoldingFound(9, at(7), 0, 2, False, layout(0, 5), ()))
    found = copies(holders(node, 7, ("b", 2), rank=0))
    assert [tier for _, tier, _ in found] == [2, 2], "two losses are to be survived, whoever held more of it before"
    assert len({"b", *(to for _, _, to in found)}) == 3


def outlived(record: EpochRecord) -> Member:
    """Node b holds a tier-2 copy of rank 0, and whoever held more of it is gone."""
    node = Member(record, Policy(replicas=2, durable=False, steward_timeout_s=4.0), running=False)
    node.feed(ev.HoldingFound(9, at(7), 0, 2, False, layout(0, 5), ()))
    return node


def test_what_outlived_the_fuller_holders_lies_in_as_many_domains_as_any_other() -> None:
    """P14: nobody else can make that copy, so its snapshot would never be protected."""
    node = outlived(record_of("abcde"))
    ((_, tier, to),) = copies(holders(node, 7, ("b", 2), ("a", 2), rank=0))
    assert (tier, to in "cde") == (2, True)
    sent(node, 7, to, tier=2, rank=0)
    node.now += RECHECK_S
    assert copies(holders(node, 7, ("b", 2), ("a", 2), (to, 2), rank=0)) == []


def test_two_copies_alike_that_arrive_after_they_were_given_up_both_count() -> None:
    node = outlived(record_of("abc"))
    first, second = (to for _, _, to in copies(holders(node, 7, ("b", 2), rank=0)))
    node.feed(ev.NodeDown(first), ev.NodeDown(second))
    sent(node, 7, first, tier=2, rank=0)
    sent(node, 7, second, tier=2, rank=0)
    assert copies(node.feed(ev.NodeUp(first), ev.NodeUp(second))) == []


def test_two_copies_in_one_domain_are_counted_once() -> None:
    nodes = tuple(replace(one, domain="rack" if one.node in "ac" else one.domain) for one in FOUR.nodes)
    node = Member(replace(FOUR, nodes=nodes), Policy(replicas=2, durable=False), running=False)
    node.feed(ev.HoldingFound(1, at(7), 1, 0, True, layout(1, 4), ()))
    assert copies(holders(node, 7, ("b", 0), ("a", 1), ("c", 2))) == [(7, 2, "d")]


def test_the_steward_is_believed_about_copies_but_for_the_newest() -> None:
    """Its word may have crossed that of the copy's holder."""
    node = member()
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    assert copies(holders(node, 7, ("b", 0))) == []
    node.now += RECHECK_S
    assert copies(holders(node, 7, ("b", 0))) == [(7, 1, "a")]


def test_nobody_is_asked_for_what_is_not_here() -> None:
    node = member()
    assert copies(holders(node, 7, ("b", 0))) == []
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    node.machine.slots.pin("x", at(7))
    node.certify(1, 8, 0, releases=(at(7),))
    node.now += 2 * RECHECK_S
    assert copies(holders(node, 7, ("b", 0))) == [], "it only waits for its pin to fall"


def extra(node: Member, tier: int = 0) -> list[tuple[int, int, str]]:
    return copies(holders(node, 7, ("b", 0), ("a", 0), tier=tier))


def test_a_slice_that_lost_a_capture_gets_one_more_copy_away_from_the_others() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    ((_, tier, to),) = extra(node)
    assert (tier, to in "cd") == (0, True)
    assert extra(node) == [], "one at a time"
    sent(node, 7, to, tier=0)
    assert extra(node) == [], "the steward may not have heard of it yet"
    node.now += RECHECK_S
    assert len(extra(node)) == 1


def test_an_extra_copy_that_finds_no_place_keeps_no_other_one_waiting() -> None:
    node = member(record_of("ab"))
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    assert copies(holders(node, 7, tier=1)) == [], "node a has one"
    assert copies(holders(node, 7, ("b", 0), tier=0)) == [(7, 0, "a")], "but not all that it is to have"


def with_extra_copies() -> Iterator[Member]:
    """After each one that is made, until there may be no more."""
    node = member()
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    for _ in range(EXTRAS_MAX):
        ((_, _, to),) = extra(node)
        sent(node, 7, to, tier=0)
        node.now += RECHECK_S
        yield node


def test_only_so_many_extra_copies_are_made() -> None:
    *_, node = with_extra_copies()
    assert extra(node) == []


def test_extra_copies_that_there_are_count_whatever_else_the_steward_asks_for_meanwhile() -> None:
    """Their nodes have them still: as many more would be made after each word about the usual ones."""
    for node in with_extra_copies():
        assert copies(holders(node, 7, ("b", 0), ("a", 1), ("c", 0), ("d", 0))) == []
    assert extra(node) == []


def test_an_extra_copy_is_kept_when_the_steward_names_the_usual_ones() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    ((_, _, to),) = extra(node)
    sent(node, 7, to, tier=0)
    node.now += RECHECK_S
    assert copies(holders(node, 7, ("b", 0), ("a", 1))) == []


def test_an_extra_copy_that_its_node_has_lost_takes_no_place_from_a_usual_one() -> None:
    """A soak, seed 740178386473: its node was started again without its memory, and counted as having one for ever."""
    node = member(record_of("ab"))
    node.capture(1, 7, rank=1)
    sent(node, 7, "a")
    assert copies(holders(node, 7, ("b", 0), tier=0)) == [(7, 0, "a")]
    sent(node, 7, "a", tier=0)
    node.now += 2 * RECHECK_S
    assert copies(holders(node, 7, ("b", 0))) == [(7, 1, "a")]


def test_what_lies_beyond_the_fork_is_not_copied() -> None:
    node = Member(
        record_of("abcd", ancestry=(at(5, EPOCH - 1),)), Policy(replicas=1, durable=False), running=False
    )
    for slot, step in ((1, 6), (2, 5)):
        node.feed(ev.HoldingFound(slot, at(step, EPOCH - 1), 1, 0, True, layout(1, 4), ()))
        holders_of = msg.Holders(EPOCH, "", at(step, EPOCH - 1), 1, (("b", 0),))
        node.order(holders_of)
    assert [step for step, _, _ in copies(node.done)] == [5]


def test_another_epoch_forgets_what_was_under_way_and_refused() -> None:
    node = member()
    node.capture(1, 7, rank=1)
    newer = replace(FOUR, number=EPOCH + 1, nonce="then", ancestry=(at(7),))
    node.hear("a", msg.Stale(newer))
    node.record = newer
    assert copies(node.tick(0.25)) == [(7, 1, "a")], "the shell may have dropped it"


def test_a_daemon_outside_the_epoch_protects_what_it_holds_among_the_members() -> None:
    node = Member(record_of("abc", outside="x"), Policy(replicas=1, durable=False), name="x", running=False)
    node.feed(ev.HoldingFound(1, at(7), 1, 0, False, layout(1, 3), ()))
    ((_, _, to),) = copies(holders(node, 7, ("x", 0)))
    assert to in "abc"


def test_what_shares_parity_is_copied_only_when_the_steward_asks() -> None:
    node = Member(FOUR, Policy(redundancy=parse("xor(4)"), durable=False))
    node.slots(1, 1)
    assert copies(node.capture(1, 7, rank=1)) == []
    assert len(copies(holders(node, 7, ("b", 0)))) == 1


def test_two_copies_never_lie_in_one_failure_domain() -> None:
    """P3: the loss of that domain would take both; the second one waits for another domain."""
    nodes = tuple(replace(one, domain="rack" if one.node in "ac" else one.domain) for one in FOUR.nodes)
    node = member(replace(FOUR, nodes=nodes), replicas=2)
    node.grant(7)
    node.feed(ev.NodeDown("d"))
    ((_, _, first),) = copies(node.seal(1, 7, 1))
    assert first in "ac"
    assert [to for _, _, to in copies(node.feed(ev.NodeUp("d")))] == ["d"]
