"""Parity groups and the geometry of their stripes (D8, P3): against brute force, for any nodes and domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.parity_groups import (
    CHUNK_ALIGN_BYTES,
    chunk_bytes,
    data_index,
    data_stripes,
    parity_groups,
    parity_members,
    parity_positions,
    stripes_held,
)
from ckptd.core.redundancy.policies import Parity
from tests.core.worlds import node, quick


def line(count: int) -> list[NodeInfo]:
    return [node(f"n{i}") for i in range(count)]


def sizes(groups: tuple[tuple[str, ...], ...]) -> list[int]:
    return sorted(map(len, groups), reverse=True)


@pytest.mark.parametrize(
    ("count", "parity", "expected"),
    [
        (4, Parity(3, 1), [4]),
        (6, Parity(3, 1), [3, 3]),
        (8, Parity(3, 1), [4, 4]),
        (9, Parity(3, 1), [3, 3, 3]),
        (2, Parity(3, 1), [2]),
        (1, Parity(3, 1), []),
        (0, Parity(3, 1), []),
        (12, Parity(4, 2), [6, 6]),
        (7, Parity(4, 2), [4, 3]),
        (3, Parity(4, 2), [3]),
        (2, Parity(4, 2), []),
        (3, Parity(1, 1), [2]),  # the third has nobody
        (5, Parity(2, 2), [4]),  # two groups would need three each
    ],
)
def test_sizes_are_even_and_groups_few(count: int, parity: Parity, expected: list[int]) -> None:
    assert sizes(parity_groups(line(count), parity)) == expected


def test_domains_demand_more_groups() -> None:
    racks = [node(f"n{i}", f"rack{i // 3}") for i in range(6)]
    assert parity_groups(racks, Parity(3, 1)) == (("n0", "n3"), ("n1", "n4"), ("n2", "n5"))
    lone = [node(f"n{i}", "rack") for i in range(4)]
    assert parity_groups(lone, Parity(3, 1)) == ()


def test_a_domain_too_large_leaves_its_last_nodes_out() -> None:
    nodes = [node(f"n{i}", "big") for i in range(5)] + [node("x"), node("y")]
    assert parity_groups(nodes, Parity(3, 1)) == (("n0", "x"), ("n1", "y"))


def test_positions_follow_the_given_order() -> None:
    assert parity_groups(line(6), Parity(3, 1)) == (("n0", "n2", "n4"), ("n1", "n3", "n5"))
    assert parity_groups(line(6)[::-1], Parity(3, 1))[0] == ("n5", "n3", "n1")


def test_nodes_of_one_parallel_group_are_spread() -> None:
    together = {"n0": "a", "n2": "a", "n1": "b", "n3": "b"}
    for group in parity_groups(line(4), Parity(1, 1), together):
        assert len({together[name] for name in group}) == 2


def feasible(counts: list[int], parity: Parity) -> int:
    """The most nodes that groups can take in: every number of groups, and every choice of nodes per domain."""
    best = 0
    for groups in range(1, sum(counts) + 1):
        for taken in product(*(range(min(count, groups) + 1) for count in counts)):
            total = sum(taken)
            if groups * (parity.parity + 1) <= total <= groups * parity.group:
                best = max(best, total)
    return best


numbers = st.lists(st.integers(0, 4), max_size=10)
parities = st.builds(Parity, st.integers(1, 4), st.integers(1, 3))


@quick
@given(numbers, parities, st.lists(st.integers(0, 3), min_size=10, max_size=10))
def test_groups_of_any_nodes_and_domains(where: list[int], parity: Parity, labelled: list[int]) -> None:
    nodes = [node(f"n{i}", f"d{number}") for i, number in enumerate(where)]
    together = {f"n{i}": f"label{number}" for i, number in enumerate(labelled)}
    domain = {n.node: n.domain for n in nodes}
    for groups in (parity_groups(nodes, parity), parity_groups(nodes, parity, together)):
        members = [name for group in groups for name in group]
        assert len(set(members)) == len(members) == feasible(list(Counter(where).values()), parity)
        assert not groups or max(map(len, groups)) - min(map(len, groups)) <= 1
        for group in groups:
            assert parity.parity < len(group) <= parity.group
            assert len({domain[name] for name in group}) == len(group)
            assert list(group) == [name for name in domain if name in group]


@quick
@given(st.integers(1, 12), st.integers(1, 4), parities)
def test_labels_that_can_be_apart_are_apart(labels: int, each: int, parity: Parity) -> None:
    together = {f"n{i}": f"l{i % labels}" for i in range(labels * each)}
    groups = parity_groups(line(labels * each), parity, together)
    if each <= len(groups):
        for group in groups:
            assert len({together[name] for name in group}) == len(group)


def test_four_thousand_nodes_are_grouped_quickly() -> None:
    groups = parity_groups([node(f"n{i}", f"rack{i % 97}") for i in range(4096)], Parity(6, 2))
    assert sum(map(len, groups)) == 4096


# --- who moves when nodes come and go ---------------------------------------------------------------------------
def changed(old: Sequence[NodeInfo], new: Sequence[NodeInfo], parity: Parity) -> int:
    """Groups of ``new`` in which somebody is together with others than before."""
    before = {frozenset(group) for group in parity_groups(old, parity)}
    return sum(frozenset(group) not in before for group in parity_groups(new, parity))


@quick
@given(st.integers(2, 40), parities, st.randoms(use_true_random=False))
def test_newcomers_take_the_places_of_those_who_left(count: int, parity: Parity, rng: Any) -> None:
    old = line(count)
    left = set(rng.sample(range(count), rng.randint(1, count - 1)))
    new = [node(f"new{i}") if i in left else n for i, n in enumerate(old)]
    touched = {
        at
        for at, group in enumerate(parity_groups(old, parity))
        if any(int(name[1:]) in left for name in group)
    }
    rng.shuffle(new)
    seated = parity_members(old, new)
    assert sorted(n.node for n in seated) == sorted(n.node for n in new)
    assert changed(old, seated, parity) <= len(touched), "only groups that lost a member change"


def test_one_node_less_changes_its_group_and_the_last_one() -> None:
    old, parity = line(64), Parity(7, 1)
    less = [n for n in old if n.node != "n3"]
    assert changed(old, parity_members(old, less), parity) == 2
    assert changed(old, less, parity) == 4
    assert changed(less, parity_members(less, [*less, node("new")]), parity) == 1
    assert parity_members([], old) == tuple(old)
    assert parity_members(old, []) == ()


# --- stripes ------------------------------------------------------------------------------------------------------
geometries = st.integers(2, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(5, n - 1))))


@quick
@given(geometries)
def test_stripes_of_a_group(geometry: tuple[int, int]) -> None:
    n, m = geometry
    for stripe in range(n):
        rows = parity_positions(n, m, stripe)
        assert len(set(rows)) == m
        data = [p for p in range(n) if stripe in data_stripes(n, m, p)]
        assert sorted([*rows, *data]) == list(range(n))
        assert [data_index(n, m, stripe, p) for p in data] == list(range(n - m))
        for row, position in enumerate(rows):
            assert (stripe, row) in stripes_held(n, m, position)
            with pytest.raises(ValueError, match="parity"):
                data_index(n, m, stripe, position)
    for position in range(n):
        held = stripes_held(n, m, position)
        assert len(held) == m and list(held) == sorted(held)
        stripes = data_stripes(n, m, position)
        assert len(stripes) == n - m and list(stripes) == sorted(stripes)
        assert not set(stripes) & {stripe for stripe, _ in held}, (
            "parity with a part of its own would be lost with it"
        )


@quick
@given(geometries, st.integers(0, 1 << 40))
def test_chunks_take_in_the_longest_member(geometry: tuple[int, int], longest: int) -> None:
    n, m = geometry
    chunk = chunk_bytes(longest, n, m)
    assert chunk % CHUNK_ALIGN_BYTES == 0
    assert longest <= chunk * (n - m) < longest + (n - m) * CHUNK_ALIGN_BYTES
    with pytest.raises(ValueError, match="no room"):
        chunk_bytes(longest, m, m)
