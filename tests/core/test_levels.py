"""What a certificate does on a node: ranks are told the level, memory that it releases goes (P2, P3)."""

from __future__ import annotations

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.levels import CERTIFICATES_KEPT_MAX, RELEASED_KEPT_MAX, forget_oldest
from tests.core.machines import EPOCH, Member, at, layout, only, record_of


@pytest.fixture
def node() -> Member:
    return Member(record_of())


def told(done: list[ins.Instruction]) -> list[tuple[int, int, bool]]:
    return [(do.snapshot.step, do.level, do.durable) for do in only(done, ins.TellLevel)]


def test_a_level_is_told_once_and_again_when_it_changes(node: Member) -> None:
    assert told(node.certify(1, 7, 0)) == [(7, 0, False)]
    assert told(node.certify(2, 7, 0)) == []
    assert told(node.certify(3, 7, 1)) == [(7, 1, False)]
    assert told(node.certify(4, 7, 1, durable=True)) == [(7, 1, True)]
    assert told(node.certify(5, 7, 0, durable=True)) == [(7, 0, True)], "a level that falls is reported (P2)"


def test_an_earlier_certificate_that_comes_late_says_nothing(node: Member) -> None:
    node.certify(8, 7, 1)
    assert told(node.certify(7, 7, 0)) == []
    assert node.machine.levels.certified() == ((at(7), 1, False),)
    assert told(node.certify(6, 8, 0)) == [(8, 0, False)], "serials count for each snapshot"


def test_a_new_session_counts_anew(node: Member) -> None:
    node.certify(8, 7, 1)
    node.hello("s2")
    assert told(node.certify(1, 7, 0)) == [(7, 0, False)]
    assert told(node.certify(1, 7, 1, session="s1")) == [], "the steward of before is not obeyed"


def test_a_void_snapshot_is_not_reported_as_sealed(node: Member) -> None:
    """The certificate was on its way when the snapshot became void (P2)."""
    node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    assert told(node.certify(1, 7, 0)) == []
    assert told(node.certify(2, 7, -1)) == [(7, -1, False)]


def test_what_is_void_is_not_listed_with_a_level_whatever_word_was_lost(node: Member) -> None:
    """To a node that had missed the certificate it was the newest complete one: memory was spared for it (a reader's history)."""
    node.slots(1, 1, 2)
    node.capture(1, 6, rank=1)
    node.certify(1, 6, 1)
    node.capture(2, 7, rank=1)
    node.certify(2, 7, 0)
    node.order(msg.Void(EPOCH, 0, "nowhere", at(7)))
    assert node.machine.levels.certified() == ((at(6), 1, False), (at(7), -1, False))
    assert node.machine.lifetime.complete() == at(6)


def test_what_a_certificate_releases_goes(node: Member) -> None:
    node.slots(1, 1, 2)
    node.capture(1, 7, rank=1)
    node.capture(2, 8, rank=1)
    assert only(node.certify(1, 8, 0), ins.FreeSlot) == []
    assert only(node.certify(2, 8, 0, releases=(at(7),)), ins.FreeSlot) == [ins.FreeSlot(1)]
    assert set(node.machine.levels.released) == {at(7)}


@pytest.mark.parametrize("heard", [False, True])
def test_what_was_not_heard_of_before_it_was_released_is_said_to_be_gone(node: Member, heard: bool) -> None:
    """Somebody who had missed the release brought copies back, and the steward counted one that it heard of late, whose slot had
    gone with the release (P2; simulator, seed 2671577789 of that day)."""
    node.feed(ev.ReplicaArrived(at(6), 0, 1, 60, layout(0), ()))
    node.feed(ev.ReplicaArrived(at(7), 0, 1, 70, layout(0), ()))
    if heard:
        node.order(msg.Ack(EPOCH, node.session, node.said(msg.Held, "a")[-1].serial))
    freed = only(node.certify(1, 8, 0, releases=(at(7),)), ins.FreeSlot)
    assert freed == [ins.FreeSlot(70)]
    told = [(m.fact.snapshot.step, m.lost) for m in node.said(msg.Held, "a")]
    assert told == [(6, False), (7, False), *([] if heard else [(7, True)])]


def test_a_steward_that_finds_a_released_one_held_takes_it_back_into_the_list(node: Member) -> None:
    """A new steward, or the same one when somebody who had missed the release came back with copies."""
    node.certify(1, 7, 1)
    node.certify(3, 8, 1, releases=(at(7),))
    node.certify(2, 7, 1)
    assert at(7) in node.machine.levels.released, "said before it was released"
    node.certify(4, 7, 0)
    assert at(7) not in node.machine.levels.released
    node.certify(5, 8, 1, releases=(at(7),))
    node.hello("s2")
    node.certify(1, 7, 0)
    assert at(7) not in node.machine.levels.released


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(node: Member) -> None:
    for step in range(CERTIFICATES_KEPT_MAX + 3):
        node.certify(1 + step, step, 0)
    assert [s.step for s, _, _ in node.machine.levels.certified()] == list(
        range(3, CERTIFICATES_KEPT_MAX + 3)
    )
    gone = tuple(at(step) for step in range(RELEASED_KEPT_MAX + 2))
    node.certify(1000, 2000, 0, releases=gone)
    assert list(node.machine.levels.released) == list(gone[2:])


def test_the_newest_durable_one_is_remembered_however_many_come_after_it(node: Member) -> None:
    """It is what a loss of all memory would come back to (P15)."""
    for step in (1, 2):
        node.certify(step, step, 0, durable=True)
    node.certify(3, 0, 0, durable=True)
    for step in range(10, CERTIFICATES_KEPT_MAX + 20):
        node.certify(step, step, 0)
    assert node.machine.levels.newest_durable_step() == 2
    assert [s.step for s, _, durable in node.machine.levels.certified() if durable] == [2]
    assert len(node.machine.levels.told) == CERTIFICATES_KEPT_MAX


def test_the_newest_durable_step_is_one_of_this_epoch(node: Member) -> None:
    levels = node.machine.levels
    assert levels.newest_durable_step() == -1
    node.certify(1, 90, 0, durable=True, epoch=EPOCH - 1)
    node.certify(2, 7, 0, durable=True)
    node.certify(3, 9, 1)
    assert levels.newest_durable_step() == 7


def test_what_is_held_stays_in_the_list_however_many_come_after_it() -> None:
    """P15: restore(step=3) found it, and no list named it (a trainer's author)."""
    told = {at(step): ins.TellLevel(at(step), 0, 0, False) for step in range(3, 9)}
    forget_oldest(told, 2, lambda _: True, {at(3), at(4), at(5)})
    assert list(told) == [at(3), at(4), at(5)]
    forget_oldest(told, 2, lambda _: True)
    assert list(told) == [at(4), at(5)]
