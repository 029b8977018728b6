"""A rank waits for a step: what it missed is said again, and what a daemon lost amid a seal is void, not captured (P15)."""

from __future__ import annotations

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.asks import ASKS_MAX, OUTDONE, REPEAT_S, WAITED_FOR_S
from ckptd.core.protocol.machine.steward import table
from tests.core.certificates import steward
from tests.core.machines import EPOCH, Member, Steward, at, fact, only, record_of, usual_grant


@pytest.fixture
def node() -> Member:
    """Of ranks 0, 1 and 2 on nodes a, b and c; rank 1 is here."""
    member = Member(record_of("abc"), Policy(replicas=1, durable=False))
    member.slots(1, 1, 2)
    return member


def waits(step: int, grant: int = 0) -> ev.LevelAsked:
    """A rank says so, of what it captured."""
    return ev.LevelAsked(step, grant or usual_grant(step))


def asked(node: Member, since: int) -> list[SnapshotId]:
    return [ask.snapshot for ask in node.said(msg.LevelAsk, "a", since)]


def test_the_steward_is_asked_for_what_is_not_here_until_it_has_answered(node: Member) -> None:
    mark = node.mark
    node.feed(waits(7))
    node.tick(REPEAT_S)
    assert asked(node, mark) == [at(7), at(7)]
    node.order(msg.Void(EPOCH, 0, "nowhere", at(7)))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(7), -1, 0, False, "nowhere")]
    mark = node.mark
    node.tick(REPEAT_S)
    assert asked(node, mark) == []


def test_a_word_that_says_no_level_is_no_answer(node: Member) -> None:
    """That it lacks a part now: only a void says that it will never have one, and who holds nothing of it may have missed that."""
    node.feed(waits(7))
    node.order(msg.Certificate(EPOCH, 1, at(7), -1, 1, False))
    mark = node.mark
    node.tick(REPEAT_S)
    assert asked(node, mark) == [at(7)]
    node.order(msg.Certificate(EPOCH, 2, at(7), -1, 1, True))
    mark = node.mark
    node.tick(REPEAT_S)
    assert asked(node, mark) == [], "storage has it"


def test_nobody_is_asked_while_it_is_captured_or_held(node: Member) -> None:
    node.grant(7)
    mark = node.mark
    node.feed(waits(7))
    node.seal(1, 7, 1)
    node.tick(2 * REPEAT_S)
    assert asked(node, mark) == []


def test_nobody_is_asked_about_what_the_rank_itself_gave_up(node: Member) -> None:
    """Its reason was told; the steward's answer, that no memory holds it, took that one's place (a framework's author)."""
    node.grant(7)
    node.feed(waits(7), ev.RankMissed(1, usual_grant(7), "written before the fence: w", step=7))
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert asked(node, mark) == []


def test_another_capture_of_the_step_that_is_held_is_no_answer(node: Member) -> None:
    """Two ranks waited, one took the void step again first: that gave this one a slot, and nobody asked for it any more (P15)."""
    node.grant(7)
    mark = node.mark
    node.feed(waits(7, grant=9))
    node.seal(1, 7, 1)
    node.tick(REPEAT_S)
    assert asked(node, mark) == [at(7, grant=9)] * 2


def test_what_was_told_while_the_rank_was_away_is_told_again(node: Member) -> None:
    node.capture(1, 7, rank=1)
    node.order(msg.Certificate(EPOCH, 1, at(7), 1, 1, False))
    mark = node.mark
    node.feed(waits(7))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(7), 1, 1, False)]
    node.order(msg.Void(EPOCH, 0, "differs", at(8)))
    mark = node.mark
    node.feed(waits(8))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(8), -1, 0, False, "differs")]
    node.tick(2 * REPEAT_S)
    assert asked(node, mark) == []


def test_of_many_the_newest_are_asked_for(node: Member) -> None:
    for step in range(7, 7 + ASKS_MAX + 3):
        node.feed(waits(step), ev.FlushAsked(step))
    mark = node.mark
    node.tick(REPEAT_S)
    newest = list(range(10, 7 + ASKS_MAX + 3))
    assert [snapshot.step for snapshot in asked(node, mark)] == newest
    assert [ask.step for ask in node.said(msg.FlushAsk, "a", mark)] == newest


def answer(node: Steward, snapshot: SnapshotId) -> list[str]:
    mark = node.mark
    node.hear("b", msg.LevelAsk(EPOCH, snapshot))
    return [void.reason for void in node.said(msg.Void, "b", mark) if void.snapshot == snapshot]


def test_what_nobody_holds_is_void_for_whoever_waits_for_it() -> None:
    node = steward().train(6)
    lost = at(7, grant=99)
    (why,) = answer(node, lost)
    assert why.startswith("no memory holds any of it")
    node.others["b"].held(fact(7, 1))
    assert answer(node, lost), "the same step under another grant"
    node.capture(8)
    assert answer(node, lost), "training went on, and a rank asks only now"


def test_what_is_void_and_held_by_others_is_void_for_whoever_waits_for_it() -> None:
    """They alone heard: it is said to nodes that hold a part of it."""
    node = steward(record_of("abc")).train(6)
    node.others["b"].sealed(node.granted(7), 7, 1)
    node.feed(ev.RankMissed(0, node.granted(7), "its daemon was killed"))
    mark = node.mark
    node.hear("c", msg.LevelAsk(EPOCH, at(7)))
    assert [void.snapshot for void in node.said(msg.Void, "c", mark) if void.snapshot] == [at(7)]


