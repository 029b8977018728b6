"""What is certified, durable or void is said until it is heard, and no more (P2, P4)."""

from __future__ import annotations

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward import certify
from ckptd.core.protocol.machine.steward.certify import IDLE_S, RELEASES_NAMED_MAX, REPEAT_S, REPEATS_LIVELY
from ckptd.core.protocol.machine.steward.table import FALLEN_KEPT_MAX
from tests.core.certificates import BOTH, OLD, OLD_ONES, released, steward
from tests.core.machines import EPOCH, TICK_S, Steward, at, fact, layout, only, record_of

POLICY = Policy(replicas=1, durable=False)


# --- said again and again -------------------------------------------------------------------------------------------
def test_certificates_are_repeated_lively_at_first_and_then_seldom() -> None:
    node = steward().train().capture(7).protect(7)
    mark = node.mark
    node.tick(REPEAT_S * REPEATS_LIVELY)
    assert REPEATS_LIVELY - 2 <= len(node.certificates("b", mark)) <= REPEATS_LIVELY + 1
    node.tick(3 * REPEAT_S)
    mark = node.mark
    node.tick(2 * IDLE_S)
    assert 1 <= len(node.certificates("b", mark)) <= 3
    node.hear("b", msg.FlushAsk(EPOCH, 7))
    mark = node.mark
    node.tick(IDLE_S / 2)
    assert len(node.certificates("b", mark)) > 3, "somebody asks: it may have missed the answer"
    mark = node.mark
    node.tick(IDLE_S)
    node.capture(8)
    mark = node.mark
    node.tick(IDLE_S / 2)
    assert len(node.certificates("b", mark)) > 3, "something new"


def test_copies_that_thousands_of_ranks_lack_are_asked_for_one_snapshot_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """P16: 4,096 ranks lacked copies of four snapshots each, which were 16,344 messages of one tick (0.3 s)."""
    monkeypatch.setattr(certify, "ASKED_AT_ONCE_MAX", 0)
    node = steward(own_slots=4, peer_sets=3).train().capture(7).capture(9)
    node.tick(REPEAT_S)
    told: list[list[int]] = []
    for _ in range(round(2 * REPEAT_S / TICK_S)):
        mark = node.mark
        node.tick()
        asked = {asked.snapshot.step for to in "ab" for asked in node.said(msg.Holders, to, mark)}
        assert asked <= {certificate.snapshot.step for certificate in node.certificates("b", mark)}
        told += [sorted(asked)] * bool(asked)
    assert told == [[7], [9]] * 2


@pytest.mark.parametrize("order", ["bd", "db"])
def test_who_still_believes_in_a_level_hears_that_it_fell_whoever_knows_already(order: str) -> None:
    """The steward died between its words to them; to the next one the last answer counted (P2; a reader's history)."""
    node = Steward(record_of("abcd"), POLICY)
    node.feed(ev.NodeDown("c"))
    for name in order:
        rank, level = "abcd".index(name), -1 if name == "b" else 1
        layouts = [layout(rank, 4) for rank in range(4)]
        node.others[name].tell_inventory(fact(7, rank, world=4), layouts=layouts, certified=((at(7), level, False),))
    node.tick(5.0)
    assert node.level(7, to="d") == -1


def test_who_lists_what_nobody_holds_hears_that_it_fell() -> None:
    """All who held it are gone, and the steward with them (P2; a reader's history)."""
    node = Steward(record_of("ab", outside="d"), POLICY)
    node.others["b"].tell_inventory()
    node.others["d"].tell_inventory(certified=((at(6), 1, False), (at(7), 1, False)))
    assert (node.level(7, to="d"), node.level(6, to="d")) == (-1, -1)


def test_who_lists_what_nobody_holds_hears_it_again_until_a_newer_one_is_certified() -> None:
    """That word may be lost as well, and until its link goes nobody asks again what it lists (P2)."""
    node = steward(record_of("ab", outside="d")).train().capture(7)
    node.feed(ev.NodeDown("d"), ev.NodeUp("d"))
    node.others["d"].tell_inventory(certified=((at(8), 1, False),))
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert {c.level for c in node.certificates("d", mark) if c.snapshot == at(8)} == {-1}
    mark = node.mark
    node.capture(9)
    assert at(8) in {one for c in node.certificates("d", mark) for one in c.releases}


