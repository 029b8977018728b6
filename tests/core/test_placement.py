"""GEMINI placement: the published numbers, and what must hold for any nodes and domains (D8)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.placement import alternatives, peers, positions, preference
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
    assert all(
        preference(node.node, nodes, replicas) == chosen[node.node] + more[node.node] for node in nodes
    )
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


def test_the_first_alternative_is_in_a_domain_that_has_no_replica_yet() -> None:
    nodes = in_domains([0, 0, 1, 1, 2, 2])
    where = {n.node: n.domain for n in nodes}
    chosen, more = peers(nodes, 1), alternatives(nodes, 1)
    assert all(where[more[name][0]] != where[chosen[name][0]] for name in where)


def test_of_equal_alternatives_the_one_that_holds_less_comes_first() -> None:
    nodes = in_domains([0, 0, 1, 1, 1])
    load = Counter(peer for held in peers(nodes, 1).values() for peer in held)
    assert (peers(nodes, 1)["n0"], load["n3"], load["n4"]) == (("n2",), 1, 0)
    assert alternatives(nodes, 1)["n0"] == ("n4", "n3")


def test_the_largest_domains_are_dealt_first_though_they_come_last() -> None:
    """Else fewer groups can be made, and what is left over goes to nodes that hold enough already."""
    nodes = in_domains([0, 1, 1, 2, 2, 3, 3])
    load = Counter(peer for held in peers(nodes, 2).values() for peer in held)
    assert set(load.values()) == {2}


def test_neighbours_that_make_a_group_do_so_though_others_cannot() -> None:
    assert peers(in_domains([0, 0, 0, 1]), 1)["n3"] == ("n2",)


def test_a_thousand_nodes_place_quickly_and_evenly() -> None:
    nodes = [node(f"n{i}", f"rack{i % 40}") for i in range(1000)]
    load = Counter(peer for held in peers(nodes, 2).values() for peer in held)
    assert max(load.values()) <= 3
    assert sum(load.values()) == 2000


# --- nodes of one model-parallel group --------------------------------------------------------------------------
def labels_of(nodes: Sequence[NodeInfo], size: int) -> dict[str, str]:
    """Neighbours in the list are one model-parallel group, as ranks are numbered."""
    return {n.node: f"tp{at // size}" for at, n in enumerate(nodes)}


@pytest.mark.parametrize(
    ("count", "size", "replicas"), [(16, 2, 1), (16, 4, 1), (12, 3, 2), (12, 4, 2), (8, 4, 1)]
)
def test_replicas_lie_outside_the_nodes_own_parallel_group(count: int, size: int, replicas: int) -> None:
    nodes = line(count)
    together = labels_of(nodes, size)
    chosen = peers(nodes, replicas, together)
    for name, held in chosen.items():
        assert len({together[name], *(together[peer] for peer in held)}) == replicas + 1
    assert len(holder_sets(chosen)) == count // (replicas + 1), "as few fatal sets as without labels"
    more = alternatives(nodes, replicas, together)
    assert together[more["n000"][0]] != together["n000"]


@quick
@given(domains, st.integers(1, 3), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_labels_never_weaken_what_domains_demand(
    numbers: list[int], replicas: int, labelled: list[int]
) -> None:
    nodes = in_domains(numbers)
    where = {n.node: n.domain for n in nodes}
    together = {n.node: f"l{label}" for n, label in zip(nodes, labelled, strict=False)}
    for name, held in peers(nodes, replicas, together).items():
        used = [where[name], *(where[peer] for peer in held)]
        assert len(set(used)) == len(used) == min(replicas, len(set(numbers)) - 1) + 1
    assert peers(nodes, replicas, {}) == peers(nodes, replicas)
    assert peers(nodes, replicas, dict.fromkeys(where, "one")).keys() == where.keys()


# --- who moves when nodes come and go ---------------------------------------------------------------------------
def moved(old: Sequence[NodeInfo], new: Sequence[NodeInfo], replicas: int) -> tuple[int, int]:
    """(copies that go to a node which did not hold them, those of them that had to: the holder left)."""
    before, after = peers(old, replicas), peers(new, replicas)
    here = {n.node for n in new}
    sent = sum(len(set(after[name]) - set(before[name])) for name in after if name in before)
    gone = sum(len(set(before[name]) - here) for name in after if name in before)
    return sent, gone


fleets = st.tuples(st.integers(2, 40), st.integers(1, 3), st.randoms(use_true_random=False))


@quick
@given(fleets)
def test_newcomers_take_the_places_of_those_who_left(fleet: tuple[int, int, Any]) -> None:
    count, replicas, rng = fleet
    old = line(count)
    left = set(rng.sample(range(count), rng.randint(1, count - 1)))
    new = [node(f"new{i}") if i in left else n for i, n in enumerate(old)]
    rng.shuffle(new)
    seated = positions(old, new, replicas)
    assert sorted(n.node for n in seated) == sorted(n.node for n in new)
    sent, gone = moved(old, seated, replicas)
    assert sent == gone, "nothing moves that was not lost"


@quick
@given(fleets)
def test_one_node_more_or_less_moves_no_more_than_the_groups_at_the_end(fleet: tuple[int, int, Any]) -> None:
    count, replicas, rng = fleet
    old, m = line(count + replicas + 1), replicas + 1
    less = [n for n in old if n is not rng.choice(old)]
    sent, gone = moved(old, positions(old, less, replicas), replicas)
    ring = (3 * m - 1) * replicas  # a broken group, the last full one and the remainder: at most 3m - 1 nodes
    assert sent <= gone + ring
    sent, gone = moved(old, positions(old, [*old, node("new")], replicas), replicas)
    assert (gone, sent <= ring) == (0, True)


def test_a_newcomer_of_the_lost_domain_is_not_wasted_on_another_group() -> None:
    """n0 and n2 left. Only the newcomer of domain 2 can complete n3's group, which has domain 0 already."""
    old = in_domains([0, 1, 2, 0])
    new = [node("two", "d2"), *old[1::2], node("zero", "d0")]
    assert [n.node for n in positions(old, new, 1)] == ["zero", "n1", "two", "n3"]
    assert moved(old, positions(old, new, 1), 1) == (2, 2)


