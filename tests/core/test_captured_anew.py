"""A step that is captured twice, as its first capture was void, and a copy of that one that comes late (P2)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core import messages as msg
from ckptd.core.lanes import Part, joined_digests, part_layout
from ckptd.core.layout import Layout
from ckptd.core.layout_build import build_layout
from ckptd.core.machine.steward.certify import REPEAT_S
from tests.core import flushes, parity_rig
from tests.core.certificates import BOTH, OLD, steward
from tests.core.machines import EPOCH, Steward, at, fact, layout, only, record_of

BEFORE_IT, ANEW = (("o:loader", b"1" * 16),), (("o:loader", b"2" * 16),)


def captured_anew(*, late_first: bool) -> Steward:
    """Step 7 was void and is captured anew; the copy of rank 0 on node b, which nobody had heard of, is of the first capture."""
    node = steward().train(6)
    if late_first:
        node.others["b"].held(fact(7, 0, 1, digests=BEFORE_IT))
    grant = node.granted(7)
    slot = next(do.slot for do in only(node.done, ins.GiveSlot) if (do.grant, do.rank) == (grant, 0))
    node.feed(ev.SlotSealed(0, slot, grant, 7, layout(0), ANEW))
    node.capture(7, 1)
    node.copy(7, 1, to="a")
    return node


def test_a_late_copy_of_a_void_capture_makes_nothing_whole_with_the_second_one() -> None:
    """P2: the two were certified as one at level 1, and a restore refused them as copies that differ (a reader's history)."""
    node = captured_anew(late_first=True)
    assert node.level(7) is None
    assert {void.snapshot for void in node.said(msg.Void, "b")} == {at(7)}, "so that node b lets go of it"
    for lost in (fact(7, 0, 1), fact(7, 1)):
        node.others["b"].held(lost, lost=True)
    assert at(7) not in node.machine.steward.table.states, "it may be captured anew"


def test_a_late_copy_of_a_void_capture_does_not_count_for_what_was_certified_since() -> None:
    node = captured_anew(late_first=False)
    assert node.level(7) == 0
    node.others["b"].held(fact(7, 0, 1, digests=BEFORE_IT))
    assert (node.level(7), [void for void in node.said(msg.Void, "b") if void.snapshot]) == (0, [])
    node.others["b"].held(fact(7, 0, 1, digests=ANEW))
    assert node.level(7) == 1
    node.others["b"].held(fact(7, 0, 1, digests=BEFORE_IT))
    assert node.level(7) == 0, "it holds the other one now"


def test_copies_that_differ_of_an_earlier_epoch_are_not_void_for_that() -> None:
    """A restore goes by the full slot, and may have continued just this one."""
    node = steward(record_of("ab", ancestry=(at(7, OLD),)))
    node.feed(ev.HoldingFound(9, at(7, OLD), 0, 0, True, layout(0), ANEW))
    held = fact(7, 0, 1, epoch=OLD, digests=BEFORE_IT), fact(7, 1, epoch=OLD)
    node.others["b"].tell_inventory(*held, layouts=BOTH)
    assert (node.level(7, epoch=OLD), node.said(msg.Void)) == (0, [])


def anew(node: Steward, free: int = 4) -> int:
    """Both ranks wait for step 7 again. The grant."""
    node.feed(ev.RankProgress(0, 7, asks=True))
    node.others["b"].state(1, 7, free=free, asks=7)
    grants = node.machine.steward.grants.open
    for _ in range(8):
        for number in [number for number, grant in grants.items() if grant.from_step != 7]:
            node.feed(ev.RankMissed(0, number, "taken back"))
            node.others["b"].missed(number, 1, "taken back")
        node.tick(0.5)
    (again,) = [number for number, grant in grants.items() if grant.from_step == 7]
    return again


def seal(node: Steward, grant: int, step: int = 7) -> None:
    """Rank 0, of node a."""
    slot = next(do.slot for do in only(node.done, ins.GiveSlot) if (do.grant, do.rank) == (grant, 0))
    node.feed(ev.SlotSealed(0, slot, grant, step, layout(0), ()))


def test_a_copy_of_the_second_capture_may_be_faster_than_the_word_of_its_rank() -> None:
    """P14: the first capture was the newest step that a grant had become, so the healthy second one was void, each time."""
    node = steward().train(6)
    node.others["b"].sealed(node.granted(7), 7, 1)
    node.feed(ev.RankMissed(0, node.granted(7), "fence_timeout"))
    node.others["b"].held(fact(7, 1), lost=True)
    again, mark = anew(node), node.mark
    node.copy(7, 1, "a")
    assert [void.snapshot for void in node.said(msg.Void, since=mark) if void.snapshot] == []
    seal(node, again)
    node.others["b"].sealed(again, 7, 1)
    assert node.level(7) == 0


@pytest.mark.parametrize("soon", [False, True])
def test_a_flush_mixes_no_two_captures_of_a_step(soon: bool) -> None:
    """P1: the order of a try that began with the first capture came late, and was served from the second one."""
    node = flushes.steward().train(6, free=4).capture(7)
    flushes.ask(node, 7)
    flush = flushes.flushing(node)
    assert flush is not None and set(flush.orders) == {"a", "b"}
    node.feed(ev.FilesWritten(at(7), flush.attempt, True, "", b"a"))
    node.others["b"].held(fact(7, 1), lost=True)
    assert node.said(msg.Void, "a")[-1].snapshot == at(7)
    if soon:  # before this flush is looked at again
        node.machine.steward.table.add("a", fact(7, 0))
        node.machine.steward.table.add("b", fact(7, 1))
    else:
        again = anew(node)
        seal(node, again)
        node.others["b"].sealed(again, 7, 1)
    mark = node.mark
    node.hear("b", msg.Wrote(EPOCH, at(7), flush.attempt, True, "", b"b"))
    assert [do for do in only(node.done[mark:], ins.Commit) if do.attempt == flush.attempt] == []


def other_layout(rank: int, world: int = 3) -> Layout:
    """Of the same plan; its objects need more room."""
    return build_layout(rank, world, [], 128, "")


def old_part(part: Part) -> Part:
    """Of an earlier capture of the step, by other layouts."""
    members = (replace(one, layout_id=other_layout(one.rank).layout_id) for one in part.lane.members)
    return replace(part, lane=replace(part.lane, members=tuple(members)))


def sums(value: tuple[tuple[str, bytes], ...]) -> tuple[tuple[str, bytes], ...]:
    return joined_digests(dict.fromkeys(range(3), value))


def test_parity_of_a_void_capture_does_not_count_by_its_digests() -> None:
    """P3: a slot that was lost could not have been made of it."""
    node = parity_rig.steward()
    grant = node.granted(7)
    slot = next(do.slot for do in only(node.done, ins.GiveSlot) if (do.grant, do.rank) == (grant, 0))
    node.feed(ev.SlotSealed(0, slot, grant, 7, layout(0, 3), ANEW))
    for rank, name in ((1, "b"), (2, "c")):
        node.others[name].sealed(grant, 7, rank, digests=ANEW)
    parts = {to: parity_rig.part_fact(order.part) for to, order in parity_rig.orders(node)}
    own = parts["a"].part
    assert own is not None
    layouts = tuple(layout(rank, 3) for rank in range(3))
    node.feed(ev.ParityMade(at(7), own, 2070, part_layout(own.lane, 64), sums(ANEW), layouts))
    node.others["b"].held(replace(parts["b"], digests=sums(ANEW)))
    node.others["c"].held(replace(parts["c"], digests=sums(BEFORE_IT)))
    assert node.level(7) == 0
    node.others["c"].held(replace(parts["c"], digests=sums(ANEW)))
    assert node.level(7) == 1


def test_parity_of_a_void_capture_does_not_count_by_its_layouts() -> None:
    node = parity_rig.steward()
    node.capture(7)
    for to, order in parity_rig.orders(node):
        parity_rig.make(node, to, old_part(order.part))
    assert node.level(7) == 0


def test_parity_of_a_void_capture_that_comes_first_makes_the_second_one_void_too() -> None:
    """P14: slots of another layout were turned away, and nobody released them. The step may be captured once more."""
    known, node = parity_rig.steward(), parity_rig.steward()
    known.capture(7)
    late = next(parity_rig.part_fact(old_part(order.part)) for to, order in parity_rig.orders(known) if to == "c")
    node.others["c"].held(late)
    node.hear("c", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in map(other_layout, range(3))}))
    node.capture(7)
    node.tick(2 * REPEAT_S)
    assert {name for name in "abc" for void in node.said(msg.Void, name) if void.snapshot == at(7)} >= {"b", "c"}
    assert node.machine.slots.best(at(7), 0) is None
    for name, lost in (("b", fact(7, 1, world=3)), ("c", fact(7, 2, world=3)), ("c", late)):
        node.others[name].held(lost, lost=True)
    assert at(7) not in node.machine.steward.table.states


def test_a_step_that_is_complete_under_an_earlier_grant_does_not_wait_for_the_one_that_was_asked_for() -> None:
    """The first call of a job with must=True took the grant that was on its way, and was certified by nobody for ever."""
    node = steward().train(-1, free=1)
    ahead = node.granted(0)
    node.slots(0, 2)
    node.feed(ev.RankProgress(0, 3, asks=True))
    node.others["b"].state(1, 3, free=2, asks=3)
    assert node.granted(3) != ahead
    seal(node, ahead, 3)
    node.others["b"].sealed(ahead, 3, 1)
    assert node.level(3) == 0