def test_who_lists_what_nobody_holds_any_more_beside_a_newer_one_hears_that_it_is_gone() -> None:
    """It missed the release, and the steward that knew of it is gone: it would show that as protected for ever (P2)."""
    node = steward(record_of("ab", outside="d")).train().capture(7).protect(7)
    listed = [SnapshotId(EPOCH, step) for step in range(-60, 6)]
    mark = node.mark
    node.feed(ev.NodeDown("d"), ev.NodeUp("d"))
    node.others["d"].tell_inventory(certified=tuple((one, 1, False) for one in (*listed, at(7))))
    said = node.certificates("d", mark)
    assert {one for c in said for one in c.releases} == set(listed)
    assert max(len(c.releases) for c in said) <= RELEASES_NAMED_MAX
    assert node.level(7, to="d") == 1
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    again = {one for c in node.certificates("d", mark) if c.snapshot == at(7) for one in c.releases}
    assert again == set(listed[-FALLEN_KEPT_MAX:]), "that word may be lost (simulator, seed 43382391723)"


def test_who_shows_what_was_lost_before_it_could_be_read_hears_that_it_fell() -> None:
    """Whoever held a part of it came back without, and the part's layout had not arrived: it was forgotten in silence (P2; seed
    1803)."""
    old = at(5, OLD)
    node = steward(record_of("ab", outside="d", ancestry=(old,)))
    node.others["d"].tell_inventory(fact(5, 0, epoch=OLD, world=3))
    node.others["b"].tell_inventory(certified=((old, 1, True),))
    node.train().capture(7)
    assert node.level(5, epoch=OLD) is None, "it cannot be read yet"
    node.tick(1.0)
    node.hear("d", msg.Inventory("", node.record, ()))  # it knows of no session
    node.others["d"].tell_inventory()
    node.tick(REPEAT_S + 0.5)
    said = node.certificates("b")
    assert old in {one for c in said for one in c.releases} or node.level(5, epoch=OLD) == -1


def test_who_missed_that_something_is_void_hears_that_it_fell() -> None:
    node = steward(record_of("abc"), replicas=0).train().capture(7)
    for name, rank in (("b", 1), ("c", 2)):
        node.others[name].held(fact(7, rank, world=3), lost=True)
    assert {v.snapshot for v in node.said(msg.Void, "a")} == {at(7)}
    mark = node.mark
    node.feed(ev.NodeDown("c"), ev.NodeUp("c"))
    node.others["c"].tell_inventory(certified=((at(7), 0, False),))
    assert [c.level for c in node.certificates("c", mark) if c.snapshot == at(7)] == [-1]


def test_that_something_void_fell_is_said_again_when_nobody_holds_it_any_more() -> None:
    """Who missed that word went on showing a level of it for ever (P2)."""
    node = steward(record_of("abc"), replicas=0).train().capture(7)
    for name, rank in (("b", 1), ("c", 2)):
        node.others[name].held(fact(7, rank, world=3), lost=True)
    assert at(7) not in node.machine.steward.table.states
    for _ in range(2):
        mark = node.mark
        node.tick(REPEAT_S + 0.5)
        assert {c.level for c in node.certificates("c", mark) if c.snapshot == at(7)} == {-1}
    mark = node.mark
    node.capture(8)
    assert {one for c in node.certificates("c", mark) for one in c.releases} == {at(7)}, "from then on a newer one names it"
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert {c.snapshot for c in node.certificates("c", mark)} == {at(8)}


def test_nothing_is_repeated_while_somebody_has_not_told_what_it_holds() -> None:
    node = steward().train().capture(7).protect(7)
    node.tick(1.0)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    mark = node.mark
    node.tick(REPEAT_S + 1.0)
    assert node.certificates("a", mark) == []


def test_whoever_holds_a_part_is_asked_for_the_copies_that_are_missing() -> None:
    node = steward().train().capture(7)
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert node.said(msg.Holders, "b", mark)[0] == msg.Holders(
        EPOCH, node.others["b"].session, at(7), 1, (("b", 0),)
    )
    assert {m.rank for m in node.said(msg.Holders, "a", mark)} == {0}


def test_only_for_the_ranks_that_lack_one() -> None:
    node = steward().train().capture(7)
    node.copy(7, 0, to="b")
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert {m.rank for m in node.said(msg.Holders, since=mark)} == {1}


def test_nobody_is_asked_for_copies_of_what_is_protected_or_was_left_behind() -> None:
    node = steward().train().capture(7).protect(7)
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert node.said(msg.Holders, since=mark) == []
    node = steward()
    node.others["b"].tell_inventory(*OLD_ONES[1], layouts=BOTH)
    node.tick(REPEAT_S + 0.5)
    assert (node.level(5, epoch=OLD), node.said(msg.Holders)) == (0, [])


def test_a_void_is_said_again_to_who_holds_it() -> None:
    node = steward().train().capture(7).capture(8, 0)
    node.others["b"].missed(node.granted(8), 1, "no memory")
    assert [v.snapshot for v in node.said(msg.Void, "a") if v.snapshot] == [at(8)]
    assert only(node.done, ins.FreeSlot), "rank 0's slot is free again"
    assert at(8) not in node.machine.steward.table.states, "nobody holds it any more"


