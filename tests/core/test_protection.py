"""The level against its meaning: take away every set of f failure domains and look whether each slice is left (P2, P3)."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.redundancy.protection import level, slice_classes
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.worlds import World, fsdp, quick, worlds

Holders = dict[int, list[tuple[str, int]]]


def complete(world: World, holders: Holders) -> bool:
    """Every rank's objects and every slice are held by someone."""
    for rank, layout in world.layouts.items():
        if not holders.get(rank):
            return False
        for fragment in layout.fragments:
            ranks = [rank] if fragment.sharing != REPLICA else list(world.layouts)
            if fragment.nbytes and not any(
                tier <= other.tier
                for r in ranks
                for other in world.layouts[r].fragments
                if (other.key, other.box, other.sharing) == (fragment.key, fragment.box, fragment.sharing)
                for _, tier in holders.get(r, [])
            ):
                return False
    return True


def survives(world: World, holders: Holders) -> int:
    """The largest f such that any f domains may be lost; -1 when it is incomplete as it is."""
    domains = sorted({domain for held in holders.values() for domain, _ in held})
    for f in range(len(domains) + 1):
        for dead in combinations(domains, f):
            left = {r: [h for h in held if h[0] not in dead] for r, held in holders.items()}
            if not complete(world, left):
                return f - 1
    raise AssertionError("with every domain dead nothing is left")


@quick
@given(st.data(), worlds(ranks=3, tensors=3))
def test_level_is_how_many_domains_may_be_lost(data: st.DataObject, world: World) -> None:
    holding = st.tuples(st.sampled_from("abcd"), st.integers(0, 2))
    holders = {rank: data.draw(st.lists(holding, max_size=4)) for rank in range(world.size)}
    assert level(slice_classes(world.layouts), holders) == survives(world, holders)


def test_the_usual_life_of_a_snapshot() -> None:
    world = fsdp(4)
    classes = slice_classes(world.layouts)
    own: Holders = {rank: [(f"d{rank}", 0)] for rank in range(4)}
    assert level(classes, {rank: own[rank] for rank in range(3)}) == -1, "one rank has not sealed"
    assert level(classes, own) == 0
    with_peers = {rank: [*own[rank], (f"d{rank ^ 1}", 1)] for rank in range(4)}
    assert level(classes, with_peers) == 1
    assert level(classes, {rank: [*own[rank], (f"d{rank}", 1)] for rank in range(4)}) == 0, "same domain"
    assert level(classes, {rank: [h for h in held if h[0] != "d3"] for rank, held in with_peers.items()}) == 0


def ddp(tier: int) -> World:
    """A tensor that ranks 0 and 1 captured by the balanced plan, in a world of three."""
    item = LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", REPLICA, tier)
    layouts = {rank: build_layout(rank, 3, [item] if rank < 2 else [], 64) for rank in range(3)}
    return World(3, layouts, {"w": ("F32", (4,))})


def test_copies_by_contract_count_together_and_objects_alone() -> None:
    classes = slice_classes(ddp(0).layouts)
    own: Holders = {rank: [(f"d{rank}", 0)] for rank in range(3)}
    assert level(classes, own) == 0, "the objects of each rank are in one domain"
    replicas = {rank: [*own[rank], (f"d{(rank + 1) % 3}", 1)] for rank in range(3)}
    assert level(classes, replicas) == 1, "a tier-1 replica has the objects; w is in d0 and d1 anyway"
    assert level(classes, {0: [("d2", 1)], 1: [("d2", 1)], 2: [("d2", 1)]}) == -1, "w itself is nowhere"


def test_parity_counts_for_copies_by_contract_only_where_it_covers_them() -> None:
    """It has the tier-1 prefix of each rank: w of tier 0 is lost with the two domains that captured it."""
    own: Holders = {rank: [(f"d{rank}", 0)] for rank in range(3)}
    spared = dict.fromkeys(range(3), 2)
    assert level(slice_classes(ddp(0).layouts), own, spared) == 1
    assert level(slice_classes(ddp(1).layouts), own, spared) == 2


def test_an_empty_slice_needs_no_holder() -> None:
    items = [
        LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", UNIQUE, 1),
        LayoutItem("none", "F32", (0,), Box((0,), (0,)), "param", UNIQUE, 0),
    ]
    assert level(slice_classes({0: build_layout(0, 1, items, 64)}), {0: [("a", 1), ("b", 1)]}) == 1


def test_plain_copies_count_alone() -> None:
    item = LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", MAYBE, 1)
    layouts = {rank: build_layout(rank, 2, [item], 64) for rank in range(2)}
    assert level(slice_classes(layouts), {0: [("a", 0)], 1: [("b", 0)]}) == 0


def test_a_missing_layout_is_never_complete() -> None:
    world = fsdp(3)
    del world.layouts[1]
    assert level(slice_classes(world.layouts), {rank: [("a", 0)] for rank in range(3)}) == -1
    assert level(slice_classes({}), {}) == -1


def test_classes_are_few_and_remembered() -> None:
    """What the steward asks at every holding depends on ranks, not on the number of fragments."""
    items = [LayoutItem(f"k{i}", "F32", (4,), Box((0,), (4,)), "param", UNIQUE, 1) for i in range(500)]
    copies = [LayoutItem(f"c{i}", "F32", (4,), Box((0,), (4,)), "param", REPLICA, 0) for i in range(500)]
    layouts = {rank: build_layout(rank, 2, items + copies, 64) for rank in range(2)}
    layouts[1] = build_layout(1, 2, copies, 64)
    classes = slice_classes(layouts)
    assert len(classes.alone) == 2
    assert len(classes.shared) == 1
    assert slice_classes(dict(layouts)) is classes
