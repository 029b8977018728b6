"""The recovery plan against the bytes themselves: every element once, right, from the best place, or named (P9, P10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map import box_index
from ckptd.core.state_map.box import Box, contains, covers, runs
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.core.state_map.recovery import (
    BY_PARITY,
    DURABLE,
    HOLDERS_LOOKED_AT_MAX,
    OWN,
    PEER,
    Plan,
    Want,
    plan_recovery,
)
from ckptd.core.state_map.source_index import Held, SourceIndex
from tests.core.worlds import World, boxes_in, cells, elements, fsdp, quick, rows_of, value, worlds

Usable = Callable[[SourceIndex, int, int], list[tuple[str, int]]]


def wants_of(world: World, *asked: tuple[str, Box]) -> list[Want]:
    return [Want(10 + i, key, *world.tensors[key], box) for i, (key, box) in enumerate(asked)]


def available(
    world: World, held: Sequence[Held], want: Want, rank: int, own_node: str | None
) -> set[tuple[int, ...]]:
    """Elements of the want that memory has: on ``own_node``, or anywhere when that is None."""
    result: set[tuple[int, ...]] = set()
    for source in held:
        if own_node not in (None, source.node):
            continue
        if f"t:{want.key}" in world.per_rank and source.rank != rank:
            continue
        for fragment in source.layout.fragments:
            full = source.tier == 0 or fragment.tier >= source.tier
            if fragment.key == want.key and full:
                result |= cells([fragment.box])
    return result & cells([want.box])


def read(world: World, plan: Plan, want: Want, rank: int) -> bytes:
    """Carry the plan out for one want, byte run by byte run, as the daemon and the client do."""
    item = ITEMSIZE[want.dtype]
    out = bytearray(want.box.volume * item)
    for piece in plan.pieces:
        if piece.want != want.index:
            continue
        assert contains(piece.stored, piece.box)
        if piece.source == DURABLE:
            salt = world.salt(rank, want.key)
            stored = b"".join(value(want.key, salt, index, item) for index in elements(piece.stored))
        else:
            fragment = world.layouts[piece.rank].fragments[piece.fragment]
            assert (fragment.key, fragment.box) == (piece.key, piece.stored)
            stored = world.payload(piece.rank)[fragment.offset : fragment.offset + fragment.nbytes]
        data = b"".join(stored[at : at + length] for at, length in runs(piece.stored, piece.box, item))
        assert len(data) == piece.nbytes
        at = 0
        for start, length in runs(want.box, piece.box, item):
            out[start : start + length] = data[at : at + length]
            at += length
    return bytes(out)


class Situation(NamedTuple):
    """``read_of``: whose own values storage gives, besides this rank's; of all the same boxes."""

    world: World
    held: list[Held]
    wants: list[Want]
    rank: int
    durable: dict[str, list[Box]]
    read_of: set[int]

    def whose(self, want: Want) -> int:
        return self.rank if want.rank is None else want.rank

    def stored(self, want: Want) -> set[tuple[int, ...]]:
        readable = want.rank is None or want.rank in self.read_of
        return cells(self.durable.get(want.key, [])) & cells([want.box]) if readable else set()

    def plan(self, sources: SourceIndex | list[Held]) -> Plan:
        stored_of = {rank: BoxIndex.of(self.durable) for rank in self.read_of}
        return plan_recovery(self.wants, sources, "a", self.rank, BoxIndex.of(self.durable), self.world.per_rank, stored_of)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    world = draw(worlds())
    ranks = st.integers(0, world.size - 1)
    spots = draw(st.lists(st.tuples(st.sampled_from("abc"), ranks, st.integers(0, 2)), max_size=8))
    held = [Held(node, rank, tier, world.layouts[rank]) for node, rank, tier in spots]
    keys = draw(st.lists(st.sampled_from(sorted(world.tensors)), min_size=1, max_size=4))
    wants = wants_of(world, *((key, draw(boxes_in(world.tensors[key][1]))) for key in keys))
    wants = [replace(want, rank=draw(st.none() | ranks)) for want in wants]
    durable = {
        key: draw(st.lists(boxes_in(world.tensors[key][1]), max_size=2))
        for key in keys
        if draw(st.booleans())
    }
    return Situation(world, held, wants, draw(ranks), durable, draw(st.sets(ranks)))


