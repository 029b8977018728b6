"""Cuts by arithmetic are what they are box by box (P16)."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map.apart import cut_apart, parts_of
from ckptd.core.state_map.box import Box, disjoint
from ckptd.core.state_map.fragments import Fragments, Kinds, Table
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.worlds import boxes_in, cells, cut_tensors, elements, quick

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@quick
@given(st.data(), SHAPES, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=3))
def test_parts_that_meet_a_box(data: st.DataObject, shape: tuple[int, ...], said: list[tuple[int, int]]) -> None:
    cuts = tuple((dim % len(shape), parts) for dim, parts in said)
    wanted = data.draw(boxes_in(shape))
    expected = {}
    for place in itertools.product(*(range(parts) for _, parts in cuts)):
        runs = [list(range(size)) for size in shape]
        for (dim, parts), at in zip(cuts, place, strict=True):
            share = -(-len(runs[dim]) // parts)
            runs[dim] = runs[dim][at * share : (at + 1) * share]
        expected[place] = set(itertools.product(*runs)) & set(elements(wanted))
    held = set(data.draw(st.lists(st.sampled_from(list(expected)), unique=True)))
    found = parts_of(shape, cuts, wanted, held)
    assert {part.place: cells([part.both]) for part in found} == {place: expected[place] for place in held if expected[place]}
    assert all(cells([part.both]) <= cells([part.box]) for part in found)


def test_parts_that_nobody_has_are_not_made() -> None:
    """One rank may say that its one byte is a part of a million, or of a million times a million (D20)."""
    (part,) = parts_of((1 << 40,), ((0, 1 << 20), (0, 1 << 20)), Box.whole((1 << 40,)), {(5, 7)})
    assert part.box == Box(((5 << 20) + 7,), (1,)) == part.both


def layouts_of(told: list[list[LayoutItem]]) -> list[Layout]:
    return [build_layout(rank, len(told), items) for rank, items in enumerate(told)]


@quick
@given(st.data(), st.integers(1, 6))
def test_what_is_found_apart_is_apart(data: st.DataObject, ranks: int) -> None:
    told: list[list[LayoutItem]] = [[] for _ in range(ranks)]
    for number in range(3):
        shape = data.draw(SHAPES)
        for rank, box, places in data.draw(cut_tensors(shape, ranks)):
            told[rank].append(LayoutItem(f"k{number}", "F32", shape, box, "param", "unique", 1, False, places))
    layouts = layouts_of(told)
    kinds, tables = Kinds(), dict[Table, list[Fragments]]()
    for layout in layouts:
        tables.setdefault(layout.fragments.table, []).append(layout.fragments)
    numbers = {table: kinds.of(found[0]) for table, found in tables.items()}
    apart = cut_apart(tables, numbers, np.ones(len(kinds.number), bool))
    for (key, *_), at in kinds.number.items():
        boxes = [f.box for layout in layouts for f in layout.fragments if f.key == key]
        assert not apart[at] or disjoint(boxes)


def share(rank: int, at: int, key: str = "w") -> LayoutItem:
    return LayoutItem(key, "F32", (8,), Box((2 * at,), (2,)), "param", "unique", 1, False, ((0, 4, at),))


def test_two_ranks_at_one_place_are_not_apart_nor_are_other_cuts_of_one_tensor() -> None:
    halves = LayoutItem("w", "F32", (8,), Box((0,), (4,)), "param", "unique", 1, False, ((0, 2, 0),))
    for told, expected in (
        ([[share(0, 0)], [share(1, 1)]], True), ([[share(0, 0)], [share(1, 0)]], False), ([[share(0, 2)], [halves]], False),
        ([[share(0, 0), share(0, 0, "v")], [share(1, 1)]], True), ([[share(0, 0), share(0, 0, "v")], [share(1, 0)]], False),
    ):  # fmt: skip
        fragments = [layout.fragments for layout in layouts_of(told)]
        kinds, tables = Kinds(), dict[Table, list[Fragments]]()
        for one in fragments:
            tables.setdefault(one.table, []).append(one)
        numbers = {table: kinds.of(found[0]) for table, found in tables.items()}
        apart = cut_apart(tables, numbers, np.ones(len(kinds.number), bool))
        assert bool(apart[kinds.number["w", "F32", (8,)]]) == expected
