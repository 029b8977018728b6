"""agree() is quick at scale and says word for word what the plain way of saying it says (D7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.state_map import agreement
from ckptd.core.state_map.agreement import (
    Agreement,
    _different_plans,
    agree,
    in_order,
    object_name,
    tensor_name,
)
from ckptd.core.state_map.box import Box, disjoint, intersect
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.worlds import boxes_in, cells, digest, tilings

SHAPES = ((4,), (4, 6), (6, 4, 2), (), (0, 3))
Digests = Sequence[tuple[str, bytes]]


# --- layouts as they come, and as they should not -----------------------------------------------------------------
@st.composite
def items(draw: st.DrawFn, key: str, world: int) -> list[tuple[int, LayoutItem]]:
    """(rank, item): shards or copies of one key, mostly as they should be."""
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(("F32", "BF16")))
    sharing = draw(st.sampled_from((UNIQUE, UNIQUE, REPLICA, MAYBE)))
    boxes = draw(tilings(shape))
    found = []
    for index in range(draw(st.integers(1, 2 * world))):
        rank = index % world if draw(st.booleans()) else draw(st.integers(0, world - 1))
        box = boxes[index % len(boxes)] if boxes else Box.whole(shape)
        odd = draw(st.integers(0, 39))
        if odd == 0 and shape:
            box = draw(boxes_in(shape))
        kind = draw(st.sampled_from((UNIQUE, REPLICA, MAYBE))) if odd == 1 else sharing
        item = LayoutItem(key, dtype, shape, box, "param", kind, 1)
        if odd == 2:
            item = item._replace(dtype="I64")
        found.append((rank, item))
    return found


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[dict[int, Layout], dict[int, Digests]]:
    world = draw(st.integers(1, 5))
    drawn = [entry for key in "abc" for entry in draw(items(key, world))]
    plans = draw(st.sampled_from(("",) * 5 + ("xy",)))
    layouts, sums = {}, {}
    for rank in range(world):
        mine = draw(st.permutations([item for at, item in drawn if at == rank]))
        layouts[rank] = build_layout(rank, world, mine, 64, plans[rank % 2 : rank % 2 + 1])
        names = [tensor_name(f.key, f.box) for f in layouts[rank].fragments if f.sharing != UNIQUE]
        names += [object_name(name) for name in "mn" if draw(st.booleans())]
        sums[rank] = [(n, digest(draw(st.sampled_from((b"s",) * 9 + (b"d",))))) for n in names]
        if draw(st.integers(0, 9)) == 0:
            sums[rank] = [pair for pair in sums[rank] if not pair[0].startswith("t:")]
    if draw(st.integers(0, 9)) == 0:
        del sums[draw(st.integers(0, world - 1))]
    return layouts, sums


@pytest.mark.parametrize("together", [agreement.COMPARED_TOGETHER_MAX, 0, 2])
@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.chaos)])
def test_the_quick_way_says_what_the_plain_way_says(examples: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "COMPARED_TOGETHER_MAX", together)

    @settings(max_examples=examples, deadline=None)
    @given(snapshots())
    def both(snapshot: tuple[dict[int, Layout], dict[int, Digests]]) -> None:
        layouts, sums = snapshot
        now = {rank: in_order(layouts[rank], found) for rank, found in sums.items()}
        assert agree(layouts, now) == plainly(layouts, sums)

    both()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SHAPES).flatmap(lambda shape: st.lists(boxes_in(shape), max_size=6)))
def test_boxes_are_disjoint_when_no_element_is_in_two(boxes: list[Box]) -> None:
    assert disjoint(boxes) == (sum(box.volume for box in boxes) == len(cells(boxes)))


def test_layouts_are_read_once_per_set_and_no_box_is_hashed() -> None:
    """64 ranks x 10 000 fragments took 1.5 to 4 s in the event loop, most of it in the hashes of boxes."""
    layouts = {}
    for rank in range(8):
        parts = [
            LayoutItem(f"k{n}", "F32", (8, 8), Counted((rank, 0), (1, 8)), "param", UNIQUE, 1)
            for n in range(9)
        ]
        layouts[rank] = build_layout(rank, 8, parts)
    Counted.hashed = 0
    before = agreement._claims.cache_info().misses
    for _ in range(3):
        assert agree(layouts, {}) == Agreement((), ())
    assert Counted.hashed == 0
    assert agreement._claims.cache_info().misses == before + 1


class Counted(Box):
    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()


# --- the plain way ------------------------------------------------------------------------------------------------
class _Claims(NamedTuple):
    maybe: tuple[tuple[str, str, tuple[int, ...]], ...]
    replica: tuple[tuple[str, str, tuple[int, ...]], ...]
    unlike: tuple[str, ...]
    errors: tuple[str, ...]


def plainly(layouts: Mapping[int, Layout], digests: Mapping[int, Digests]) -> Agreement:
    claims = _claims(layouts)
    sums = {rank: dict(found) for rank, found in digests.items()}
    per_rank = {f"t:{key}" for key in claims.unlike}
    errors = list(claims.errors)
    for key, name, ranks in claims.maybe:
        values = {sums.get(rank, {}).get(name) for rank in ranks}
        if len(values) > 1 or None in values:
            per_rank.add(f"t:{key}")
    for key, name, ranks in claims.replica:
        errors += _copies_differ(key, name, ranks, sums)
    per_rank.update(_unequal_objects(sums))
    return Agreement(tuple(sorted(per_rank)), tuple(errors))


def _copies_differ(
    key: str, name: str, ranks: tuple[int, ...], sums: Mapping[int, dict[str, bytes]]
) -> list[str]:
    by_value: dict[bytes, list[int]] = {}
    for rank in ranks:
        value = sums.get(rank, {}).get(name)
        if value is not None:
            by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return []
    groups = " and ".join(f"rank {', '.join(map(str, group))}" for group in by_value.values())
    at = name.rpartition("|")[2]
    return [f"silent corruption: copies of {key} at [{at}] differ between {groups}"]


def _unequal_objects(sums: Mapping[int, dict[str, bytes]]) -> set[str]:
    first: dict[str, bytes] = {}
    unequal: set[str] = set()
    for found in sums.values():
        for name, value in found.items():
            if name.startswith("o:") and first.setdefault(name, value) != value:
                unequal.add(name)
    return unequal


def _claims(layouts: Mapping[int, Layout]) -> _Claims:
    by_key: dict[str, list[tuple[int, Fragment]]] = {}
    for rank in sorted(layouts):
        for fragment in layouts[rank].fragments:
            by_key.setdefault(fragment.key, []).append((rank, fragment))
    maybe: list[tuple[str, str, tuple[int, ...]]] = []
    replica: list[tuple[str, str, tuple[int, ...]]] = []
    unlike: list[str] = []
    errors = _different_plans(layouts)
    for key, found in sorted(by_key.items()):
        if len(found) == 1:
            continue
        wrong = _wrong(key, found)
        if wrong and all(fragment.sharing == MAYBE for _, fragment in found):
            unlike.append(key)
        elif wrong:
            errors.append(wrong)
        else:
            maybe += _compared(key, [entry for entry in found if entry[1].sharing == MAYBE])
            replica += _compared(key, [entry for entry in found if entry[1].sharing == REPLICA])
    return _Claims(tuple(maybe), tuple(replica), tuple(unlike), tuple(errors))


def _compared(key: str, found: list[tuple[int, Fragment]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The boxes that several ranks have."""
    ranks: dict[Box, list[int]] = {}
    for rank, fragment in found:
        if fragment.nbytes:
            ranks.setdefault(fragment.box, []).append(rank)
    return [(key, tensor_name(key, box), tuple(held)) for box, held in ranks.items() if len(held) > 1]


