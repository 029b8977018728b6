"""How far ahead of the ranks is granted: by how far they came while earlier grants were on their way (D9, P14)."""

from __future__ import annotations

from ckptd.core.protocol import events as ev
from tests.core.granting import POLICY, granted, steward
from tests.core.machines import Steward


def late(node: Steward, step: int, reached: int) -> None:
    """Both ranks were beyond the step when its grant came."""
    grant = node.granted(step)
    node.feed(ev.RankProgress(0, reached))
    node.others["b"].state(1, reached, free=1)
    node.others["b"].missed(grant, 1, "late")
    if node.machine.slots.filling(0, grant):
        node.feed(ev.RankMissed(0, grant, "late"))


def test_grants_that_came_too_late_make_the_next_ones_go_further_ahead() -> None:
    node = steward().train(6, free=1)
    late(node, 7, reached=10)
    assert granted(node)[-1] == 15, "four steps beyond the next one: it had needed a margin of 4"
    assert node.machine.steward.grants.margin.steps == 4


def test_how_far_ranks_have_come_before_they_told_their_step_is_not_how_fast_they_are() -> None:
    """After kill -9 of all daemons at step 176 nothing was captured for 64 steps: how far the ranks had come while the first grants
    were under way was counted from the beginning of training."""
    node = steward().train(-1, free=2)
    for step in (0, 1):
        late(node, step, reached=176)
    assert node.machine.steward.grants.margin.steps <= 1
    assert granted(node)[-1] <= 178


def test_a_grant_that_was_in_time_everywhere_asks_for_no_margin() -> None:
    node = steward().train(6, free=2)
    grant = node.granted(7)
    node.others["b"].sealed(grant, 7, 1, came_at=6)
    node.capture(7, 0)
    assert node.machine.steward.grants.margin.steps == 0


def test_one_that_came_before_its_own_step_was_due_asks_for_no_margin() -> None:
    """However far the ranks had come since it was granted."""
    node = steward().train(6, free=2)
    for step in (7, 8):
        node.others["b"].sealed(node.granted(step), step, 1, came_at=step - 1)
        node.capture(step, 0)
    assert list(node.machine.steward.grants.margin._needs) == [0, 0]


def test_one_rank_for_which_it_came_too_late_is_enough() -> None:
    node = steward().train(6, free=1)
    node.others["b"].state(1, 10, free=1)
    node.others["b"].missed(node.granted(7), 1, "late")
    node.feed(ev.RankMissed(0, node.granted(7), "taken back"))
    assert node.machine.steward.grants.margin.steps == 4


def test_the_rank_that_was_furthest_counts() -> None:
    node = steward("abc").train(6, free=1)
    for name, rank, reached in (("b", 1, 8), ("c", 2, 11)):
        node.others[name].state(rank, reached, free=1)
        node.others[name].missed(node.granted(7), rank, "late")
    node.feed(ev.RankMissed(0, node.granted(7), "taken back"))
    assert node.machine.steward.grants.margin.steps == 5


def test_a_grant_that_was_void_before_it_came_too_late_asks_for_no_margin() -> None:
    node = steward().train(6, free=1)
    grant = node.granted(7)
    node.feed(ev.RankMissed(0, grant, "no memory"))
    node.others["b"].state(1, 10, free=1)
    node.others["b"].missed(grant, 1, "late")
    assert grant not in node.machine.steward.grants.open
    assert node.machine.steward.grants.margin.steps == 0


def test_how_far_a_rank_was_when_the_grant_came_is_what_counts() -> None:
    node = steward().train(6, free=1)
    late(node, 7, reached=10)  # from now on 4 steps more than the next one
    grant, step = node.granted(15), 15
    node.feed(ev.RankProgress(0, step))
    node.others["b"].sealed(grant, step, 1, came_at=12)
    node.capture(step, 0)
    assert list(node.machine.steward.grants.margin._needs) == [4, 2]


def test_a_new_office_grants_from_where_the_ranks_are_then() -> None:
    """After a restore of an older step too; grants beyond the old ones would leave out all that lies between."""
    node = steward().train(6, free=1)
    late(node, 7, reached=10)
    node.now += POLICY.steward_timeout_s
    node.tick()
    assert node.machine.steward.grants.margin.steps == 0
    node.others["b"].tell_inventory()
    mark = node.mark
    node.others["b"].state(1, 10, free=1)
    node.feed(ev.RankMissed(0, node.granted(15), "taken back"))
    assert granted(node, "b", mark) == [11]
    late(node, 11, reached=13)
    assert node.machine.steward.grants.margin.steps == 3


def test_a_new_office_measures_from_where_the_ranks_are_then() -> None:
    node = steward().train(6, free=3)
    node.now += POLICY.steward_timeout_s
    old = [node.granted(step) for step in (7, 8, 9)]
    node.tick()
    for grant in old:
        node.feed(ev.RankMissed(0, grant, "taken back"))
    node.others["b"].tell_inventory()
    node.others["b"].state(1, 6, free=3)
    late(node, 7, reached=8)
    assert node.machine.steward.grants.margin.steps == 2
