"""Recovery probabilities: published values, brute force, inclusion and exclusion, and chance beside certainty (D8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy import probability
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from ckptd.core.redundancy.probability import Chance, Fatal, recovery, wilson
from ckptd.core.redundancy.scheme import Scheme, ring, scheme
from tests.core.worlds import node, quick


def line(count: int) -> list[NodeInfo]:
    return [node(f"n{i}") for i in range(count)]


RNG = Random(1)


def sample(count: int, k: int) -> list[int]:
    return RNG.sample(range(count), k)


def chances(
    nodes: Sequence[NodeInfo], made: Scheme, losses: int, *, of_domains: bool = False
) -> list[Chance]:
    units = {n.node: n.domain if of_domains else n.node for n in nodes}
    return recovery(made.fatal_sets(), units, losses, sample)


def counted(nodes: Sequence[NodeInfo], made: Scheme, losses: int, *, of_domains: bool = False) -> float:
    """The share of all sets of lost units after which each group and each node can be rebuilt: from their definition."""
    units = {n.node: n.domain if of_domains else n.node for n in nodes}
    names = list(dict.fromkeys(units.values()))
    alive = 0
    for gone in combinations(names, losses):
        dead = {name for name, unit in units.items() if unit in gone}
        groups_live = all(len(dead & set(group)) <= made.parity for group in made.groups)
        copies_live = all(not {name, *held} <= dead for name, held in made.copies.items())
        alive += groups_live and copies_live
    return alive / math.comb(len(names), losses)


# GEMINI (SOSP '23): group placement, figure 9 and corollary 1, and the mixed placement. The paper's ring at N=16, k=3 is
# the union bound 0.6; 352 of the 560 triples are without neighbours.
PUBLISHED = [
    ("group", 16, 1, 2, 0.9333), ("group", 16, 1, 3, 0.8), ("group", 16, 1, 4, 0.6154),
    ("group", 32, 1, 2, 0.9677), ("group", 32, 1, 3, 0.9032),
    ("group", 64, 1, 2, 0.9841), ("group", 64, 1, 3, 0.9524),
    ("group", 9, 1, 2, 0.8333), ("ring", 9, 1, 2, 0.75),
    ("ring", 16, 1, 2, 0.8667), ("ring", 16, 1, 3, 352 / 560),
    ("group", 12, 2, 3, 0.9818), ("ring", 12, 2, 3, 0.9455), ("group", 12, 2, 6, 0.6429), ("ring", 12, 2, 6, 0.3052),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "count", "copies", "losses", "expected"), PUBLISHED)
def test_published_values(kind: str, count: int, copies: int, losses: int, expected: float) -> None:
    nodes = line(count)
    made = ring(nodes, copies) if kind == "ring" else scheme(nodes, Replicas(copies))
    found = chances(nodes, made, losses)[-1]
    assert found.exact
    assert found.value == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("kind", "losses", "bound"), [("group", 4, 0.6), ("group", 3, 0.8), ("ring", 3, 0.6)]
)
def test_the_published_bounds(kind: str, losses: int, bound: float) -> None:
    nodes = line(16)
    made = ring(nodes, 1) if kind == "ring" else scheme(nodes, Replicas(1))
    assert chances(nodes, made, losses)[-1].bound == pytest.approx(bound)


@pytest.mark.parametrize(("count", "copies"), [(16, 1), (12, 2), (24, 3)])
def test_groups_follow_inclusion_and_exclusion(count: int, copies: int) -> None:
    m, groups = copies + 1, count // (copies + 1)
    for found in chances(line(count), scheme(line(count), Replicas(copies)), count):
        k = found.losses
        lost = sum(
            (-1) ** (j + 1) * math.comb(groups, j) * math.comb(count - j * m, k - j * m)
            for j in range(1, min(groups, k // m) + 1)
        )
        assert found.value == pytest.approx(1 - lost / math.comb(count, k))


@pytest.mark.parametrize(("data", "rows", "groups"), [(3, 1, 3), (4, 2, 2), (2, 3, 2)])
def test_parity_groups_follow_the_binomial(data: int, rows: int, groups: int) -> None:
    """Any ``rows`` of each group may be lost: the product of the groups' generating functions."""
    n = data + rows
    nodes = line(n * groups)
    terms = [1]
    for _ in range(groups):
        terms = [
            sum(terms[i] * math.comb(n, k - i) for i in range(len(terms)) if 0 <= k - i <= rows)
            for k in range(len(terms) + rows)
        ]
    for found in chances(nodes, scheme(nodes, Parity(data, rows)), len(nodes)):
        k = found.losses
        expected = terms[k] / math.comb(len(nodes), k) if k < len(terms) else 0.0
        assert found.value == pytest.approx(expected)