def test_a_level_that_was_missed_is_told_to_whoever_waits_for_it() -> None:
    """Certificates are said again at most every two seconds, and after a while every thirty."""
    node = steward().train(6).capture(7)
    mark = node.mark
    assert not answer(node, at(7))
    assert [(told.snapshot, told.level) for told in node.certificates("b", mark)] == [(at(7), 0)]


def test_what_a_grant_may_bring_yet_is_not_meant() -> None:
    """P2: a daemon that was restarted asked; the grant for the second capture was on its way (simulator, seed 62147)."""
    node = steward().train(6)
    assert not answer(node, at(7)) and answer(node, at(7, grant=99))


def test_what_was_outdone_is_void_for_whoever_missed_its_level() -> None:
    """P15: the link of a third node blinked meanwhile (a reader's history)."""
    node = steward().train(6).capture(7).protect(7).capture(8).protect(8)
    assert at(7) in node.machine.steward.table.released
    mark = node.mark
    assert not answer(node, at(7)), "it was no mistake, and others may have been told a level"
    assert [told.releases for told in node.certificates("b", mark) if told.snapshot == at(7)] == [(at(7),)]


def test_what_was_outdone_long_ago_is_no_mistake_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node asks for seconds after its rank has its answer, and small models make ten snapshots a second."""
    monkeypatch.setattr(table, "RELEASED_KEPT_MAX", 2)
    node = steward().train(6)
    for step in range(7, 12):
        node.capture(step).protect(step)
    assert list(node.machine.steward.table.released) == [at(9), at(10)]
    assert not answer(node, at(7))


def test_a_rank_that_waits_for_what_was_outdone_hears_so(node: Member) -> None:
    """P15: step 8 became durable in its place, and step 7 never will be (a reader's history)."""
    node.capture(1, 7, rank=1)
    node.certify(1, 7, 1)
    node.certify(2, 8, 1, releases=(at(7),))
    mark = node.mark
    node.feed(waits(7))
    assert [(told.snapshot, told.void) for told in only(node.done[mark:], ins.TellLevel)] == [(at(7), OUTDONE)]
    node.certify(3, 8, 1, durable=True)
    node.order(msg.Certificate(EPOCH, 4, at(7), -1, 1, True))
    mark = node.mark
    node.feed(waits(7))
    assert only(node.done[mark:], ins.TellLevel) == [ins.TellLevel(at(7), -1, 1, True)]


def test_what_was_outdone_is_void_unless_storage_has_it(node: Member) -> None:
    """Its memory went for a newer one: whoever waits for it to be durable must not hear that it never will be."""
    node.certify(1, 7, 1, durable=True)
    node.certify(2, 9, 1, releases=(at(7), at(8)))
    mark = node.mark
    node.feed(waits(7), waits(8))
    told = [(told.snapshot, told.durable, told.void) for told in only(node.done[mark:], ins.TellLevel)]
    assert told == [(at(7), True, ""), (at(8), False, OUTDONE)]


def test_what_was_waited_for_in_one_epoch_is_not_asked_for_in_the_next(node: Member) -> None:
    """Step 7 of that one is another one: it would be flushed, or void, for nobody."""
    node.feed(waits(7), ev.FlushAsked(7))
    node.record = record_of("abc", number=EPOCH + 1, nonce="then")
    node.hear("a", msg.Stale(node.record))
    node.hello("s2")
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert node.said(msg.LevelAsk, "a", mark) == node.said(msg.FlushAsk, "a", mark) == []


def test_a_rank_that_was_told_a_level_and_waits_on_is_asked_for_when_that_fell(node: Member) -> None:
    """P15: its own slot was damaged, and the void goes to who holds something of it (a reader's history)."""
    node.capture(1, 7, rank=1)
    node.feed(waits(7))
    node.certify(1, 7, 0)
    node.feed(ev.SlotDamaged(1, "bit flip"))
    node.certify(2, 7, -1)
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert asked(node, mark) == [at(7)] * 2


def test_whoever_says_no_more_that_he_waits_is_asked_for_no_more(node: Member) -> None:
    node.feed(waits(7))
    node.tick(WAITED_FOR_S / 2)
    node.feed(waits(7))
    node.tick(WAITED_FOR_S - REPEAT_S)
    mark = node.mark
    node.tick(WAITED_FOR_S)
    assert len(asked(node, mark)) <= 1


def test_nothing_is_void_for_that_while_a_member_is_away() -> None:
    node = steward().train(6)
    node.feed(ev.NodeDown("b"))
    assert not answer(node, at(7, grant=9))


def test_nor_while_storage_may_have_what_somebody_was_told_a_level_of() -> None:
    node = steward(durable=True)
    node.others["b"].tell_inventory(certified=((at(7, grant=8), 0, False), (at(7, grant=9), -1, False)))
    assert not answer(node, at(7, grant=8)) and answer(node, at(7, grant=9))
    node.feed(ev.DurableRead("", True, node.record, ()))
    assert answer(node, at(7, grant=8))


def test_a_step_to_become_durable_is_said_at_once_and_until_one_as_new_is(node: Member) -> None:
    def flushes(since: int) -> list[int]:
        return [ask.step for ask in node.said(msg.FlushAsk, "a", since)]

    mark = node.mark
    node.feed(ev.FlushAsked(7))
    assert flushes(mark) == [7]
    node.feed(ev.FlushAsked(8))
    assert flushes(mark) == [7, 7, 8], "another one waits for no repetition"
    node.order(msg.Certificate(EPOCH, 1, at(7), 0, 0, True))
    mark = node.mark
    node.tick(REPEAT_S)
    assert flushes(mark) == [8]
    node.order(msg.Certificate(EPOCH, 2, at(8), 0, 0, True))
    mark = node.mark
    node.tick(REPEAT_S)
    assert flushes(mark) == []