@quick
@given(situations())
def test_every_element_once_right_and_from_the_best_place(situation: Situation) -> None:
    world, held, wants = situation.world, situation.held, situation.wants
    plan = situation.plan(held)
    for want in wants:
        rank = situation.whose(want)
        pieces = [piece for piece in plan.pieces if piece.want == want.index]
        missing = [box for index, box in plan.uncovered if index == want.index]
        parts = [piece.box for piece in pieces] + missing
        assert covers_exactly(want.box, parts)
        own = available(world, held, want, rank, "a")
        memory = available(world, held, want, rank, None)
        stored = situation.stored(want)
        by_source = {
            source: cells([p.box for p in pieces if p.source == source]) for source in (OWN, PEER, DURABLE)
        }
        assert by_source == {OWN: own, PEER: memory - own, DURABLE: stored - memory}
        assert cells(missing) == cells([want.box]) - memory - stored
        data, expected = read(world, plan, want, rank), wanted_bytes(world, want, rank, missing)
        assert data == expected
    assert [piece.want for piece in plan.pieces] == sorted(piece.want for piece in plan.pieces)
    again = situation.plan(SourceIndex(held[::-1]))
    assert ([*plan.pieces], plan.uncovered) == ([*again.pieces], again.uncovered)
    assert not plan.mismatched


def covers_exactly(box: Box, parts: list[Box]) -> bool:
    return cells(parts) == cells([box]) and sum(part.volume for part in parts) == box.volume


def wanted_bytes(world: World, want: Want, rank: int, missing: list[Box]) -> bytes:
    item, salt, gone = ITEMSIZE[want.dtype], world.salt(rank, want.key), cells(missing)
    return b"".join(
        bytes(item) if index in gone else value(want.key, salt, index, item) for index in elements(want.box)
    )


@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_any_world_into_any_world(new: int) -> None:
    """Four ranks die with one node, their replicas fill another sharding from memory alone."""
    world = fsdp(4, shape=(13, 3))
    held = [Held(f"n{rank}", rank, 0, world.layouts[rank]) for rank in range(3)]
    held += [Held(f"n{(rank + 1) % 4}", rank, 1, world.layouts[rank]) for rank in range(4) if rank != 2]
    for rank, box in enumerate(rows_of((13, 3), new)):
        wants = wants_of(world, ("k0", box), ("k1", box))
        plan = plan_recovery(wants, held, f"n{rank % 3}", rank)
        assert not plan.uncovered
        assert DURABLE not in {piece.source for piece in plan.pieces}
        for want in wants:
            assert read(world, plan, want, rank) == wanted_bytes(world, want, rank, [])
    assert rank <= new


