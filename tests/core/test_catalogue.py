"""The catalogue a rank sees before it says what it wants."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.catalogue import Catalogue, TensorEntry, object_names
from ckptd.core.state_map.layout import MAYBE
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.core.worlds import World, quick, worlds


@quick
@given(worlds())
def test_from_layouts_there_and_back(world: World) -> None:
    names = {rank: object_names(world.digests(rank)) for rank in world.layouts}
    found = Catalogue.from_layouts(world.layouts, names, world.per_rank)
    held = {fragment.key for layout in world.layouts.values() for fragment in layout.fragments}
    assert {key: (entry.dtype, entry.shape) for key, entry in found.tensors.items()} == {
        key: known for key, known in world.tensors.items() if key in held
    }
    assert found.objects == {"rng": tuple(range(world.size)), "scheduler": tuple(range(world.size))}
    assert Catalogue.from_bytes(found.to_bytes()) == found
    has = {rank: {fragment.key for fragment in layout.fragments} for rank, layout in world.layouts.items()}
    own = {key: tuple(rank for rank in sorted(has) if key in has[rank]) for key in held if f"t:{key}" in world.per_rank}
    assert found.own == own


def test_the_format_that_ranks_read() -> None:
    item = LayoutItem("w", "BF16", (4, 2), Box((0, 0), (4, 2)), "param", MAYBE, 1)
    layouts = {rank: build_layout(rank, 2, [item], 0, "", [("head", "w")]) for rank in range(2)}
    found = Catalogue.from_layouts(layouts, {0: ["lr", "rng"], 1: ["rng"]}, ["o:rng"])
    assert msgpack.unpackb(found.to_bytes()) == {
        "tensors": {"w": ["BF16", [4, 2], "param"]},
        "objects": {"lr": [0], "rng": "all"},
        "per_rank": ["o:rng"],
        "aliases": {"head": "w"},
        "world": 2,
    }
    of_ranks = Catalogue.from_layouts(layouts, {}, ["t:w"])
    assert msgpack.unpackb(of_ranks.to_bytes())["own"] == {"w": "all"}
    assert msgpack.unpackb(Catalogue.from_layouts({1: layouts[1]}, {}, ["t:w"]).to_bytes())["own"] == {"w": [1]}
    assert (found.canonical("head"), found.canonical("w"), found.canonical("x")) == ("w", "w", "x")
    assert found.tensor("head", 1) == TensorEntry("BF16", (4, 2), "param")
    assert found.tensor("x", 0) is None
    assert (found.owners("lr"), found.owners("x"), found.objects_of(1)) == ((0,), (), ("rng",))


def test_a_catalogue_larger_than_any_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Catalogue.from_layouts({}, {}, []).to_bytes()
    monkeypatch.setattr("ckptd.core.state_map.catalogue.CATALOGUE_BYTES_MAX", len(data))
    assert Catalogue.from_bytes(data).world == 0
    monkeypatch.setattr("ckptd.core.state_map.catalogue.CATALOGUE_BYTES_MAX", len(data) - 1)
    with pytest.raises(ValueError, match="at most"):
        Catalogue.from_bytes(data)


def test_equal_names_of_different_shape_keep_both() -> None:
    """Pipeline stages: each rank sees the entry of its own tensor."""
    layouts = {
        rank: build_layout(
            rank, 2, [LayoutItem("b", "F32", (rank + 3,), Box((0,), (rank + 3,)), "param", MAYBE, 1)]
        )
        for rank in range(2)
    }
    found = Catalogue.from_bytes(Catalogue.from_layouts(layouts, {}, ["t:b"]).to_bytes())
    assert [found.tensor("b", rank) for rank in range(2)] == [
        TensorEntry("F32", (3,), "param"),
        TensorEntry("F32", (4,), "param"),
    ]


GOOD: dict[str, Any] = {"tensors": {}, "objects": {}, "per_rank": [], "aliases": {}, "world": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"world": -1},
        {"world": "2"},
        {"tensors": {"w": ["F32"]}},
        {"tensors": {"w": ["F32", [-1], "param"]}},
        {"tensors": {"w": ["F32", ["x"], "param"]}},
        {"tensors": {"w": [1, [1], "param"]}},
        {"tensors": []},
        {"objects": {"o": [2]}},
        {"objects": {"o": None}},
        {"per_rank": [3]},
        {"aliases": {"a": 1}},
        {"variants": {"w": {"7": ["F32", [1], "param"]}}},
        {"own": {"w": [2]}},
        {"own": {"w": 1}},
    ],
)
def test_a_malformed_catalogue_is_a_value_error(wrong: dict[str, Any]) -> None:
    assert Catalogue.from_dict({**GOOD, "else": 1}).world == 2
    with pytest.raises(ValueError, match="not a catalogue"):
        Catalogue.from_bytes(msgpack.packb({**GOOD, **wrong}))
    with pytest.raises(ValueError, match="not a catalogue"):
        Catalogue.from_bytes(b"\xc1")
