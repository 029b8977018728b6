"""Why no snapshot is granted, as the steward tells it to the nodes and a node without a steward knows it (P15)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine import view
from ckptd.core.protocol.machine.steward.flush import BACKOFF_FIRST_S
from tests.core import flushes
from tests.core.machines import EPOCH, Member, Steward, fact, layout, record_of

POLICY = Policy(replicas=1, durable=False)


@pytest.fixture
def node() -> Steward:
    return Steward(record_of(), POLICY).train()


def waits(node: Steward) -> str:
    """What the other node was told last."""
    node.tick()
    return node.said(msg.Ack, "b")[-1].waits


def full(node: Steward, **more: object) -> Steward:
    """Rank 1 has no slot any more."""
    node.others["b"].state(1, 8, 0, **more)
    return node


def test_what_is_granted_waits_for_nobody(node: Steward) -> None:
    node.others["b"].state(1, 6, 4)
    assert waits(node) == ""


def test_a_node_that_is_away(node: Steward) -> None:
    node.feed(ev.NodeDown("b"))
    node.feed(ev.RankProgress(0, 9))  # its own daemon hears it with the next acknowledgement
    node.tick()
    assert node.said(msg.Ack, "a")[-1].waits == "waiting for a peer: no answer from b"


def test_a_rank_that_ended(node: Steward) -> None:
    node.others["b"].state(1, 6, 4, left="died")
    assert waits(node) == "waiting for a rank: rank 1 on b ended"


def test_no_memory_in_the_words_of_the_node_that_lacks_it(node: Steward) -> None:
    for grant in node.said(msg.Grant, "a"):
        node.others["b"].missed(grant.grant, 1, ev.NO_MEMORY)
        node.feed(ev.RankMissed(0, grant.grant, "taken back"))
    full(node, short="0 of 3 slots: 2 GiB missing, held by job 0/old: 3 GiB")
    node.tick(1.0)
    assert waits(node) == "no memory: rank 1 on b: 0 of 3 slots: 2 GiB missing, held by job 0/old: 3 GiB"


def test_a_rank_that_could_not_take_a_grant_until_all_have_taken_one(node: Steward) -> None:
    for grant in node.said(msg.Grant, "a"):
        node.others["b"].missed(grant.grant, 1, ev.OTHER_MAPPER)
        node.feed(ev.RankMissed(0, grant.grant, "taken back"))
    assert waits(node) == f"waiting for a rank: rank 1 on b could not take a grant ({ev.OTHER_MAPPER})"
    node.tick(1.0)
    node.capture(7)
    assert waits(node) == ""


def test_storage_that_keeps_what_fills_the_slots() -> None:
    node = flushes.steward().train(free=1).capture(7).protect(7)
    flushes.ask(node, 7)
    assert waits(full(node)) == "waiting for storage: step 7 is being written"
    flushes.wrote(node, "b", ok=False, reason="no space")
    node.tick(BACKOFF_FIRST_S)
    assert waits(full(node)) == "waiting for storage: step 7 is being written; the last try failed: b: no space"


def test_a_rank_that_does_not_deliver(node: Steward) -> None:
    for step in (7, 8, 9, 10):
        node.capture(step, 0)
    full(node)
    assert waits(node) == "waiting for a rank: rank 1 on b has not delivered step 7"


def test_copies_that_are_under_way() -> None:
    node = full(Steward(record_of(), POLICY).train(free=1).capture(7))
    assert waits(node) == "waiting for a peer: copies of step 7 are under way"


def test_what_an_earlier_start_left_behind_and_nobody_here_can_complete() -> None:
    """A declared fresh start after the loss of a node: "copies are under way" was told for a minute, and none was (kill trials)."""
    node = Steward(record_of("ab", outside="c"), POLICY)
    node.feed(ev.NodeDown("c"))
    node.others["b"].tell_inventory(fact(5, 1, epoch=EPOCH - 1), layouts=[layout(1)])
    node.train(free=0).slots(0, 1)
    assert waits(node) == (
        "waiting for a peer: the rest of step 5, which an earlier start left behind, may be on c; "
        "the oldest goes when that has kept every slot for 60 s"
    )


def test_what_is_void_and_not_given_back(node: Steward) -> None:
    node.others["b"].missed(node.granted(7), 1, "late")
    assert waits(node) == "waiting for a rank: rank 0 on a gives back what is void (rank 1 missed it: late)"


def test_a_node_without_a_steward_names_who_was_asked() -> None:
    member = Member(record_of("abc"), POLICY)
    member.slots(1, 1, 2)
    session = member.machine.uplink.session
    assert member.machine.uplink.waits() == ""
    member.hear("a", msg.Ack(EPOCH, session, 0, waits="busy: the slots hold step 3"))
    assert member.machine.uplink.waits() == "busy: the slots hold step 3"
    member.feed(ev.NodeDown("a"))
    assert member.machine.uplink.waits() == f"no steward: a is down; another node speaks after {POLICY.steward_timeout_s:g} s"
    member.machine.uplink.close()
    assert member.machine.uplink.waits() == "no steward: none of a, b has answered yet"


def test_what_the_steward_of_another_session_said_holds_no_more() -> None:
    member = Member(record_of("abc"), POLICY)
    member.hear("a", msg.Ack(EPOCH, member.session, 0, waits="waiting for a rank: rank 0 on a ended"))
    member.hello("s2")
    assert view.waits(member.machine) == ""


@pytest.mark.parametrize("life", ["finished", "orphaned"])
def test_a_job_that_is_over_waits_for_nobody(life: str) -> None:
    member = Member(record_of("abc"), POLICY)
    over = msg.Ack(EPOCH, member.session, 0, life, "waiting for a rank: rank 0 on a ended")
    member.hear("a", over)
    assert view.waits(member.machine) == over.waits, "a rank lives here"
    member.feed(ev.RankLeft(1, clean=True))
    member.hear("a", over)
    assert view.waits(member.machine) == ""


def test_a_steward_that_does_not_answer() -> None:
    member = Member(record_of("abc"), replace(POLICY, steward_timeout_s=4.0))
    member.feed(ev.RankProgress(1, 7))
    member.tick(3.0)
    assert member.machine.uplink.waits() == "no steward: a does not answer"
