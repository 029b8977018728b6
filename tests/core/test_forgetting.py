"""Who may forget a job that is over, and who is woken because it lives elsewhere (D19, P2, P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import Life, Order, Tombstone, revives
from tests.core.machines import EPOCH, Member, Node, at, only, record_of, sent
from tests.core.test_life import LINGER_S, heard


def test_a_steward_that_was_restarted_hears_the_others_before_it_forgets_a_job_that_is_over() -> None:
    """Its memory was lost in a reboot and its disk said "orphaned, for 700 s": it forgot the job in its first tick, and nobody
    spoke for what the others held."""
    node = Node("a", record_of("abc"), Policy(replicas=1, durable=False, job_linger_s=LINGER_S), running=False)
    node.feed(ev.Restarted(record_of("abc"), life="orphaned", life_s=LINGER_S + 100))
    for _ in range(3):
        node.tick(0.1)
    assert node.machine.steward.active and only(node.done, ins.Bury) == []
    node.tick(30.0)
    assert len(only(node.done, ins.Bury)) == 1, "nobody holds anything"


def test_a_node_that_forgot_a_job_by_itself_is_woken_by_who_takes_it_for_the_steward() -> None:
    """It was up, so that nobody else spoke: what others held was never certified, copied or written again."""
    node = Member(record_of("abc"), Policy(replicas=1, durable=False, steward_timeout_s=3.0))
    node.feed(ev.NodeDown("a"))
    node.tick(1.0)
    node.feed(ev.NodeUp("a"))
    mark = node.mark
    node.tick(10.0)
    (registers, *_) = sent(node.done[mark:], msg.Inventory, "a")
    assert revives(registers, Tombstone(EPOCH)), "it has forgotten what is gone there"
    assert not revives(registers, Tombstone(EPOCH, EPOCH)) and not revives(registers, Tombstone(EPOCH + 1))
    assert not revives(replace(registers, attempt="x"), Tombstone(EPOCH)), "an answer"
    woken = Node("a", record_of("abc"), running=False)
    woken.machine.ctx.record = None
    woken.feed(ev.Restarted(None, tombstone=Tombstone(EPOCH)))
    woken.feed(ev.Received("b", registers))
    woken.tick(1.0)
    assert woken.machine.steward.active


def test_an_orphan_gives_away_nothing_that_is_better_protected_than_what_it_keeps() -> None:
    node = Member(record_of("abcd"), Policy(replicas=1, durable=False, orphan_linger_s=50.0))
    node.slots(1, 1, 2, 3)
    for slot, step, level in ((1, 7, 1), (2, 8, 0)):
        node.capture(slot, step, rank=1)
        node.certify(slot, step, level)
    node.feed(ev.RankLeft(1, False))
    for _ in range(60):
        heard(node, Life.ORPHANED)
        node.tick(1.0)
    node.feed(ev.SpareAsked(Order.ORPHANED_LAST))
    assert {held.snapshot.step for held in node.machine.slots.facts()} == {7}


def test_what_was_to_be_kept_and_could_not_be_stored_does_not_go_without_a_word() -> None:
    """The newest step is durable, which is all that memory of a job that is over waits for (P15)."""
    node = Member(record_of("ab"), Policy(replicas=1))
    node.slots(1, 1, 2, 3)
    for slot, step in ((1, 7), (2, 8)):
        node.grant(step)
        node.seal(slot, step, 1, keep=step == 7)
    node.feed(ev.RankLeft(1, True, True))
    heard(node, Life.FINISHED)
    node.feed(ev.SpareAsked(Order.FINISHED_DURABLE, (at(8),)))
    assert node.machine.slots.facts() == ()
    (alarm,) = only(node.done, ins.Alarm)
    assert alarm.kind == "kept" and "step 7 was to be kept" in alarm.text


@pytest.mark.parametrize("stored", [True, False])
def test_what_was_to_be_kept_and_is_certified_as_durable_goes_without_an_alarm(stored: bool) -> None:
    """Storage is not asked for what the last order takes; what the steward has told of it counts."""
    node = Member(record_of("ab"), Policy(replicas=1, orphan_linger_s=50.0))
    node.slots(1, 1, 2, 3)
    for slot, step in ((1, 7), (2, 8)):
        node.grant(step)
        node.seal(slot, step, 1, keep=step == 7)
        node.certify(slot, step, 1, durable=stored and step == 7)
    node.feed(ev.RankLeft(1, False))
    for _ in range(60):
        heard(node, Life.ORPHANED)
        node.tick(1.0)
    node.feed(ev.SpareAsked(Order.ORPHANED_LAST))
    assert {held.snapshot.step for held in node.machine.slots.facts()} == {8}
    assert [alarm.kind for alarm in only(node.done, ins.Alarm)] == ([] if stored else ["kept"])


def test_a_node_that_holds_nothing_keeps_a_job_as_long_as_its_steward_speaks() -> None:
    """It forgot the job by itself, and answered nobody any more: its steward waited for it, and had nobody to succeed it."""
    node = Member(record_of("abcd"), Policy(replicas=1, durable=False, job_linger_s=LINGER_S))
    node.feed(ev.RankLeft(1, False))
    for _ in range(int(LINGER_S) + 10):
        heard(node, Life.ORPHANED)
        node.tick(1.0)
    assert only(node.done, ins.Bury) == []
    node.feed(ev.NodeDown("a"))
    node.tick(LINGER_S / 2)
    assert node.machine.steward.active, "it succeeds who has spoken so far"


def test_and_forgets_it_when_nobody_has_spoken_for_as_long() -> None:
    node = Node("c", record_of("abc"), Policy(replicas=1, durable=False, job_linger_s=LINGER_S), running=False)
    node.feed(ev.Restarted(record_of("abc"), life="finished", life_s=10 * LINGER_S))
    node.tick(LINGER_S - 10)
    assert only(node.done, ins.Bury) == []
    node.tick(20.0)
    assert len(only(node.done, ins.Bury)) == 1


def test_a_steward_that_opens_a_session_or_asks_anew_in_it_has_spoken() -> None:
    """It came back after its node's memory was lost, and had no time to say more: who had just answered forgot the job, and was
    counted on (simulator, seed 338651138865)."""
    node = Member(record_of("abcd"), Policy(replicas=1, durable=False, job_linger_s=LINGER_S))
    node.feed(ev.RankLeft(1, False))
    heard(node, Life.ORPHANED)
    for _ in range(3):
        node.tick(LINGER_S - 1.0)
        node.hello("s2")
        assert only(node.done, ins.Bury) == []
    node.tick(LINGER_S)
    assert len(only(node.done, ins.Bury)) == 1


def test_a_steward_wakes_who_has_forgotten_its_job_by_itself() -> None:
    asks = msg.OpenSession(EPOCH, "s")
    assert revives(asks, Tombstone(EPOCH))
    assert not revives(asks, Tombstone(EPOCH, EPOCH)) and not revives(asks, Tombstone(EPOCH + 1))
    node = Node("b", record_of("ab"), running=False)
    node.machine.ctx.record = None
    node.feed(ev.Restarted(None, tombstone=Tombstone(EPOCH)))
    answered = sent(node.hear("a", asks), msg.Inventory, "a")
    assert answered and answered[0].holdings == ()
