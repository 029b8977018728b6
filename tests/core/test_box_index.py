"""Which of many boxes meet which of many wanted ones, against one pair at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map import box_index
from ckptd.core.state_map.box import Box, disjoint, intersect
from ckptd.core.state_map.box_index import BoxIndex, columns_of
from tests.core.worlds import quick

Stored = dict[str, list[Box]]


def boxes(dims: int, least: int) -> st.SearchStrategy[Box]:
    """Of at least ``least`` elements per dimension."""
    offsets = st.tuples(*[st.integers(0, 5)] * dims)
    return st.builds(Box, offsets, st.tuples(*[st.integers(least, 3)] * dims))


@st.composite
def asked(draw: st.DrawFn) -> tuple[Stored, list[tuple[int, Box]]]:
    """Stored boxes by key, and wanted ones with the number of their tensor; -1: of one that is not there."""
    dims = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    stored = {f"k{at}": draw(st.lists(boxes(count, 1), max_size=6)) for at, count in enumerate(dims)}
    tensors = st.integers(0, len(dims) - 1)
    wants = [(at, draw(boxes(dims[at], 0))) for at in draw(st.lists(tensors, max_size=6))]
    return stored, [(at if draw(st.integers(0, 9)) else -1, box) for at, box in wants]


@quick
@given(asked(), st.sampled_from([1, 3, 1 << 20]))
def test_all_that_meet_are_found_and_nothing_else(case: tuple[Stored, list[tuple[int, Box]]], at_once: int) -> None:
    stored, wants = case
    index = BoxIndex.of(stored)
    rows = [box for found in stored.values() for box in sorted(found, key=lambda box: box.offsets)]
    numbers = np.array([at for at, _ in wants], np.int64)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_index, "PAIRS_AT_ONCE", at_once)
        for meetings in index.meetings(numbers, *columns_of([box for _, box in wants])):
            for want, row, offsets, sizes in zip(*(column.tolist() for column in meetings), strict=True):
                dims = len(wants[want][1].sizes)
                found.append((want, row, Box(tuple(offsets[:dims]), tuple(sizes[:dims]))))
                assert index.box(row, dims) == rows[row]
    expected = [
        (want, row, part)
        for want, (at, box) in enumerate(wants)
        for row in (range(index.first[at], index.first[at + 1]) if at >= 0 else ())
        if (part := intersect(box, rows[row])) is not None and part.volume
    ]
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert [want for want, *_ in found] == sorted(want for want, *_ in found)


@quick
@given(asked())
def test_which_tensors_have_boxes_apart(case: tuple[Stored, list[tuple[int, Box]]]) -> None:
    stored, _ = case
    assert BoxIndex.of(stored).apart.tolist() == [disjoint(found) for found in stored.values()]


def test_nothing_stored_and_nothing_wanted() -> None:
    index = BoxIndex.of({})
    assert index.apart.tolist() == []
    assert list(index.meetings(np.empty(0, np.int64), *columns_of([]))) == []
    none = np.array([-1])
    assert [meetings.want.tolist() for meetings in index.meetings(none, *columns_of([Box((0,), (3,))]))] == [[]]


def test_the_same_boxes_under_other_keys() -> None:
    index = BoxIndex.of({"a": [Box((0,), (2,)), Box((1,), (2,))], "b": [Box((0,), (1,))]})
    other = index.named(lambda key, dims: 1 if (key, dims) == ("x", 1) else None)
    assert [other.number(key, 1) for key in ("a", "b", "x")] == [None, None, 1]
    assert [index.number(key, 1) for key in ("a", "b", "x")] == [0, 1, None]
    assert index.number("a", 2) is None
    assert other.apart is index.apart
