"""Degradation (P8): down when there is no memory, up again with hysteresis, each level with less of others' memory."""

from __future__ import annotations

import pytest

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.degradation import DOWN_S, UP_MAX_S, UP_S, Degradation, levels
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas


def nodes(count: int, domains: int | None = None) -> list[NodeInfo]:
    return [NodeInfo(f"n{i}", "", "", f"d{i % (domains or count)}") for i in range(count)]


@pytest.mark.parametrize(
    ("policy", "domains", "found"),
    [
        (Replicas(2), 6, [Replicas(2), Replicas(1), Parity(5, 1), Replicas(0)]),
        (Replicas(1), 64, [Replicas(1), Parity(7, 1), Replicas(0)]),
        (Replicas(1), 2, [Replicas(1), Replicas(0)]),
        (Replicas(0), 4, [Replicas(0)]),
        (Parity(3, 1), 4, [Parity(3, 1), Replicas(0)]),
        (Parity(4, 2), 6, [Parity(4, 2), Replicas(0)]),
    ],
)
def test_levels_from_what_is_wanted_to_local_only(policy: Redundancy, domains: int, found: list[Redundancy]) -> None:
    assert list(levels(policy, nodes(2 * domains, domains))) == found


def degradation() -> Degradation:
    return Degradation((Replicas(1), Parity(3, 1), Replicas(0)), 0.0)


def test_a_short_moment_changes_nothing() -> None:
    found = degradation()
    assert not found.look(True, 1.0)
    assert not found.look(True, 1.0 + DOWN_S - 0.1)
    assert not found.look(False, 1.0 + DOWN_S)
    assert not found.look(True, 2.0 + DOWN_S)
    assert found.redundancy == Replicas(1)


def test_shortage_that_lasts_goes_down_level_by_level_and_not_below_the_last() -> None:
    found, now = degradation(), 0.0
    seen = []
    for _ in range(400):
        now += 0.1
        if found.look(True, now):
            seen.append((round(now, 1), found.redundancy))
    assert [level for _, level in seen] == [Parity(3, 1), Replicas(0)]
    assert seen[1][0] - seen[0][0] >= DOWN_S, "each level has its own chance"


def down(found: Degradation, now: float) -> float:
    found.look(True, now)
    assert found.look(True, now + DOWN_S)
    return now + DOWN_S


def test_up_again_after_a_while_without_shortage() -> None:
    found = degradation()
    now = down(found, 10.0)
    assert not found.look(False, now + UP_S - 0.1)
    assert found.look(False, now + UP_S)
    assert found.redundancy == Replicas(1)


def test_a_try_that_fails_doubles_the_wait_up_to_a_limit_and_one_that_holds_resets_it() -> None:
    found = degradation()
    now, wait, waits = down(found, 0.0), UP_S, []
    for _ in range(8):
        assert not found.look(False, now + wait - 1)
        assert found.look(False, now + wait)
        waits.append(wait)
        now = down(found, now + wait + 1)
        wait = min(2 * wait, UP_MAX_S)
    assert waits[-1] == UP_MAX_S
    assert found.look(False, now + UP_MAX_S)
    found.held()
    assert not found.look(False, now + 2 * UP_MAX_S), "it held: nothing above it"
    now = down(found, now + 2 * UP_MAX_S + 1)
    assert found.look(False, now + UP_S), "and the next try comes as soon as the first"


def test_a_try_has_not_held_while_no_snapshot_came() -> None:
    found = Degradation((Replicas(2), Replicas(1), Replicas(0)), 0.0)
    now = down(found, down(found, 0.0))
    assert found.look(False, now + UP_S)
    assert not found.look(False, now + 10 * UP_S), "not further up on nothing"
    now = down(found, now + 10 * UP_S)
    assert not found.look(False, now + 2 * UP_S - 1), "and its failure doubles the wait"
    assert found.look(False, now + 2 * UP_S)
    found.held()
    assert found.look(False, now + 4 * UP_S)
    assert found.redundancy == Replicas(2)


def test_what_a_level_held_proves_nothing_of_the_next_one() -> None:
    found = Degradation((Replicas(2), Replicas(1), Replicas(0)), 0.0)
    now = down(found, down(found, 0.0))
    found.held()
    assert found.look(False, now + UP_S)
    assert not found.look(False, now + 10 * UP_S)


def test_the_wait_for_the_next_level_up_begins_when_the_shortage_ends() -> None:
    found = Degradation((Replicas(1), Replicas(0)), 0.0)
    now = down(found, 0.0)
    assert not found.look(True, now + UP_S - 1), "there is none below"
    assert not found.look(False, now + UP_S)
    assert not found.look(False, now + 2 * UP_S - 2)
    assert found.look(False, now + 2 * UP_S - 1)


def test_each_level_up_is_a_wait_of_its_own() -> None:
    found = degradation()
    now = down(found, down(found, 0.0))
    assert found.look(False, now + UP_S)
    found.held()
    assert not found.look(False, now + 2 * UP_S - 1)
    assert found.look(False, now + 2 * UP_S)
