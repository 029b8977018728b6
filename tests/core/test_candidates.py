"""Which snapshots may be restored: complete, consistent, of this lineage, the newest first (P1, P12, D9, D11)."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.candidates import Candidate, Candidates, find_candidates
from ckptd.core.protocol.messages import HoldingFact, RestoreAsk
from ckptd.core.redundancy.linear import linear_bytes
from ckptd.core.redundancy.parity_sets import Member, ParitySet, ParityShard, joined_digests, shard_layout
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, REPLICA, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.test_protection import complete
from tests.core.worlds import World, epoch, fsdp, quick, worlds

NEW, OLD = SnapshotId(2, 20), SnapshotId(2, 10)
RECORD = epoch(2, ancestry=[SnapshotId(1, 8)])


def found(
    world: World, *held: tuple[str, SnapshotId, int, int], extra: dict[str, Layout] | None = None
) -> tuple[dict[str, list[HoldingFact]], dict[str, Layout]]:
    """(node, snapshot, rank, tier) as inventories tell it."""
    holdings: dict[str, list[HoldingFact]] = {}
    for node, snapshot, rank, tier in held:
        holdings.setdefault(node, []).append(world.fact(snapshot, rank, tier))
    return holdings, {**world.by_id(), **(extra or {})}


def steps(*memory: Any, **more: Any) -> list[SnapshotId]:
    """All that could be restored, each if those before it are left out."""
    steps: list[SnapshotId] = []
    while (best := find_candidates(*memory, **more, excluded=steps).best) is not None:
        steps.append(best.snapshot)
    return steps


def best_of(result: Candidates) -> Candidate:
    assert result.best is not None
    return result.best


@quick
@given(st.data(), worlds(ranks=3, tensors=3))
def test_whole_in_memory_is_every_slice_of_every_rank(data: st.DataObject, world: World) -> None:
    held = data.draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 2)), max_size=6)
    )
    held = [(node, rank % world.size, tier) for node, rank, tier in held]
    holders = {r: [(node, tier) for node, rank, tier in held if rank == r] for r in range(world.size)}
    result = find_candidates(RECORD, *found(world, *((n, NEW, rank, tier) for n, rank, tier in held)))
    best = result.best
    assert (best is not None) == complete(world, holders)
    if best is not None:
        own = set(world.per_rank) | ({"o:rng"} if world.size > 1 else set())
        assert (best.memory, best.durable, set(best.per_rank)) == (True, False, own)
        assert {(s.node, s.rank) for s in best.sources} == {(node, rank) for node, rank, _ in held}
    elif held:
        assert result.passed_over[0].snapshot == NEW
        assert "memory of those who answered" in result.passed_over[0].reason


def test_the_newest_complete_one_comes_first_and_the_others_are_explained() -> None:
    world = fsdp(2)
    result = find_candidates(
        RECORD,
        *found(world, ("a", OLD, 0, 0), ("b", OLD, 1, 0), ("a", NEW, 0, 0)),
        certified=[(NEW, 1, False)],
    )
    assert best_of(result).snapshot == OLD
    passed = result.passed_over[0]
    assert (passed.snapshot, passed.certified) == (NEW, 1)
    assert passed.reason == "memory of those who answered holds nothing of rank 1"


def test_only_this_epoch_and_its_ancestors_up_to_the_fork() -> None:
    """P12: a retrained step never mixes with the lost one."""
    world = fsdp(1)
    names = [SnapshotId(1, 9), SnapshotId(1, 8), SnapshotId(1, 4), SnapshotId(2, 3), SnapshotId(3, 1)]
    memory = found(world, *(("a", name, 0, 0) for name in names))
    assert steps(RECORD, *memory, commits=names) == [SnapshotId(2, 3), SnapshotId(1, 8), SnapshotId(1, 4)]


def test_without_any_record_only_the_newest_epoch_counts() -> None:
    assert steps(None, *found(fsdp(1), ("a", SnapshotId(1, 9), 0, 0)), commits=[NEW]) == [NEW]
    assert find_candidates(None, {}, {}) == Candidates(None, ())


def test_a_commit_fills_gaps_or_stands_alone() -> None:
    world = fsdp(2)
    memory = found(world, ("a", NEW, 0, 0))
    new, old = (best_of(find_candidates(RECORD, *memory, commits=[NEW, OLD], excluded=tried)) for tried in ([], [NEW]))
    assert (new.memory, new.durable, [s.rank for s in new.sources], new.per_rank) == (False, True, [0], ())
    assert (old.memory, old.durable, old.sources) == (False, True, ())


def test_what_was_asked_narrows() -> None:
    world = fsdp(1)
    holdings = found(world, ("a", NEW, 0, 0))
    of_memory: dict[str, Any] = {"commits": [OLD, NEW], "ask": RestoreAsk(source="memory")}
    memory = best_of(find_candidates(RECORD, *holdings, **of_memory))
    assert (memory.snapshot, memory.memory, memory.durable) == (NEW, True, False)
    passed = find_candidates(RECORD, *holdings, **of_memory, excluded=[NEW]).passed_over
    assert [p.reason for p in passed] == ["memory holds nothing of it"]
    durable = find_candidates(RECORD, *holdings, commits=[OLD], ask=RestoreAsk(source="durable"))
    assert best_of(durable).snapshot == OLD
    assert [(p.snapshot, p.reason) for p in durable.passed_over] == [(NEW, "not on durable storage")]
    assert steps(RECORD, *holdings, commits=[OLD], ask=RestoreAsk(step=10)) == [OLD]


def test_a_certified_snapshot_that_is_gone_is_named() -> None:
    """None may be returned only when it is proven that there is no checkpoint (D11)."""
    result = find_candidates(
        RECORD, {}, {}, certified=[(NEW, 1, False), (OLD, -1, False), (SnapshotId(1, 9), 1, True)]
    )
    assert [(p.snapshot, p.certified) for p in result.passed_over] == [(NEW, 1)]


def test_copies_by_contract_that_differ_are_not_restored() -> None:
    item = LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", REPLICA, 1)
    world = World(2, {rank: build_layout(rank, 2, [item]) for rank in range(2)}, {"w": ("F32", (4,))})
    holdings, layouts = found(world, ("a", NEW, 0, 0), ("b", NEW, 1, 0))
    fact = holdings["b"][0]
    holdings["b"] = [dataclasses.replace(fact, digests=tuple((name, b"x" * 16) for name, _ in fact.digests))]
    result = find_candidates(RECORD, holdings, layouts)
    assert "silent corruption" in result.passed_over[0].reason
    durable = find_candidates(RECORD, holdings, layouts, commits=[NEW])
    assert (best_of(durable).memory, best_of(durable).sources) == (False, ())


def test_holders_that_contradict_each_other_are_not_believed() -> None:
    world, other = fsdp(2), fsdp(2, keys=1)
    holdings, layouts = found(world, ("a", NEW, 0, 0), ("b", NEW, 1, 0), extra=other.by_id())
    two_layouts = {**holdings, "c": [other.fact(NEW, 0)]}
    assert "different layouts" in find_candidates(RECORD, two_layouts, layouts).passed_over[0].reason
    fact = holdings["b"][0]
    rotten = dataclasses.replace(fact, digests=tuple((name, b"x" * 16) for name, _ in fact.digests))
    assert (
        "differ in content"
        in find_candidates(RECORD, {**holdings, "c": [rotten]}, layouts).passed_over[0].reason
    )
    plan = build_layout(1, 2, [], 64, "another plan")
    mixed = {"a": holdings["a"], "b": [HoldingFact(NEW, 1, 0, plan.layout_id)]}
    result = find_candidates(RECORD, mixed, {**layouts, plan.layout_id: plan})
    assert result.passed_over[0].reason == "ranks 0, 1 differ in world or capture plan"


def test_two_captures_of_a_step_are_never_put_together() -> None:
    """P1: neither with each other nor with what storage has of the other one."""
    world, first = fsdp(2), dataclasses.replace(NEW, grant=1)
    second = dataclasses.replace(NEW, grant=2)
    holdings, layouts = found(world, ("a", first, 0, 0), ("b", second, 1, 0))
    result = find_candidates(RECORD, holdings, layouts)
    assert result.best is None
    assert [passed.snapshot for passed in result.passed_over] == [second, first]
    result = find_candidates(RECORD, holdings, layouts, commits=[first])
    best = best_of(result)
    assert (best.snapshot, best.durable, {source.node for source in best.sources}) == (first, True, {"a"})
    assert steps(RECORD, holdings, layouts, commits=[first]) == [first]


def test_ranks_of_different_worlds_are_never_put_together() -> None:
    """Their plans are the same, but a slice of one world is another one's in the other."""
    small, large = fsdp(1), fsdp(2)
    holdings, layouts = found(small, ("a", NEW, 0, 0), extra=large.by_id())
    holdings["b"] = [large.fact(NEW, 1)]
    result = find_candidates(RECORD, holdings, layouts)
    assert [p.reason for p in result.passed_over] == ["ranks 0, 1 differ in world or capture plan"]
    durable = best_of(find_candidates(RECORD, holdings, layouts, commits=[NEW]))
    assert (durable.memory, durable.sources) == (False, ())


