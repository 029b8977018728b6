"""One logical value or each rank's own: decided by sums, per snapshot; copies by contract that differ void it (D7)."""

from __future__ import annotations

from hypothesis import given

from ckptd.core.state_map import agreement
from ckptd.core.state_map.agreement import (
    DIMENSIONS_TOGETHER_MAX,
    TENSORS,
    Agreement,
    Digests,
    in_order,
    object_name,
    tensor_name,
)
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.worlds import World, digest, quick, worlds

WHOLE = Box((0,), (4,))


def ranks(
    *parts: list[tuple[str, Box, str]], shape: tuple[int, ...] = (4,), plans: str = ""
) -> dict[int, Layout]:
    """One layout per argument; ``plans``: one letter per rank."""
    found = {}
    for rank, part in enumerate(parts):
        items = [LayoutItem(key, "F32", shape, box, "param", sharing, 1) for key, box, sharing in part]
        found[rank] = build_layout(rank, len(parts), items, 64, plans[rank : rank + 1])
    return found


def sums(*found: dict[str, str]) -> dict[int, Digests]:
    """As an earlier release named them."""
    return {rank: [(name, digest(text.encode())) for name, text in of.items()] for rank, of in enumerate(found)}


def agree(layouts: dict[int, Layout], named: dict[int, Digests]) -> Agreement:
    return agreement.agree(layouts, {rank: in_order(layouts[rank], found) for rank, found in named.items()})


W = tensor_name("w", WHOLE)


def test_names() -> None:
    assert tensor_name("layer.weight", Box((0, 128), (2, 2))) == "t:layer.weight|0,128"
    assert tensor_name("step", Box((), ())) == "t:step|"
    assert object_name("scheduler") == "o:scheduler"


@quick
@given(worlds())
def test_a_consistent_world_agrees_about_everything_but_each_ranks_own(world: World) -> None:
    found = agree(world.layouts, {rank: world.digests(rank) for rank in world.layouts})
    own = set(world.per_rank) | ({"o:rng"} if world.size > 1 else set())
    assert found == Agreement(tuple(sorted(own)), ())


def test_plain_values_decide_anew_in_each_snapshot() -> None:
    """BatchNorm statistics agree at step 0 and differ later."""
    layouts = ranks([("w", WHOLE, MAYBE)], [("w", WHOLE, MAYBE)])
    assert agree(layouts, sums({W: "a"}, {W: "a"})) == Agreement((), ())
    assert agree(layouts, sums({W: "a"}, {W: "b"})) == Agreement(("t:w",), ())
    assert agree(layouts, sums({W: "a"}, {W: "a"})) == Agreement((), ())


def test_a_plain_value_without_a_digest_is_not_believed_equal() -> None:
    layouts = ranks([("w", WHOLE, MAYBE)], [("w", WHOLE, MAYBE)])
    assert agree(layouts, sums({W: "a"}, {})).per_rank == ("t:w",)
    assert agree(layouts, {0: sums({W: "a"})[0]}).per_rank == ("t:w",)


def test_one_different_box_makes_the_whole_key_each_ranks_own() -> None:
    low, high = Box((0,), (2,)), Box((2,), (2,))
    stage = [("w", low, MAYBE)], [("w", high, MAYBE)]
    layouts = ranks(*stage, *stage)
    same = {tensor_name("w", low): "l"}, {tensor_name("w", high): "h"}
    assert agree(layouts, sums(*same, *same)).per_rank == ()
    assert agree(layouts, sums(*same, same[0], {tensor_name("w", high): "other"})).per_rank == ("t:w",)


def test_plain_values_that_cannot_be_compared_are_each_ranks_own() -> None:
    overlap = ranks([("w", WHOLE, MAYBE)], [("w", Box((1,), (2,)), MAYBE)])
    assert agree(overlap, sums({}, {})) == Agreement(("t:w",), ())
    layouts = ranks([("w", WHOLE, MAYBE)], [("w", WHOLE, MAYBE)])
    layouts[1] = build_layout(1, 2, [LayoutItem("w", "F32", (5,), Box((0,), (5,)), "param", MAYBE, 1)], 64)
    assert agree(layouts, sums({W: "a"}, {W: "a"})) == Agreement(("t:w",), ())


def test_copies_by_contract_that_differ_are_silent_corruption() -> None:
    layouts = ranks(*[[("w", WHOLE, REPLICA)]] * 3)
    assert agree(layouts, sums({W: "a"}, {W: "a"}, {W: "a"})) == Agreement((), ())
    found = agree(layouts, sums({W: "a"}, {W: "b"}, {W: "a"}))
    assert found.per_rank == ()
    assert found.errors == ("silent corruption: copies of w at [0] differ between rank 0, 2 and rank 1",)