policies: st.SearchStrategy[Redundancy] = st.one_of(
    st.builds(Replicas, st.integers(0, 3)), st.builds(Parity, st.integers(1, 3), st.integers(1, 2))
)


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), policies, st.booleans(), st.booleans())
def test_any_scheme_against_brute_force(
    numbers: list[int], redundancy: Redundancy, of_domains: bool, as_ring: bool
) -> None:
    nodes = [node(f"n{i}", f"d{number}") for i, number in enumerate(numbers)]
    made = ring(nodes, redundancy.tolerates) if as_ring else scheme(nodes, redundancy)
    found = chances(nodes, made, len(nodes), of_domains=of_domains)
    assert len(found) == (len(set(numbers)) if of_domains else len(nodes))
    for chance in found:
        assert chance.exact
        assert chance.value == pytest.approx(counted(nodes, made, chance.losses, of_domains=of_domains))
        assert chance.low == chance.value == chance.high
        assert chance.bound <= chance.value + 1e-12
    if not as_ring:
        certain = [chance.losses for chance in found if chance.value == 1]
        assert made.tolerates == 0 or set(range(1, made.tolerates + 1)) <= set(certain)


def test_chance_agrees_with_certainty_within_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = line(24)
    made = ring(nodes, 2)
    exact = chances(nodes, made, 5)
    assert all(chance.exact for chance in exact)
    monkeypatch.setattr(probability, "SUBSETS_MAX", 100)
    drawn = chances(nodes, made, 5)
    assert [chance.exact for chance in drawn] == [True, False, False, False, False]
    for sure, chance in zip(exact[2:], drawn[2:], strict=True):
        assert chance.low <= sure.value <= chance.high
        assert chance.high - chance.low <= 0.0140
        assert chance.bound == sure.bound


def test_the_wilson_interval() -> None:
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson(100, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)


def test_racks_of_many_nodes() -> None:
    """Two racks hold everything between them: the loss of both is fatal, of any two others it depends."""
    nodes = [node(f"n{i}", f"rack{i // 4}") for i in range(16)]
    found = chances(nodes, scheme(nodes, Replicas(1)), 2, of_domains=True)
    assert found[0].value == 1
    assert found[1].value == counted(nodes, scheme(nodes, Replicas(1)), 2, of_domains=True)


def test_a_thousand_nodes_are_exact_and_quick() -> None:
    nodes = line(1000)
    for redundancy in (Replicas(1), Replicas(2), Parity(7, 1), Parity(8, 2)):
        found = chances(nodes, scheme(nodes, redundancy), 4)
        assert all(chance.exact for chance in found)
        assert found[redundancy.tolerates - 1].value == 1
        assert 0 < found[redundancy.tolerates].value < 1


def test_what_has_no_copy_is_lost_with_its_node() -> None:
    units = {"a": "a", "b": "b"}
    assert [c.value for c in recovery([Fatal(("a",), 0)], units, 2, sample)] == [0.5, 0.0]
    assert [c.value for c in recovery([], units, 2, sample)] == [1.0, 1.0]


# --- schemes -----------------------------------------------------------------------------------------------------
def test_schemes_cost_what_they_should() -> None:
    eight = line(8)
    assert (
        set(scheme(eight, Replicas(2)).held().values())
        == set(scheme(eight, Replicas(2)).sent().values())
        == {2.0}
    )
    xor = scheme(eight, Parity(3, 1))
    assert set(xor.held().values()) == {1 / 3}, "REFT: 1/(n-1)"
    assert set(xor.sent().values()) == {1.0}
    assert scheme(line(12), Parity(4, 2)).held()["n0"] == 0.5
    assert scheme(line(6), Parity(3, 1)).held()["n0"] == 0.5, "two groups of three"


def test_nodes_without_a_group_have_copies() -> None:
    nodes = [node(f"n{i}", "big") for i in range(5)] + [node("x"), node("y")]
    made = scheme(nodes, Parity(3, 1))
    assert set(made.copies) == {"n2", "n3", "n4"}
    assert made.tolerates == 1
    held = made.held()
    assert sum(held.values()) == 4 * 1.0 + 3, "groups of two are copies, and three copies more"
    assert scheme(line(1), Parity(3, 1)).tolerates == scheme(line(1), Replicas(2)).tolerates == 0
