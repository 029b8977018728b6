"""How far a job is degraded, at its steward, and what nodes say of their memory (P8)."""

from __future__ import annotations

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.shortage import CALM_S
from ckptd.core.protocol.machine.steward.certify import REPEAT_S
from ckptd.core.protocol.machine.steward.degradation import AFTERWARDS_S
from ckptd.core.redundancy.degradation import DOWN_S, UP_S
from ckptd.core.redundancy.parity_sets import Member as ParityMember
from ckptd.core.redundancy.parity_sets import ParitySet, ParityShard
from tests.core.machines import EPOCH, Member, Steward, at, only, record_of
from tests.core.parity_rig import make, orders

POLICY = Policy(replicas=1, durable=False)


def steward() -> Steward:
    """Two nodes: one copy, or local only. An earlier steward's word is forgotten by now."""
    node = Steward(record_of(), POLICY).greet()
    node.tick(AFTERWARDS_S + REPEAT_S)
    return node


def short(node: Steward, yes: bool = True) -> None:
    node.others["b"].tell(msg.Shortage(EPOCH, yes, "b: no memory" if yes else ""))


def in_force(node: Steward, since: int, to: str = "b") -> list[str]:
    return [message.redundancy for message in node.said(msg.DegradationChanged, to, since)]


def test_a_node_that_stays_short_brings_protection_down_and_everybody_hears_it() -> None:
    node = steward()
    mark = node.mark
    short(node)
    node.tick(DOWN_S - 0.5)
    assert in_force(node, mark) == []
    node.tick(1.0)
    assert set(in_force(node, mark)) == {"replicas=0"}
    (alarm,) = [do for do in only(node.done[mark:], ins.Alarm) if do.kind == "degradation"]
    assert alarm.text == "protection goes down to local only: b: no memory"
    assert in_force(node, mark, "a") == in_force(node, mark)
    assert [m.session for m in node.said(msg.DegradationChanged, "b", mark)][-1] == node.others["b"].session
    again = node.mark
    node.tick(REPEAT_S)
    assert len(in_force(node, again)) == 1, "any message may be lost"


def test_a_shortage_that_ends_in_time_changes_nothing() -> None:
    node = steward()
    mark = node.mark
    short(node)
    node.tick(DOWN_S - 1.0)
    short(node, False)
    node.tick(2 * DOWN_S)
    assert in_force(node, mark) == []


def test_a_node_that_went_or_began_anew_is_not_short_any_more() -> None:
    for anew in (False, True):
        node = steward()
        mark = node.mark
        short(node)
        if anew:
            node.hear("b", msg.Inventory("", node.record, ()))
            node.others["b"].tell_inventory()
        else:
            node.feed(ev.NodeDown("b"))
        node.tick(2 * DOWN_S)
        assert in_force(node, mark, "a") == []


def test_protection_goes_up_again_when_there_has_been_memory_for_a_while() -> None:
    node = steward()
    short(node)
    node.tick(DOWN_S + 0.5)
    short(node, False)
    mark = node.mark
    node.tick(UP_S - 1.0)
    assert len(set(in_force(node, mark))) == 1
    node.tick(2.0)
    assert len(set(in_force(node, mark))) == 2
    ups = [do.text for do in only(node.done[mark:], ins.Alarm) if do.kind == "degradation"]
    assert len(ups) == 1 and ups[0].startswith("protection goes up to replicas")
    node.tick(AFTERWARDS_S + REPEAT_S)
    mark = node.mark
    node.tick(3 * REPEAT_S)
    assert in_force(node, mark) == [], "it is what the policy wants"


def test_what_is_missing_by_the_new_level_is_asked_for_at_once() -> None:
    node = steward().train().capture(7)
    short(node)
    node.tick(DOWN_S + 40.0)
    mark = node.mark
    short(node, False)
    while not [do for do in only(node.done[mark:], ins.Alarm) if do.kind == "degradation"]:
        mark_before = node.mark
        node.tick()
        assert node.now < 1000
    node.tick()
    assert node.said(msg.Holders, "b", mark_before), "copies of step 7, not at the next seldom repetition"


def test_a_session_that_begins_is_told_at_once_what_is_in_force() -> None:
    node = steward()
    for level in ("replicas=1", "replicas=0"):
        mark = node.mark
        node.hear("b", msg.Inventory("", node.record, ()))
        node.others["b"].tell_inventory()
        assert in_force(node, mark) == [level]
        short(node)
        node.tick(DOWN_S + 0.5)


def test_what_is_missing_is_not_asked_for_without_pause_while_the_level_stays() -> None:
    node = steward().train().capture(7)
    mark = node.mark
    node.tick(4 * REPEAT_S)
    assert 0 < len(node.said(msg.Holders, "b", mark)) <= 5


def test_a_new_term_begins_on_the_wanted_level_and_says_so_for_a_while() -> None:
    """An earlier steward, or this one before it stood still, may have said something else."""
    node = steward()
    short(node)
    node.tick(DOWN_S + 0.5)
    node.now += POLICY.steward_timeout_s + AFTERWARDS_S
    mark = node.mark
    node.feed(ev.Tick())
    node.others["b"].tell_inventory()
    node.tick(2 * DOWN_S)
    assert set(in_force(node, mark)) == {"replicas=1"}, "nobody has said in this session that it is short"
    assert len(in_force(node, mark)) > 2
    assert node.machine.ctx.redundancy.text == "replicas=1"


