"""What nobody has heard is said again: how often, and how much of it (design D9)."""

from __future__ import annotations

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.uplink import RESENT_MAX
from tests.core.machines import EPOCH, Member, record_of
from tests.core.test_sessions import POLICY


@pytest.fixture
def node() -> Member:
    return Member(record_of("abc"), POLICY)


def test_what_nobody_heard_is_said_again(node: Member) -> None:
    mark = node.mark
    node.tick(0.25)
    assert node.said(msg.RankState, "a", mark) == []
    node.tick(0.25)
    assert [m.serial for m in node.said(msg.RankState, "a", mark)] == [1]
    node.order(msg.Ack(EPOCH, "s1", 0))
    mark = node.mark
    node.tick(1.0)
    assert node.said(msg.Inventory, "a", mark) == [], "that one was heard"
    assert len(node.said(msg.RankState, "a", mark)) == 1
    node.order(msg.Ack(EPOCH, "s1", 1))
    mark = node.mark
    node.tick(1.0)
    assert node.said(msg.RankState, "a", mark) == []


def said_again(node: Member, seconds: float) -> list[float]:
    """After how long, looking four times a second."""
    times = []
    for tick in range(1, int(seconds * 4) + 1):
        mark = node.mark
        node.tick(0.25)
        times += [tick / 4] * bool([m for m in node.said(msg.RankState, "a", mark) if m.session])
    return times


def test_a_steward_that_is_behind_is_told_again_less_and_less_often(node: Member) -> None:
    """Seed 8953534978: a third of what reached it had been said before, which kept it behind, and each grant came too late."""
    assert said_again(node, 16.0) == [0.5, 1.5, 3.5, 7.5, 15.5]
    assert said_again(node, 24.0) == [7.5, 15.5, 23.5]
    node.feed(ev.RankProgress(1, 3))
    node.order(msg.Ack(EPOCH, "s1", 1))
    assert said_again(node, 8.0) == [8.0], "there is more that it has not heard"
    node.order(msg.Ack(EPOCH, "s1", 2))
    node.feed(ev.RankProgress(1, 4))
    assert said_again(node, 2.0) == [0.5, 1.5], "it had heard all: what is lost now was lost on the way"
    node.hear("a", msg.OpenSession(EPOCH, "s2"))
    assert said_again(node, 2.0) == [0.5, 1.5], "a new session"


def test_a_steward_that_hears_us_by_and_by_is_not_told_again(node: Member) -> None:
    for step in range(8):
        node.feed(ev.RankProgress(1, step))
    for serial in range(8):
        assert said_again(node, 0.25) == []
        node.order(msg.Ack(EPOCH, "s1", serial))
    assert said_again(node, 0.25) == []


def test_only_so_many_are_said_again_at_once(node: Member) -> None:
    node.slots(1, 1)
    for step in range(RESENT_MAX + 9):
        node.feed(ev.RankProgress(1, step))
    mark = node.mark
    node.tick(0.5)
    assert (
        len(node.said(msg.RankState, "a", mark)) + len(node.said(msg.Inventory, "a", mark)) == RESENT_MAX
    )
