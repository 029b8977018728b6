"""A rank waits for a step: what it missed is said again, and what a daemon lost amid a seal is void, not captured (P15)."""

from __future__ import annotations

import pytest

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core import messages as msg
from ckptd.core.machine.flush_asks import REPEAT_S
from ckptd.core.policy import Policy
from tests.core.certificates import steward
from tests.core.machines import EPOCH, Member, Steward, at, fact, only, record_of


@pytest.fixture
def node() -> Member:
    """Of ranks 0, 1 and 2 on nodes a, b and c; rank 1 is here."""
    member = Member(record_of("abc"), Policy(replicas=1, durable=False))
    member.slots(1, 1, 2)
    return member


def asked(node: Member, since: int) -> list[tuple[int | None, bool]]:
    return [(ask.step, ask.durable) for ask in node.said(msg.FlushAsk, "a", since)]


def test_the_steward_is_asked_for_what_is_not_here_until_it_has_answered(node: Member) -> None:
    mark = node.mark
    node.feed(ev.FlushAsked(7, durable=False))
    node.tick(REPEAT_S)
    assert asked(node, mark) == [(7, False), (7, False)]
    node.order(msg.Void(EPOCH, 0, "nowhere", at(7)))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "nowhere")]
    mark = node.mark
    node.tick(REPEAT_S)
    assert asked(node, mark) == []


def test_nobody_is_asked_while_it_is_captured_or_held(node: Member) -> None:
    node.grant(7)
    mark = node.mark
    node.feed(ev.FlushAsked(7, durable=False))
    node.seal(1, 7, 1)
    node.tick(2 * REPEAT_S)
    assert asked(node, mark) == []


def test_what_was_told_while_the_rank_was_away_is_told_again(node: Member) -> None:
    node.capture(1, 7, rank=1)
    node.order(msg.Certificate(EPOCH, 1, at(7), 1, 1, False))
    mark = node.mark
    node.feed(ev.FlushAsked(7, durable=False))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(7), 1, 1, False)]
    node.order(msg.Void(EPOCH, 0, "differs", at(8), newest=1))
    mark = node.mark
    node.feed(ev.FlushAsked(8, durable=True))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(8), -1, 0, False, "differs")]
    node.tick(2 * REPEAT_S)
    assert asked(node, mark) == [], "what is void does not become durable"


def answer(node: Steward, step: int) -> list[msg.Void]:
    mark = node.mark
    node.hear("b", msg.FlushAsk(EPOCH, step, durable=False))
    return [void for void in node.said(msg.Void, "b", mark) if void.snapshot == at(step)]


def test_what_nobody_holds_is_void_for_whoever_waits_for_it() -> None:
    node = steward().train(6)
    assert answer(node, 7)
    node.others["b"].held(fact(7, 1))
    assert not answer(node, 7), "in parts; the rest may be on its way"
    assert not answer(node, 6), "a newer one may have taken its place"


def test_what_a_grant_may_bring_yet_is_not_meant() -> None:
    """P2: a daemon that was restarted asked; the grant for the second capture was on its way (simulator, seed 62147)."""
    node = steward().train(6)
    (void,) = answer(node, 7)
    assert void.newest == node.granted(7) - 1
    (void,) = answer(node, 100)
    assert void.newest == node.granted(7) - 1, "any may be for that"


def test_nothing_is_void_for_that_while_a_member_is_away_or_a_grant_stands() -> None:
    node = steward().train(6)
    grant = node.granted(7)
    node.others["b"].sealed(grant, 7, 1)
    node.others["b"].held(fact(7, 1), lost=True)
    assert not answer(node, 7), "rank 0 may still seal it, and rank 1 has"
    node = steward().train(6)
    node.feed(ev.NodeDown("b"))
    assert not answer(node, 7)