def test_of_many_boxes_only_those_near_the_want_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 ranks restore into another sharding: none of them compares each want with the boxes of all."""
    monkeypatch.setattr(box_index, "PAIRS_AT_ONCE", 1000)
    world = fsdp(1024, shape=(1024, 2), keys=1)
    index = SourceIndex([Held("a", rank, 0, layout) for rank, layout in world.layouts.items()]).boxes
    _, counts = index._near(np.array([0]), np.array([[500, 0]]), np.array([[3, 2]]))
    assert counts.tolist() == [3]


def test_uncovered_slices_are_named() -> None:
    world = fsdp(3, shape=(6, 2), keys=1)
    held = [Held("a", 0, 0, world.layouts[0]), Held("b", 2, 0, world.layouts[2])]
    plan = plan_recovery(wants_of(world, ("k0", Box((1, 0), (4, 2)))), held, "a", 0)
    assert plan.uncovered == ((10, Box((2, 0), (2, 2))),)
    assert [(piece.source, piece.nbytes) for piece in plan.pieces] == [(OWN, 8), (PEER, 8)]
    nothing = plan_recovery([], held, "a", 0)
    assert not (nothing.pieces or nothing.uncovered or nothing.mismatched)


def test_a_source_of_another_dtype_or_shape_is_refused_and_named() -> None:
    world = fsdp(1, shape=(6, 2), keys=1)
    held = [Held("a", 0, 0, world.layouts[0])]
    plan = plan_recovery([Want(0, "k0", "BF16", (6, 2), Box((0, 0), (6, 2)))], held, "a", 0)
    assert (len(plan.pieces), len(plan.uncovered)) == (0, 1)
    assert plan.mismatched == ("k0: wanted BF16[6, 2], the snapshot has F32[6, 2]",)


def test_an_alias_is_found_under_its_canonical_key() -> None:
    item = LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", REPLICA, 1)
    layout = build_layout(0, 1, [item], aliases=[("head", "w")])
    want = Want(0, "head", "F32", (4,), Box((1,), (2,)))
    plan = plan_recovery([want], [Held("a", 0, 0, layout)], "a", 0)
    assert [(piece.key, piece.box) for piece in plan.pieces] == [("w", Box((1,), (2,)))]
    for name in ("head", "w"):
        plan = plan_recovery([want], [Held("a", 0, 2, layout)], "a", 0, BoxIndex.of({name: [Box((0,), (4,))]}))
        assert [piece.source for piece in plan.pieces] == [DURABLE]


def test_each_rank_gets_its_own_value_back() -> None:
    item = LayoutItem("bn", "F32", (4,), Box((0,), (4,)), "buffer", MAYBE, 1)
    layouts = {rank: build_layout(rank, 2, [item]) for rank in range(2)}
    held = [Held("a", 0, 0, layouts[0]), Held("b", 1, 0, layouts[1])]
    want = [Want(0, "bn", "F32", (4,), Box((0,), (4,)))]
    assert [p.rank for p in plan_recovery(want, held, "a", 1, None, {"t:bn"}).pieces] == [1]
    assert plan_recovery(want, held[:1], "a", 1, None, {"t:bn"}).uncovered
    assert [p.rank for p in plan_recovery(want, held[:1], "a", 1).pieces] == [0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_value_of_a_rank_that_is_named(rank: int) -> None:
    """Rank 2 is of a larger world than the one that saved, and wants what others had: from memory, else from storage."""
    item = LayoutItem("bn", "F32", (4,), Box((0,), (4,)), "buffer", MAYBE, 1)
    held = [Held("a", 0, 0, build_layout(0, 2, [item]))]
    wants = [Want(at, "bn", "F32", (4,), Box((0,), (4,)), whose) for at, whose in enumerate((0, 1))]
    stored = {1: BoxIndex.of({"bn": [Box((0,), (4,))]})}
    plan = plan_recovery(wants, held, "a", rank, None, {"t:bn"}, stored)
    assert [(p.want, p.source, p.rank) for p in plan.pieces] == [(0, OWN, 0), (1, DURABLE, 1)]
    assert [at for at, _ in plan_recovery(wants, held, "a", rank, None, {"t:bn"}).uncovered] == [1]
    own = BoxIndex.of({"bn": [Box((0,), (4,))]})  # what this rank can read is nobody else's
    assert [at for at, _ in plan_recovery(wants, held, "a", rank, own, {"t:bn"}).uncovered] == [1]


def test_peers_that_hold_the_same_are_used_evenly() -> None:
    """64 MiB of copies by contract on four peers: each gives a quarter, and ranks do not all ask the same one first."""
    items = [
        LayoutItem(f"k{i}", "F32", (1000 + i,), Box((0,), (1000 + i,)), "param", REPLICA, 0)
        for i in range(64)
    ]
    layouts = {rank: build_layout(rank, 4, items) for rank in range(4)}
    held = SourceIndex([Held(f"n{rank}", rank, 0, layouts[rank]) for rank in range(4)])
    wants = [Want(i, item.key, item.dtype, item.shape, item.box) for i, item in enumerate(items)]
    first: Counter[str] = Counter()
    for rank in range(16):
        plan = plan_recovery(wants, held, "new", rank)
        given_bytes: Counter[str] = Counter()
        for piece in plan.pieces:
            given_bytes[piece.node] += piece.nbytes
        assert max(given_bytes.values()) <= 1.05 * sum(given_bytes.values()) / 4
        first[[*plan.pieces][-1].node] += 1
    assert len(first) >= 3


@quick
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_tensors_that_are_cut_alike_come_right_and_evenly(data: st.DataObject, ranks: int, new: int) -> None:
    """What is decided once for all of them is right for each: fragments have other numbers in the layouts of ranks that hold the
    tensors in another order, and no peer gives more than another one by more than a piece, however few the parts are."""
    shape, count = data.draw(st.sampled_from([(12, 2), (7,), (4, 3)])), data.draw(st.integers(1, 9))
    tensors = {f"k{number}": (data.draw(st.sampled_from(("F32", "BF16"))), shape) for number in range(count)}
    layouts = {}
    for rank, box in enumerate(rows_of(shape, ranks)):
        cuts = ((0, ranks, rank),)
        items = [LayoutItem(key, dtype, shape, box, "param", UNIQUE, 1, False, cuts) for key, (dtype, _) in tensors.items()]
        layouts[rank] = build_layout(rank, ranks, data.draw(st.permutations(items)))
    world = World(ranks, layouts, tensors)
    nodes = data.draw(st.lists(st.sampled_from("bcd"), min_size=1, unique=True))
    index = SourceIndex([Held(node, rank, 0, layout) for rank, layout in layouts.items() for node in nodes])
    for rank, box in enumerate(rows_of(shape, new)):
        wants = wants_of(world, *((key, box) for key in tensors))
        plan = plan_recovery(wants, index, "a", rank)
        assert not plan.uncovered
        for want in wants:
            assert read(world, plan, want, rank) == wanted_bytes(world, want, rank, [])
        given_bytes = Counter(dict.fromkeys(nodes, 0))
        for piece in plan.pieces:
            given_bytes[piece.node] += piece.nbytes
        largest = max(piece.nbytes for piece in plan.pieces)
        assert max(given_bytes.values()) - min(given_bytes.values()) <= largest


def test_a_want_in_one_piece_is_not_cut_up() -> None:
    """Own memory has it in halves and whole: the whole one is taken."""
    whole = LayoutItem("w", "F32", (4,), Box((0,), (4,)), "param", REPLICA, 1)
    halves = [LayoutItem("w", "F32", (4,), Box((at,), (2,)), "param", REPLICA, 1) for at in (0, 2)]
    held = [Held("a", 0, 0, build_layout(0, 2, halves)), Held("a", 1, 0, build_layout(1, 2, [whole]))]
    plan = plan_recovery([Want(0, "w", "F32", (4,), Box((0,), (4,)))], held, "a", 0)
    assert [(piece.rank, piece.box) for piece in plan.pieces] == [(1, Box((0,), (4,)))]
    assert covers((4,), [piece.box for piece in plan.pieces])


def test_boxes_that_overlap_are_not_taken_for_the_whole_because_they_have_as_many_elements() -> None:
    """Rows 0 to 2 twice over are no rows 0 to 4, in memory as on storage."""
    whole, half, again = Box((0,), (4,)), Box((0,), (2,)), Box((0,), (3,))
    items = [LayoutItem("w", "F32", (4,), box, "param", REPLICA, 1) for box in (half, Box((1,), (2,)))]
    held = [Held("a", 0, 0, build_layout(0, 1, items))]
    want = [Want(0, "w", "F32", (4,), whole)]
    assert [box for _, box in plan_recovery(want, held, "a", 0).uncovered] == [Box((3,), (1,))]
    stored = BoxIndex.of({"w": [Box((0,), (1,)), again]})
    plan = plan_recovery(want, [], "a", 0, stored)
    assert [box for _, box in plan.uncovered] == [Box((3,), (1,))]
    assert sum(piece.nbytes for piece in plan.pieces) == 12


def test_what_storage_has_whole_comes_in_one_piece() -> None:
    """However it is cut there: the reader puts it together."""
    halves = BoxIndex.of({"w": [Box((0,), (2,)), Box((2,), (2,))]})
    plan = plan_recovery([Want(0, "w", "F32", (4,), Box((1,), (3,)))], [], "a", 0, halves)
    assert [(piece.source, piece.box) for piece in plan.pieces] == [(DURABLE, Box((1,), (3,)))]


@pytest.mark.parametrize(("shape", "stored"), [((4, 2), (4,)), ((4, 1), (4,)), ((4,), (4, 2)), ((4,), ())])
def test_what_storage_has_in_other_dimensions_is_not_it(shape: tuple[int, ...], stored: tuple[int, ...]) -> None:
    want = Want(0, "w", "F32", shape, Box.whole(shape))
    plan = plan_recovery([want], [], "a", 0, BoxIndex.of({"w": [Box.whole(stored)]}))
    assert (len(plan.pieces), plan.uncovered) == (0, ((0, Box.whole(shape)),))


# --- very many copies -----------------------------------------------------------------------------------------------
def of_all(ranks: int, parity: int) -> list[Held]:
    """One value that all ranks have; the first ones have it by parity alone."""
    items = [LayoutItem("w", "F32", (8,), Box.whole((8,)), "buffer", REPLICA, 1)]
    nodes = (BY_PARITY if rank < parity else f"n{rank}" for rank in range(ranks))
    return [Held(node, rank, 1, build_layout(rank, ranks, items)) for rank, node in enumerate(nodes)]


@pytest.mark.parametrize("parity", [0, HOLDERS_LOOKED_AT_MAX])
@pytest.mark.parametrize(("own", "source"), [("n39", OWN), ("elsewhere", PEER)])
def test_of_very_many_copies_the_nearest_is_taken_although_not_all_are_looked_at(own: str, source: str, parity: int) -> None:
    plan = plan_recovery([Want(0, "w", "F32", (8,), Box.whole((8,)))], of_all(40, parity), own, 0)
    assert [piece.source for piece in plan.pieces] == [source]


def test_of_very_many_copies_a_rank_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each buffer of 4,096 ranks each rank would look at all of them."""
    looked_at = []

    def usable(index: SourceIndex, who: int, tier: int, ask: Usable = SourceIndex.usable) -> list[tuple[str, int]]:
        looked_at.append(who)
        return ask(index, who, tier)

    monkeypatch.setattr(SourceIndex, "usable", usable)
    plan = plan_recovery([Want(0, "w", "F32", (8,), Box.whole((8,)))], of_all(64, 0), "elsewhere", 1)
    assert [piece.source for piece in plan.pieces] == [PEER]
    assert len(looked_at) == HOLDERS_LOOKED_AT_MAX


