"""GEMINI placement: the published numbers, and what must hold for any nodes and domains (D8)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import NodeInfo
from ckptd.core.placement import alternatives, peers
from tests.core.worlds import node, quick


def line(count: int) -> list[NodeInfo]:
    return [node(f"n{i:03d}") for i in range(count)]


def holder_sets(chosen: Mapping[str, Sequence[str]]) -> set[frozenset[str]]:
    return {frozenset((name, *others)) for name, others in chosen.items()}


def survival(nodes: list[NodeInfo], replicas: int, failures: int) -> float:
    """The share of failure sets that leave a holder of every slot, by trying them all."""
    fatal = [frozenset(name) for name in holder_sets(peers(nodes, replicas))]
    names = [n.node for n in nodes]
    lost = sum(any(f <= set(dead) for f in fatal) for dead in combinations(names, failures))
    return 1 - lost / math.comb(len(nodes), failures)


@pytest.mark.parametrize(
    ("count", "failures", "expected"),
    [(16, 2, 0.9333), (16, 3, 0.8), (32, 2, 0.9677), (32, 3, 0.9032), (64, 2, 0.9841), (64, 3, 0.9524)],
)
def test_published_recovery_probabilities_with_one_replica(
    count: int, failures: int, expected: float
) -> None:
    assert survival(line(count), 1, failures) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("count", "replicas"), [(6, 1), (6, 2), (12, 3), (9, 2)])
def test_exact_probability_of_groups_by_inclusion_and_exclusion(count: int, replicas: int) -> None:
    """Corollary 1 bounds it from below and is exact for fewer than 2m failures."""
    m, groups = replicas + 1, count // (replicas + 1)
    for k in range(1, count + 1):
        exact = 1 + sum(
            (-1) ** j * math.comb(groups, j) * math.comb(count - j * m, k - j * m) / math.comb(count, k)
            for j in range(1, groups + 1)
            if k >= j * m
        )
        bound = 1 - groups * math.comb(count - m, k - m) / math.comb(count, k) if k >= m else 1
        found = survival(line(count), replicas, k)
        assert found == pytest.approx(exact)
        assert found == pytest.approx(bound) if k < 2 * m else found >= bound - 1e-9


@pytest.mark.parametrize(("count", "replicas"), [(127, 1), (5, 1), (7, 2), (11, 3), (3, 1)])
def test_the_remainder_forms_a_ring(count: int, replicas: int) -> None:
    """Mixed placement: N//m - 1 groups and a ring of m + N % m; within (2m-3)/C(N,m) of the best possible."""
    m = replicas + 1
    sets = holder_sets(peers(line(count), replicas))
    assert len(sets) == count // m - 1 + m + count % m
    assert len(sets) - math.ceil(count / m) <= 2 * m - 3
    assert set(Counter(name for held in peers(line(count), replicas).values() for name in held).values()) == {
        replicas
    }


def test_groups_are_neighbours_and_each_starts_with_another() -> None:
    assert peers(line(6), 2) == {
        "n000": ("n001", "n002"),
        "n001": ("n002", "n000"),
        "n002": ("n000", "n001"),
        "n003": ("n004", "n005"),
        "n004": ("n005", "n003"),
        "n005": ("n003", "n004"),
    }


domains = st.lists(st.integers(0, 4), min_size=1, max_size=9)


def in_domains(numbers: list[int]) -> list[NodeInfo]:
    return [node(f"n{i}", f"d{number}") for i, number in enumerate(numbers)]


@quick
@given(domains, st.integers(0, 3))
def test_holders_are_in_different_domains(numbers: list[int], replicas: int) -> None:
    nodes = in_domains(numbers)
    where = {n.node: n.domain for n in nodes}
    chosen, more = peers(nodes, replicas), alternatives(nodes, replicas)
    assert list(chosen) == list(more) == list(where)
    for name, held in chosen.items():
        used = [where[name], *(where[peer] for peer in held)]
        assert len(set(used)) == len(used) == min(replicas, len(set(numbers)) - 1) + 1
        rest = set(more[name])
        assert len(rest) == len(more[name])
        assert rest | set(held) == {other for other in where if where[other] != where[name]}
        assert not rest & set(held)


@quick
@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 3))
def test_equal_domains_share_the_load_evenly(per_domain: int, count: int, replicas: int) -> None:
    """Whatever divides: everyone holds exactly as much as it gives."""
    nodes = [node(f"n{i}-{d}", f"d{d}") for i in range(per_domain) for d in range(count)]
    chosen = peers(nodes, replicas)
    load = Counter(peer for held in chosen.values() for peer in held)
    wanted = min(replicas, count - 1)
    if (per_domain * count) % (wanted + 1) == 0:
        assert set(load.values()) == {wanted}
    assert sum(load.values()) == wanted * len(nodes)


def test_one_large_domain_spreads_over_the_small_ones() -> None:
    nodes = in_domains([0] * 8 + [1, 2])
    load = Counter(peer for held in peers(nodes, 1).values() for peer in held)
    assert load["n8"] == load["n9"] == 4, "n0..n7 need eight places on two nodes"
    assert peers(in_domains([0, 0, 0]), 1) == {"n0": (), "n1": (), "n2": ()}
    assert peers([], 1) == {}
    assert peers([node("a"), node("a")], 1) == {"a": ()}


def test_alternatives_differ_for_nodes_that_lost_the_same_peer() -> None:
    more = alternatives(line(5), 1)
    assert peers(line(5), 1)["n001"] == ("n000",)
    assert more["n001"][0] == "n002"
    assert more["n004"][0] != more["n002"][0]
    two = alternatives(in_domains([0, 1, 1, 2]), 1)
    assert peers(in_domains([0, 1, 1, 2]), 1)["n0"] in (("n1",), ("n3",))
    assert len(two["n0"]) == 2


def test_a_thousand_nodes_place_quickly_and_evenly() -> None:
    nodes = [node(f"n{i}", f"rack{i % 40}") for i in range(1000)]
    load = Counter(peer for held in peers(nodes, 2).values() for peer in held)
    assert max(load.values()) <= 3
    assert sum(load.values()) == 2000
