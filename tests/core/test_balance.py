"""The balanced plan: as many copies as asked, in different domains, even in bytes, the same on every rank (D8)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map.balance import balanced_plan, plan_id
from tests.core.worlds import quick

items = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 1000), max_size=30).map(
    lambda found: list(found.items())
)


@quick
@given(st.data(), items, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 3))
def test_copies_lie_in_different_domains_whatever_the_order(
    data: st.DataObject, found: list[tuple[str, int]], domains: list[int], copies: int
) -> None:
    domain_of = {rank: f"d{domain}" for rank, domain in enumerate(domains)}
    plan = balanced_plan(found, range(len(domains)), domain_of, copies)
    assert set(plan) == {key for key, _ in found}
    for ranks in plan.values():
        assert list(ranks) == sorted(ranks)
        assert len({domain_of[rank] for rank in ranks}) == len(ranks) == min(copies, len(set(domains)))
    mixed = data.draw(st.permutations(range(len(domains))))
    again = balanced_plan(data.draw(st.permutations(found)), mixed, domain_of, copies)
    assert again == plan
    assert plan_id(again) == plan_id(plan)


@quick
@given(items, st.integers(1, 6))
def test_one_copy_over_equal_ranks_is_within_four_thirds(found: list[tuple[str, int]], ranks: int) -> None:
    """Graham's bound holds against the optimum; the optimum is at least the mean and the largest item."""
    plan = balanced_plan(found, range(ranks), {rank: str(rank) for rank in range(ranks)}, 1)
    load: Counter[int] = Counter()
    for key, nbytes in found:
        load[plan[key][0]] += nbytes
    total, largest = sum(load.values()), max((nbytes for _, nbytes in found), default=0)
    assert max(load.values(), default=0) <= total / ranks + largest


def test_known_loads_come_first() -> None:
    domain_of = {0: "a", 1: "b", 2: "c"}
    plan = balanced_plan([("x", 10), ("y", 10)], [0, 1, 2], domain_of, 1, loads={0: 100, 2: 5})
    assert plan == {"x": (1,), "y": (2,)}


def test_empty_items_are_spread_too() -> None:
    found = [(f"k{i}", 0) for i in range(6)]
    plan = balanced_plan(found, range(3), {rank: str(rank) for rank in range(3)}, 1)
    assert Counter(ranks[0] for ranks in plan.values()) == {0: 2, 1: 2, 2: 2}


def test_the_plan_id_names_the_plan() -> None:
    assert plan_id({"a": (0, 1), "b": (2,)}) == plan_id({"b": [2], "a": [0, 1]})
    ids = {
        plan_id(),
        plan_id({}),
        plan_id({"a": (0,)}),
        plan_id({"a": (1,)}),
        plan_id({"a": (0,)}, {"b": (0,)}),
    }
    assert len(ids) == 5