def test_ranks_take_a_value_that_all_have_from_different_nodes() -> None:
    index = SourceIndex(of_all(64, 0))
    want = [Want(0, "w", "F32", (8,), Box.whole((8,)))]
    asked = {piece.node for rank in range(64) for piece in plan_recovery(want, index, "elsewhere", rank).pieces}
    assert len(asked) > 2 * HOLDERS_LOOKED_AT_MAX


def test_what_will_not_be_asked_for_is_not_looked_at() -> None:
    """Of a pipeline a node wants one stage in sixteen."""

    def stage(rank: int, key: str) -> Held:
        item = LayoutItem(key, "F32", (8,), Box.whole((8,)), "param", UNIQUE, 1)
        return Held(f"n{rank}", rank, 0, build_layout(rank, 2, [item]))

    index = SourceIndex([stage(0, "first"), stage(1, "second")], {"second", "nowhere"})
    wants = [Want(at, key, "F32", (8,), Box.whole((8,))) for at, key in enumerate(("first", "second"))]
    plan = plan_recovery(wants, index, "n1", 0)
    assert [(piece.key, piece.source) for piece in plan.pieces] == [("second", OWN)]
    assert [number for number, _ in plan.uncovered] == [0]


def test_what_nobody_has_of_what_is_cut_is_not_in_the_snapshot() -> None:
    """It is of a tier that no prefix holds: nothing is said of another dtype."""
    item = LayoutItem("w", "F32", (8,), Box((0,), (4,)), "param", UNIQUE, 1, False, ((0, 2, 0),))
    held = [Held("a", 0, 2, build_layout(0, 1, [item]))]
    plan = plan_recovery([Want(0, "w", "BF16", (8,), Box.whole((8,)))], held, "b", 0)
    assert plan.mismatched == () and plan.uncovered