def test_newcomers_of_one_domain_do_not_fill_one_group() -> None:
    """All of the first group left, and n4: its peer, too, gets one, and the whole pair n2, n3 stays as it is."""
    old = in_domains([0, 1, 2, 3, 4, 5])
    new = [node("x", "d0"), node("y", "d0"), node("z", "d2"), old[2], old[3], old[5]]
    seated = positions(old, new, 1)
    assert [n.node for n in seated] == ["x", "z", "n2", "n3", "y", "n5"]
    assert moved(old, seated, 1) == (1, 1)


def test_seats_follow_the_groups_that_labels_made() -> None:
    """n0 and n2 hold each other's, for n0 and n1 are one parallel group."""
    old = line(4)
    together = labels_of(old, 2)
    new = [old[0], node("new"), *old[2:]]
    seated = positions(old, new, 1, {**together, "new": together["n001"]})
    assert [n.node for n in seated] == ["n000", "n002", "new", "n003"]


def test_without_seats_one_lost_node_moves_nearly_everything() -> None:
    """What it is for: 64 nodes, node 3 is lost."""
    old = line(64)
    less = [n for n in old if n.node != "n003"]
    assert moved(old, less, 1) == (60, 1)
    assert moved(old, positions(old, less, 1), 1) == (2, 1)
    racks = [node(f"n{i:03d}", f"rack{i // 16}") for i in range(64)]
    changed = [*(n for n in racks if n.node != "n003"), node("new", "rack9")]
    assert moved(racks, positions(racks, changed, 1), 1) == (1, 1)


@quick
@given(domains, st.integers(0, 3), st.lists(st.integers(0, 5), max_size=4), st.randoms(use_true_random=False))
def test_seats_in_any_domains_place_as_well_as_any_order(
    numbers: list[int], replicas: int, coming: list[int], rng: Any
) -> None:
    old = in_domains(numbers)
    new = [n for n in old if rng.random() < 0.7] + [node(f"new{i}", f"d{d}") for i, d in enumerate(coming)]
    seated = positions(old, new, replicas)
    assert sorted(n.node for n in seated) == sorted(n.node for n in new)
    assert positions(seated, seated, replicas) == positions(seated, new, replicas), (
        "the order it is given in does not matter"
    )
    assert peers(positions(seated, new, replicas), replicas) == peers(seated, replicas), (
        "nobody left, nothing moves"
    )
    where = {n.node: n.domain for n in new}
    for name, held in peers(seated, replicas).items():
        assert (
            len({where[name], *(where[peer] for peer in held)})
            == min(replicas, len(set(where.values())) - 1) + 1
        )


def test_seats_of_the_first_epoch_are_as_they_come_and_addresses_are_the_new_ones() -> None:
    assert positions([], line(3), 1) == tuple(line(3))
    again = NodeInfo("n000", "tcp://elsewhere:1", "elsewhere:2", "n000", "2")
    assert positions(line(2), [again, node("n001")], 1)[0] is again