def test_a_void_is_repeated_until_nobody_holds_it() -> None:
    node = steward().train()
    node.others["b"].sealed(node.granted(7), 7, 1)
    node.feed(ev.RankMissed(0, node.granted(7), "no memory"))
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert {v.snapshot for v in node.said(msg.Void, "b", mark)} >= {at(7)}
    node.others["b"].held(fact(7, 1), lost=True)
    mark = node.mark
    node.tick(2 * REPEAT_S)
    assert [v for v in node.said(msg.Void, "b", mark) if v.snapshot] == []


# --- what is durable --------------------------------------------------------------------------------------------------
def test_what_is_durable_is_told_to_a_node_that_does_not_know_it() -> None:
    """When no memory holds it any more nothing else names it."""
    node = steward().greet()
    node.machine.steward.table.mark_durable([at(3), at(2)])
    node.tick(REPEAT_S + 0.5)
    said = node.certificates("b")
    assert {(c.snapshot, c.durable, c.level) for c in said} == {(at(3), True, -1)}
    assert said[0].session == node.others["b"].session


def test_what_is_durable_is_not_told_to_a_node_that_said_so_itself() -> None:
    node = steward()
    node.others["b"].tell_inventory(certified=((at(3), -1, True), (at(2), -1, True), (at(4), -1, False)))
    node.tick(REPEAT_S + 0.5)
    assert node.certificates("b") == []
    node.machine.steward.table.mark_durable([at(4)])
    node.tick(REPEAT_S + 0.5)
    assert {c.snapshot for c in node.certificates("b")} == {at(4)}


def test_a_certificate_that_says_durable_is_not_said_twice() -> None:
    node = steward(replicas=0).train().capture(7)
    node.machine.steward.table.mark_durable([at(7)])
    node.capture(8)
    assert released(node) == {7}
    assert [c.durable for c in node.certificates() if c.snapshot == at(7)][-1]
    mark = node.mark
    node.tick(REPEAT_S + 0.5)
    assert {c.snapshot for c in node.certificates("b", mark)} == {at(8)}


def test_a_certificate_of_what_is_in_memory_only_says_nothing_of_older_durable_ones() -> None:
    node = steward().train().capture(7)
    assert node.level(7) == 0
    node.machine.steward.table.mark_durable([at(3)])
    node.machine.steward.certify._durable_told.clear()
    node.tick(REPEAT_S + 0.5)
    mark = node.mark
    node.copy(7, 0, "b")
    node.copy(7, 1, "a")
    node.machine.steward.table.mark_durable([at(4)])
    node.tick(REPEAT_S + 0.5)
    assert (at(4), True) in {(c.snapshot, c.durable) for c in node.certificates("b", mark)}


@pytest.mark.parametrize("level", [1, -1])
def test_a_node_that_began_anew_hears_again_what_is_durable(level: int) -> None:
    node = steward()
    node.others["b"].tell_inventory(certified=((at(3), level, True),))
    node.hear("b", msg.Inventory("", node.record, ()))
    node.tick(1.0)
    mark = node.mark
    node.others["b"].tell_inventory()
    node.tick(REPEAT_S + 0.5)
    assert {c.snapshot for c in node.certificates("b", mark)} == {at(3)}


def test_each_certificate_of_a_steward_has_a_greater_number() -> None:
    """A node that hears them out of order believes the newest."""
    node = steward().train().capture(7).protect(7)
    node.others["b"].held(fact(7, 0, 1), lost=True)
    numbers = list(dict.fromkeys((c.level, c.serial) for c in node.certificates("b")))
    assert [level for level, _ in numbers] == [0, 1, 0]
    assert len({serial for _, serial in numbers}) == 3
    assert numbers == sorted(numbers, key=lambda one: one[1])


def test_a_durable_one_of_another_lineage_is_not_told() -> None:
    node = steward().greet()
    node.machine.steward.table.mark_durable([SnapshotId(OLD, 3)])
    node.tick(REPEAT_S + 0.5)
    assert node.certificates("b") == []


def test_what_went_before_its_turn_came_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificates were to be said again, one snapshot in a tick, and it is no more."""
    monkeypatch.setattr(certify, "ASKED_AT_ONCE_MAX", 0)
    node = steward(own_slots=4, peer_sets=3).train().capture(7).capture(9)
    node.tick(REPEAT_S)
    node.machine.steward.certify._to_repeat.append(at(8))
    mark = node.mark
    for _ in range(4):
        node.tick()
    assert {certificate.snapshot.step for certificate in node.certificates("b", mark)} >= {9}