def halves(rank: int, *keys: str) -> Layout:
    """Of each tensor one half."""
    box = Box((4 * rank,), (4,))
    return build_layout(rank, 2, [LayoutItem(key, "F32", (8,), box, "param", UNIQUE, 1, False, ((0, 2, rank),)) for key in keys])


def test_of_what_is_cut_the_part_that_memory_has_is_taken_and_the_rest_from_storage() -> None:
    want = [Want(0, "w", "F32", (8,), Box((2,), (6,)))]
    held = [Held("a", 0, 0, halves(0, "w"))]
    alone = plan_recovery(want, held, "a", 0)
    assert [(piece.source, piece.box) for piece in alone.pieces] == [(OWN, Box((2,), (2,)))]
    assert alone.uncovered == ((0, Box((4,), (4,))),)
    plan = plan_recovery(want, held, "b", 0, BoxIndex.of({"w": [Box((3,), (5,))]}))
    assert [(piece.source, piece.box) for piece in plan.pieces] == [(PEER, Box((2,), (2,))), (DURABLE, Box((4,), (4,)))]


@pytest.mark.parametrize(("own", "source"), [("a", OWN), ("b", PEER)])
def test_what_memory_has_whole_is_not_read_from_storage(own: str, source: str) -> None:
    """P9: however many boxes it takes there, and although storage has all of it."""
    parts = [LayoutItem("w", "F32", (8,), Box((at,), (4,)), "param", UNIQUE, 1) for at in (0, 4)]
    held = [Held("a", 0, 0, build_layout(0, 1, parts))]
    stored = BoxIndex.of({"w": [Box.whole((8,))]})
    plan = plan_recovery([Want(0, "w", "F32", (8,), Box.whole((8,)))], held, own, 0, stored)
    assert [(piece.source, piece.box) for piece in plan.pieces] == [(source, part.box) for part in parts]