# --- a node -----------------------------------------------------------------------------------------------------------
def refused(node: Member, reason: str) -> list[ins.Instruction]:
    return node.feed(ev.ReplicaSent(at(7), 1, 1, "a", reason == "", reason))


def told(node: Member) -> list[tuple[bool, str]]:
    """Each once, however often it was repeated."""
    found = {(m.session, m.serial): (m.short, m.reason) for m in node.said(msg.Shortage, "a")}
    return list(found.values())


def test_a_node_says_once_that_there_is_no_memory_and_once_that_there_is_again() -> None:
    node = Member(record_of(), POLICY)
    refused(node, "full")
    assert told(node) == []
    refused(node, "no memory: 3 GiB of 2")
    refused(node, "no memory: 3 GiB of 2")
    assert told(node) == [(True, "a: no memory: 3 GiB of 2")]
    node.tick(CALM_S - 0.25)
    assert len(told(node)) == 1
    node.tick(0.5)
    assert told(node)[1:] == [(False, "")]
    node.tick(CALM_S)
    assert len(told(node)) == 2


def test_a_copy_that_succeeds_ends_the_shortage_and_a_new_session_hears_of_it_anew() -> None:
    node = Member(record_of(), POLICY)
    refused(node, "no memory")
    node.hello("s2")
    node.tick()
    assert [short for short, _ in told(node)] == [True, True]
    refused(node, "")
    assert [short for short, _ in told(node)] == [True, True, False]
    refused(node, "no memory")
    node.hello("s3")
    node.tick(CALM_S + 0.5)
    assert [short for short, _ in told(node)][3:] == [True, True, False]


def test_a_copy_that_a_drain_asked_for_is_no_shortage() -> None:
    """The whole job would give up a copy, and need no less memory for that."""
    node = Member(record_of("abcd"), POLICY, name="b")
    node.slots(1, 1, 2)
    node.capture(1, 7, rank=1)
    node.feed(ev.ReplicaSent(at(7), 1, 1, "a", True))
    (extra,) = only(node.order(msg.Holders(EPOCH, "", at(7), 1, (("b", 0),), 1)), ins.Replicate)
    node.feed(ev.ReplicaSent(at(7), 1, 1, extra.to, False, "no memory"))
    node.tick(1.0)
    assert told(node) == []


def test_lost_data_that_cannot_be_made_again_is_no_shortage_and_lost_parity_is() -> None:
    node = Member(record_of(), POLICY)
    shard = ParityShard(ParitySet(2, 0, 1, (ParityMember(0, 10, "x"), ParityMember(1, 10, "y"))), 0)
    node.feed(ev.ParityFailed(at(7), shard, True, "no memory"))
    assert told(node) == []
    node.feed(ev.ParityFailed(at(7), shard, False, "no memory"))
    assert told(node) == [(True, "b: no memory")]


def test_up_is_believed_when_a_snapshot_of_that_time_has_all_its_copies() -> None:
    node = steward().train().capture(7).protect(7)
    short(node)
    node.tick(DOWN_S + 0.5)
    short(node, False)
    node.tick(UP_S + 0.5)
    degradation = node.machine.steward.degradation._degradation
    assert degradation is not None and degradation.at == 0
    node.tick(2 * UP_S)
    assert degradation.trying, "step 7 was there before"
    node.capture(8).protect(8)
    node.tick(1.0)
    assert not degradation.trying


def test_up_is_believed_when_the_newest_snapshot_gets_the_copies_that_it_lacked() -> None:
    """No newer one may ever come: training has ended, or waits for the memory of an older one that is better protected."""
    node = steward().train().capture(7)
    short(node)
    node.tick(DOWN_S + 0.5)
    short(node, False)
    node.tick(2 * UP_S)
    degradation = node.machine.steward.degradation._degradation
    assert degradation is not None and (degradation.at, degradation.trying) == (0, True), "step 7 has no copy yet"
    node.protect(7)
    node.tick(1.0)
    assert not degradation.trying


def test_copies_are_proven_by_copies_and_not_by_the_parity_that_was_there_before_them() -> None:
    node = Steward(record_of("abc"), Policy(replicas=2, durable=False)).train().capture(7)
    node.tick(AFTERWARDS_S)
    short(node)
    node.tick(2 * DOWN_S + 1.0)
    degradation = node.machine.steward.degradation._degradation
    assert degradation is not None and degradation.redundancy.text == "xor(3)"
    short(node, False)
    for to, order in orders(node):
        make(node, to, order.shard)
    node.tick(UP_S + 1.0)
    assert node.level(7) == 1
    node.tick(2 * UP_S)
    assert degradation.redundancy.text == "replicas=1", "which has copied nothing"
    node.protect(7)
    node.tick(1.0)
    assert degradation.redundancy.text == "replicas=2"


def test_a_new_level_holds_from_the_moment_that_it_is_decided() -> None:
    """The steward's own orders of that moment are of it, although its message to itself is still on its way."""
    node = Steward(record_of("abc"), POLICY).train().capture(7)
    node.tick(AFTERWARDS_S)
    short(node)
    while not only(node.done, ins.Alarm):
        mark = node.mark
        node.tick()
        assert node.now < 1000
    asked = {type(do.message) for do in only(node.done[mark:], ins.Send) if do.to == "b"}
    assert msg.ParityOrder in asked
    assert msg.Holders not in asked, "copies are of the level before"