def test_a_rank_whose_slots_are_all_gone_is_restored_from_parity() -> None:
    world = fsdp(3)
    members = tuple(
        Member(rank, linear_bytes(layout), layout.layout_id) for rank, layout in world.layouts.items()
    )
    parity_set = ParitySet(3, 0, 1, members)
    known = shard_layout(parity_set, 64)
    digests = joined_digests({rank: world.digests(rank) for rank in world.layouts})
    holdings, layouts = found(world, ("b", NEW, 1, 0), ("c", NEW, 2, 0), extra={known.layout_id: known})
    for position, node in enumerate("bc", 1):
        shard = ParityShard(parity_set, position)
        holdings[node].append(HoldingFact(NEW, known.rank, 0, known.layout_id, digests, shard=shard))
    best = best_of(find_candidates(RECORD, holdings, layouts))
    assert (best.memory, best.per_rank) == (True, ("o:rng",))
    assert sorted((s.node, s.rank) for s in best.sources) == [("b", 1), ("b", 3), ("c", 2), ("c", 3)]
    del holdings["c"][1]
    passed = find_candidates(RECORD, holdings, layouts).passed_over
    assert [p.reason for p in passed] == ["memory of those who answered holds nothing of rank 0"]


def test_a_holding_whose_layout_nobody_knows_is_no_holding() -> None:
    holdings, _ = found(fsdp(1), ("a", NEW, 0, 0))
    assert find_candidates(RECORD, holdings, {}) == Candidates(None, ())