@pytest.mark.parametrize(("own", "source"), [("a", OWN), ("b", PEER)])
def test_what_memory_has_in_cut_parts_is_not_read_from_storage(own: str, source: str) -> None:
    held = [Held("a", rank, 0, halves(rank, "w")) for rank in (0, 1)]
    stored = BoxIndex.of({"w": [Box.whole((8,))]})
    plan = plan_recovery([Want(0, "w", "F32", (8,), Box.whole((8,)))], held, own, 0, stored)
    assert [(piece.source, piece.box) for piece in plan.pieces] == [(source, Box((at,), (4,))) for at in (0, 4)]


def test_a_peer_that_has_given_more_than_its_share_gives_nothing_of_all_that_follows() -> None:
    """Of the largest tensor it has the only copy."""

    def whole(rank: int, *tensors: tuple[str, int]) -> Layout:
        rows = (LayoutItem(key, "F32", (n,), Box.whole((n,)), "param", UNIQUE, 1, False, ((0, 1, 0),)) for key, n in tensors)
        return build_layout(rank, 2, rows)

    small = [(f"{size}.{number}", size) for size in (8, 4) for number in range(4)]
    alone, both = whole(0, ("big", 1000)), whole(1, *small)
    held = [Held("b", 0, 0, alone), Held("b", 1, 0, both), Held("c", 1, 0, both)]
    wants = [Want(at, key, "F32", (n,), Box.whole((n,))) for at, (key, n) in enumerate([("big", 1000), *small])]
    plan = plan_recovery(wants, held, "a", 0)
    assert [(piece.key, piece.node) for piece in plan.pieces] == [("big", "b"), *((key, "c") for key, _ in small)]


def test_what_no_prefix_holds_is_not_in_memory() -> None:
    """The holding on b begins with a higher tier than that tensor's. Of such boxes, that follow from no cuts, there are rows."""
    box = Box((1,), (4,))
    items = [LayoutItem(key, "F32", (8,), box, "param", UNIQUE, tier) for key, tier in (("low", 1), ("high", 2))]
    held = [Held("b", 0, 2, build_layout(0, 1, items))]
    plan = plan_recovery([Want(at, key, "F32", (8,), box) for at, key in enumerate(("low", "high"))], held, "a", 0)
    assert [piece.key for piece in plan.pieces] == ["high"]
    assert plan.uncovered == ((0, box),)


def test_for_tensors_that_are_cut_alike_it_is_found_once_what_a_want_meets() -> None:
    index = SourceIndex([Held("a", rank, 0, halves(rank, "v", "w")) for rank in range(2)])
    found = []
    for key in "vw":
        cut = index.cut(index.kinds(key)["F32", (8,)])
        assert cut is not None
        found.append(index.parts(cut.way, (8,), Box((2,), (4,))))
    assert found[0] is found[1] and found[0].volume == 4
