"""Boxes against sets of indices, one by one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map.box import (
    Box,
    contains,
    covers,
    disjoint,
    flat_range_boxes,
    intersect,
    merge,
    runs,
    split,
    uncovered,
    without,
)
from tests.core.worlds import boxes_in, cells, elements, flat_index, quick, rows_of, shapes, tilings


@quick
@given(st.data(), shapes)
def test_intersect_is_the_common_indices(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = cells([a]) & cells([b])
    part = intersect(a, b)
    assert (part is None) == (not both)
    assert part is None or cells([part]) == both
    assert part == intersect(b, a)


def test_intersect_of_scalars_and_of_different_ranks() -> None:
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    with pytest.raises(ValueError, match="dimensions"):
        intersect(Box((), ()), Box((0,), (1,)))


@quick
@given(st.data(), shapes)
def test_contains_is_subset(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer, inner = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    if inner.volume:
        assert contains(outer, inner) == (cells([inner]) <= cells([outer]))


@quick
@given(st.data(), shapes)
def test_uncovered_is_what_no_box_holds(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    gaps = uncovered(box, boxes)
    assert cells(gaps) == cells([box]) - cells(boxes)
    assert sum(gap.volume for gap in gaps) == len(cells(gaps)), "gaps overlap"
    assert gaps == sorted(gaps, key=lambda gap: gap.offsets)
    assert gaps == uncovered(box, boxes[::-1]), "the order of boxes shows"


@quick
@given(st.data(), shapes)
def test_without_is_the_rest(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    part = intersect(box, data.draw(boxes_in(shape)))
    if part is not None:
        rest = without(box, part)
        assert cells(rest) == cells([box]) - cells([part])
        assert sum(piece.volume for piece in rest) == box.volume - part.volume
        assert len(rest) <= 2 * len(shape)


@quick
@given(st.data(), shapes)
def test_covers_and_disjoint(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(tilings(shape))
    assert covers(shape, parts)
    assert disjoint(parts)
    if parts:
        missing = data.draw(st.sampled_from(parts))
        assert not covers(shape, [part for part in parts if part != missing])
        assert not disjoint([*parts, missing])
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    assert disjoint(boxes) == (sum(box.volume for box in boxes) == len(cells(boxes)))


def test_covers_scalars_and_empties() -> None:
    assert covers((), [Box((), ())])
    assert not covers((), [])
    assert covers((0, 3), [])
    assert not covers((2, 3), [Box((0, 0), (2, 0))])


def test_a_large_grid_is_swept_not_searched() -> None:
    """4096 boxes pair by pair would be 16 million intersections."""
    side, edge = 64, 3
    grid = [Box((i * edge, j * edge), (edge, edge)) for i, j in itertools.product(range(side), repeat=2)]
    assert covers((side * edge, side * edge), grid)
    hole = grid.pop(side * 7 + 9)
    assert uncovered(Box.whole((side * edge, side * edge)), grid) == [hole]
    assert disjoint(grid)


@quick
@given(st.data(), shapes)
def test_merge_keeps_the_indices_and_cannot_go_on(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(tilings(shape, cuts=8))
    some = data.draw(st.lists(st.sampled_from(parts), unique=True)) if parts else []
    joined = merge(some)
    assert cells(joined) == cells(some)
    assert sum(box.volume for box in joined) == len(cells(some))
    for a, b in itertools.combinations(joined, 2):
        assert len(merge([a, b])) == 2
    for part in some:
        assert any(contains(box, part) for box in joined), "a fragment was cut"
    assert joined == merge(some[::-1])


@pytest.mark.parametrize(("shape", "parts"), [((12, 4), 4), ((10, 3), 4), ((7,), 3), ((64, 2, 2), 64)])
def test_merge_of_fsdp_rows_is_the_whole_tensor(shape: tuple[int, ...], parts: int) -> None:
    assert merge(rows_of(shape, parts)) == [Box.whole(shape)]


@quick
@given(st.data(), st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_flat_range_is_its_indices_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_range_boxes(shape, start, stop)
    order = [flat_index(shape, index) for box in boxes for index in elements(box)]
    assert order == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_ranges_of_all_ranks_merge_back() -> None:
    """FSDP1 and ZeRO cut where they like; the fragments of one node become one box again (D12)."""
    shape, cuts = (5, 3, 4), [0, 7, 13, 31, 32, 58, 60]
    pieces = [box for a, b in itertools.pairwise(cuts) for box in flat_range_boxes(shape, a, b)]
    assert merge(pieces) == [Box.whole(shape)]


def test_flat_range_outside_is_an_error() -> None:
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="outside"):
            flat_range_boxes((2, 3), start, stop)
    assert flat_range_boxes((), 0, 1) == [Box((), ())]


@quick
@given(st.data(), shapes, st.sampled_from((1, 2, 4)))
def test_runs_read_the_inner_box(data: st.DataObject, shape: tuple[int, ...], itemsize: int) -> None:
    outer = data.draw(boxes_in(shape))
    inner = Box(outer.offsets, outer.sizes)
    if outer.volume:
        local = data.draw(boxes_in(outer.sizes))
        inner = Box(tuple(a + b for a, b in zip(outer.offsets, local.offsets, strict=True)), local.sizes)
    names = [
        index for index in elements(outer) for _ in range(itemsize)
    ]  # each byte of the store, by element
    found = runs(outer, inner, itemsize)
    read = [name for at, length in found for name in names[at : at + length]]
    assert read == [index for index in elements(inner) for _ in range(itemsize)]
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found)), "neighbours are not joined"


def test_runs_of_scalars_whole_rows_and_strangers() -> None:
    assert runs(Box((), ()), Box((), ()), 4) == [(0, 4)]
    assert runs(Box((2, 0), (4, 8)), Box((3, 0), (2, 8)), 2) == [(16, 32)]
    assert runs(Box((0, 0), (2, 8)), Box((0, 2), (2, 3)), 1) == [(2, 3), (10, 3)]
    with pytest.raises(ValueError, match="inside"):
        runs(Box((0,), (2,)), Box((1,), (2,)), 1)


@quick
@given(st.data(), shapes, st.integers(1, 40))
def test_split_gives_bounded_contiguous_pieces_in_order(data: st.DataObject, shape: tuple[int, ...], most: int) -> None:
    box = data.draw(boxes_in(shape))
    pieces = split(box, most)
    assert all(piece.volume <= most for piece in pieces)
    assert [index for piece in pieces for index in elements(piece)] == list(elements(box)), "in C order, each once"


def test_boxes_that_cross_in_many_dimensions_are_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Box i is cut in dimension i alone: a sweep needs 2**n steps. What was not proven to be covered is not."""
    monkeypatch.setattr("ckptd.core.state_map.box.SWEEP_STEPS_MAX", 10_000)
    dims = 40
    boxes = [Box((0,) * dims, tuple(1 if dim == cut else 2 for dim in range(dims))) for cut in range(dims)]
    whole = Box.whole((2,) * dims)
    assert uncovered(whole, boxes) == [whole]
    assert not disjoint(boxes)
    assert uncovered(whole, [*boxes, whole]) == []