def test_only_slices_that_are_nowhere_are_named() -> None:
    """Of rank 0 there is a tier-1 copy: rank 1 has the copy by contract, but its own value of a plain buffer."""
    items = [
        LayoutItem(key, "F32", (4,), Box((0,), (4,)), "param", sharing, tier)
        for key, sharing, tier in (("copy", REPLICA, 0), ("plain", MAYBE, 0), ("here", MAYBE, 1))
    ]
    world = World(2, {rank: build_layout(rank, 2, items, 64) for rank in range(2)}, {})
    layouts = world.by_id()
    holdings = {
        node: [HoldingFact(NEW, rank, tier, world.layouts[rank].layout_id)]
        for node, rank, tier in (("a", 0, 1), ("b", 1, 0))
    }
    (passed,) = find_candidates(RECORD, holdings, layouts).passed_over
    assert passed.reason == "memory of those who answered lacks slice plain of rank 0"


def test_long_reasons_are_counted() -> None:
    world = fsdp(24, shape=(24, 2))
    result = find_candidates(RECORD, *found(world, ("a", NEW, 0, 0)))
    assert result.passed_over[0].reason.endswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 15 more")
    result = find_candidates(RECORD, *found(world, *(("a", NEW, rank, 2) for rank in range(24))))
    assert "lacks slices k0 of rank 0, k1 of rank 0" in result.passed_over[0].reason