def test_slices_that_contradict_each_other_are_errors() -> None:
    both = ranks([("w", WHOLE, UNIQUE)], [("w", WHOLE, UNIQUE)])
    assert "for themselves alone" in agree(both, sums({}, {})).errors[0]
    overlap = ranks([("w", WHOLE, UNIQUE)], [("w", Box((1,), (2,)), UNIQUE)])
    assert "overlap" in agree(overlap, sums({}, {})).errors[0]
    mixed = ranks([("w", WHOLE, REPLICA)], [("w", WHOLE, MAYBE)])
    assert "disagree" in agree(mixed, sums({W: "a"}, {W: "a"})).errors[0]
    shapes = ranks([("w", Box((0,), (2,)), UNIQUE)], [("w", Box((2,), (2,)), UNIQUE)])
    shapes[1] = build_layout(1, 2, [LayoutItem("w", "BF16", (4,), Box((2,), (2,)), "param", UNIQUE, 1)], 64)
    assert agree(shapes, sums({}, {})).errors == ("w: F32[4] on rank 0, BF16[4] on rank 1",)


def test_namesakes_in_two_groups_are_one_value_only_while_they_are_equal() -> None:
    """Two pipeline stages, each in a DDP group of its own: equal at step 0, different later, and never corruption (D7)."""
    layouts = ranks(*[[("w", WHOLE, MAYBE)]] * 4)
    assert agree(layouts, sums(*[{W: "a"}] * 4)) == Agreement((), ())
    assert agree(layouts, sums({W: "a"}, {W: "a"}, {W: "b"}, {W: "b"})) == Agreement(("t:w",), ())


def test_different_capture_plans_void_the_snapshot() -> None:
    layouts = ranks([], [], [], plans="xyx")
    (error,) = agree(layouts, sums({}, {}, {})).errors
    assert error.startswith("ranks 0, 1 captured by different plans")


def test_plans_of_a_part_of_the_ranks_are_compared_among_those() -> None:
    def plans(*ids: str) -> tuple[str, ...]:
        layouts = {rank: build_layout(rank, len(ids), [], 64, name) for rank, name in enumerate(ids)}
        return agree(layouts, sums(*[{}] * len(ids))).errors

    assert plans("x|0:p", "x|0:p", "x|2:q", "x|2:q", "x") == ()
    assert plans("x|0:p", "x|0:q", "x|2:q")[0].startswith("ranks 0, 1 captured by different plans")
    assert plans("x|0:p", "y|1:p")[0].startswith("ranks 0, 1 captured by different plans")


def test_objects_are_compared_on_the_ranks_that_have_them() -> None:
    layouts = ranks([], [], [])
    found = agree(layouts, sums({"o:a": "1", "o:b": "1"}, {"o:a": "1", "o:b": "2"}, {"o:a": "1"}))
    assert found == Agreement(("o:b",), ())


def test_digests_that_were_named_lie_in_the_order_of_the_layout() -> None:
    """And one that is missing leaves none: which of them the others would be is not said."""
    low, high = Box((0,), (2,)), Box((2,), (2,))
    (layout,) = ranks([("own", WHOLE, UNIQUE), ("w", high, MAYBE), ("w", low, REPLICA)]).values()
    named = sums({tensor_name("w", low): "l", "o:a": "a", tensor_name("w", high): "h"})[0]
    texts = {low: b"l", high: b"h"}
    whole = b"".join(digest(texts[f.box]) for f in layout.fragments if f.key == "w")
    assert in_order(layout, named) == ((TENSORS, whole), ("o:a", digest(b"a")))
    assert in_order(layout, named[1:]) == (("o:a", digest(b"a")),)
    now = ((TENSORS, whole), ("o:a", b""))
    assert in_order(layout, now) == now


def test_what_is_looked_at_together_with_others_is_not_taken_for_plain_for_their_sake() -> None:
    """Each contradiction is found beside what is shared by all, what is cut apart, and ranks that have nothing of their own."""
    low, high = ("v", Box((0,), (2,)), UNIQUE), ("v", Box((2,), (2,)), UNIQUE)
    twice, shared = ("w", WHOLE, UNIQUE), ("s", WHOLE, MAYBE)
    for others in (([shared], [shared]), ([low], [high]), ([], [], [shared]), ([], [], [])):
        mine, its, *rest = others
        (error,) = agree(ranks([*mine, twice], [*its, twice], *rest), sums(*[{}] * len(others))).errors
        assert error == "w: rank 0 and rank 1 both have the same slice for themselves alone"


def test_tensors_of_very_many_dimensions_are_looked_at_one_by_one() -> None:
    shape = (4, *[1] * DIMENSIONS_TOGETHER_MAX)
    box = Box((0,) * len(shape), shape)
    found = agree(ranks(*[[("w", box, UNIQUE)]] * 2, shape=shape), sums({}, {}))
    assert found.errors == ("w: rank 0 and rank 1 both have the same slice for themselves alone",)


def test_each_copy_that_differs_is_named() -> None:
    layouts = ranks(*[[(key, WHOLE, REPLICA) for key in "vw"]] * 2)
    other = tensor_name("v", WHOLE)
    assert agree(layouts, sums({other: "a", W: "a"}, {other: "b", W: "b"})).errors == tuple(
        f"silent corruption: copies of {key} at [0] differ between rank 0 and rank 1" for key in "vw"
    )