def _wrong(key: str, found: list[tuple[int, Fragment]]) -> str:
    """Why these fragments cannot be slices of one tensor; "" when they can."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    boxes: dict[Box, tuple[int, str]] = {}
    for rank, fragment in found:
        kinds.setdefault((fragment.dtype, fragment.shape), rank)
        other, sharing = boxes.setdefault(fragment.box, (rank, fragment.sharing))
        if other == rank or not fragment.nbytes:
            continue
        if sharing != fragment.sharing:
            return f"{key}: rank {other} and rank {rank} disagree whether it is shared"
        if sharing == UNIQUE:
            return f"{key}: rank {other} and rank {rank} both have the same slice for themselves alone"
    if len(kinds) > 1:
        texts = (f"{dtype}{list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
        return f"{key}: {', '.join(texts)}"
    if not _disjoint(list(boxes)):
        return f"{key}: boxes of different ranks overlap without being equal"
    return ""


def _disjoint(boxes: Sequence[Box]) -> bool:
    """No element lies in two of the boxes. Empty boxes are disjoint from everything."""
    solid = [box for box in boxes if box.volume]
    if len(solid) < 2:
        return True
    if len(solid) == 2:
        return intersect(solid[0], solid[1]) is None
    first = solid[0]
    along = [d for d in range(len(first.sizes)) if any(_extent(box, d) != _extent(first, d) for box in solid)]
    if len(along) < 2:  # the usual shards: cut along one dimension, or (no dimension) all the same box
        ends = sorted(_extent(box, d) for d in along for box in solid)
        return bool(ends) and all(a[0] + a[1] <= b[0] for a, b in pairwise(ends))
    return all(intersect(a, b) is None for a, b in combinations(solid, 2))


def _extent(box: Box, dim: int) -> tuple[int, int]:
    return box.offsets[dim], box.sizes[dim]
