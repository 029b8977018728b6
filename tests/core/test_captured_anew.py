"""A step that is captured twice, as its first capture was void: two snapshots, of which no word of the one is about the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.certify import REPEAT_S
from tests.core import flushes, parity_rig
from tests.core.certificates import steward
from tests.core.machines import EPOCH, Steward, at, fact, layout, only, record_of


def void_at_rank_0(node: Steward) -> int:
    """Rank 1 sealed step 7, rank 0 missed it. The grant."""
    grant = node.granted(7)
    node.others["b"].sealed(grant, 7, 1)
    node.feed(ev.RankMissed(0, grant, "fence_timeout"))
    return grant


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


def test_a_late_copy_of_a_void_capture_makes_nothing_whole_with_the_second_one() -> None:
    """P2: the two were certified as one at level 1, and a restore refused them as copies that differ (a reader's history)."""
    node = steward().train(6)
    first = void_at_rank_0(node)
    node.others["b"].held(fact(7, 1), lost=True)
    again = anew(node)
    seal(node, again)
    node.others["b"].held(fact(7, 0, 1))
    assert {void.snapshot for void in node.said(msg.Void, "b") if void.snapshot} == {at(7, grant=first)}, "b lets go of it"
    mark = node.mark
    node.others["b"].sealed(again, 7, 1)
    said = {(told.snapshot, told.level) for told in node.certificates("b", mark)}
    assert said == {(at(7, grant=again), 0)}
    node.others["b"].held(fact(7, 0, 1), lost=True)
    assert at(7, grant=first) not in node.machine.steward.table.states


def test_a_copy_of_the_second_capture_may_be_faster_than_the_word_of_its_rank() -> None:
    """P14: the first capture was the newest step that a grant had become, so the healthy second one was void, each time."""
    node = steward().train(6)
    void_at_rank_0(node)
    again, mark = anew(node), node.mark
    node.feed(ev.ReplicaArrived(at(7, grant=again), 1, 1, 1071, layout(1), ()))
    assert [void.snapshot for void in node.said(msg.Void, since=mark) if void.snapshot == at(7, grant=again)] == []
    seal(node, again)
    node.others["b"].sealed(again, 7, 1)
    assert (node.certificates("b")[-1].snapshot, node.certificates("b")[-1].level) == (at(7, grant=again), 0)


def test_a_flush_mixes_no_two_captures_of_a_step() -> None:
    """P1: the order of a try that began with the first capture came late, and was served from the second one."""
    node = flushes.steward().train(6, free=4).capture(7)
    flushes.ask(node, 7)
    flush = flushes.flushing(node)
    assert flush is not None and set(flush.orders) == {"a", "b"}
    node.feed(ev.FilesWritten(at(7), flush.attempt, True, "", b"a"))
    node.others["b"].held(fact(7, 1), lost=True)
    assert node.said(msg.Void, "a")[-1].snapshot == at(7)
    again = anew(node)
    seal(node, again)
    node.others["b"].sealed(again, 7, 1)
    mark = node.mark
    node.hear("b", msg.Wrote(EPOCH, at(7), flush.attempt, True, "", b"b"))
    assert [do for do in only(node.done[mark:], ins.Commit) if do.attempt == flush.attempt] == []


def second_beside_the_first_on_storage() -> tuple[Steward, int]:
    """A commit of the first capture was under way when that became void, and comes to its end. Steward, grant of the second one."""
    node = flushes.steward(flush_every_s=0).train(6, free=4).capture(7)
    flushes.ask(node, 7)
    (commit,) = flushes.written(node)
    node.others["b"].held(fact(7, 1), lost=True)
    assert node.said(msg.Void, "a")[-1].snapshot == at(7)
    again = anew(node)
    node.feed(ev.CommitDone(commit.snapshot, commit.attempt, True, ""))
    return node, again


def test_a_second_capture_is_durable_when_storage_has_the_first_one() -> None:
    """P14: a step is stored once, so nothing would ever be written for the second one, and whoever waited did so for ten minutes
    (a reader's history)."""
    node, again = second_beside_the_first_on_storage()
    seal(node, again)
    node.others["b"].sealed(again, 7, 1)
    said = node.certificates("b")[-1]
    assert (said.snapshot, said.level, said.durable) == (at(7, grant=again), 0, True)


def test_so_it_is_when_that_was_lost_amid_its_seal() -> None:
    node, again = second_beside_the_first_on_storage()
    node.feed(ev.RankMissed(0, again, "its daemon was killed"))
    node.others["b"].missed(again, 1, "seal failed")
    node.hear("b", msg.LevelAsk(EPOCH, at(7, grant=again)))
    said = node.certificates("b")[-1]
    assert (said.snapshot, said.level, said.durable) == (at(7, grant=again), -1, True)


def test_parity_of_a_void_capture_protects_no_other_one() -> None:
    """P3: a slot that was lost could not have been made of it (a reader's history)."""
    node = parity_rig.steward().capture(7)
    for to, order in parity_rig.orders(node):
        if to != "a":
            node.others[to].held(replace(parity_rig.shard_fact(order.shard), snapshot=at(7, grant=99)))
    node.tick(2 * REPEAT_S)
    assert node.level(7) == 0
    assert {name for name in "bc" for void in node.said(msg.Void, name) if void.snapshot == at(7, grant=99)} == {"b", "c"}
    parity_rig.protected(node)
    assert node.level(7) == 1


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
    assert (node.certificates("b")[-1].snapshot, node.certificates("b")[-1].level) == (at(3, grant=ahead), 0)


@pytest.mark.parametrize(("step", "plan"), [(8, ""), (7, "another")])
def test_a_capture_that_does_not_fit_the_others_and_is_the_last_one_holds_up_no_other_grant(step: int, plan: str) -> None:
    """P14: all ranks have taken it, so nobody's answer to its void is waited for."""
    node = steward(record_of("abc")).train(6, free=1)
    grant = node.granted(7)
    node.capture(7, 0)
    node.others["b"].sealed(grant, 7, 1)
    mark = node.mark
    node.others["c"].sealed(grant, step, 2, plan=plan)
    node.feed(ev.RankProgress(0, 8))
    node.others["b"].state(1, 8, 1)
    node.others["c"].state(2, 8, 1)
    node.tick(1.0)
    assert [said.grant for said in node.said(msg.Grant, "b", mark)][:1] == [grant + 1]
