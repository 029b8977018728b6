"""Layouts: what is built can be read, what was tampered with cannot (P13)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import pack
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import OWN, SHARED
from ckptd.core.state_map.layout import ALIGN_BYTES, PLACED, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.core.state_map.layout_check import decode_layout
from ckptd.core.state_map.layout_reader import TableNotHere
from ckptd.core.state_map.layout_rows import in_columns
from tests.core.old_layouts import in_rows
from tests.core.worlds import World, quick, worlds
from tests.peak import peak_below

HEAD = ("version", "rank", "world", "objects_capacity", "payload_bytes", "plan_id", "aliases", "rows")
NOW = (*HEAD[:-1], "frozen_bytes", "without", "table", "places", "live", "where", "data")
TABLE = ("keys", "words", "where", "data", "rules")
ROW = ("key", "dtype", "shape", "offsets", "sizes", "offset", "nbytes", "role", "sharing", "tier")


def item(
    key: str, shape: tuple[int, ...], tier: int = 1, box: Box | None = None, dtype: str = "F32"
) -> LayoutItem:
    return LayoutItem(key, dtype, shape, box or Box.whole(shape), "param", UNIQUE, tier)


def sample() -> Layout:
    top = Box((0, 0), (2, 3))
    items = [item("low", (5,), 0), item("w", (4, 3), 2, top), item("s", (), 1), item("none", (0, 7), 1)]
    return build_layout(1, 2, items, 100, "plan", [("tied", "w")])


def test_tiers_descend_then_the_given_order_and_everything_is_aligned() -> None:
    layout = sample()
    assert [fragment.key for fragment in layout.fragments] == ["w", "s", "none", "low"]
    assert layout.objects_capacity == 128
    assert [fragment.offset for fragment in layout.fragments] == [128, 192, 256, 256]
    assert [fragment.nbytes for fragment in layout.fragments] == [24, 4, 0, 20]
    assert layout.payload_bytes % ALIGN_BYTES == 0
    assert (layout.live_bytes(2), layout.live_bytes(1), layout.live_bytes(0)) == (
        152,
        256,
        layout.payload_bytes,
    )


def test_the_frozen_part_comes_last_behind_a_gap_and_is_a_layout_of_its_own() -> None:
    """D6: whatever the live part becomes, a frozen part of the same fragments has the same layout, so its bytes can be shared."""
    base = [item("base", (40,), 2)._replace(frozen=True), item("rest", (9,), 1)._replace(frozen=True)]
    layout = build_layout(0, 1, [base[0], item("w", (5,), 1), base[1], item("v", (5,), 2)], 64)
    assert [f.key for f in layout.fragments] == ["v", "w", "base", "rest"]
    live = layout.fragments[1]
    assert live.offset + live.nbytes < layout.frozen_at == layout.fragments[2].offset
    assert layout.frozen_at % 4096 == 0
    assert layout.spans(0) == ((0, layout.frozen_at), (layout.frozen_at, layout.frozen_bytes))
    assert layout.spans(2) == ((0, 84), (layout.frozen_at, 160))
    assert layout.spans(3) == ((0, 64),)
    later = build_layout(0, 1, [*base, item("w", (5,), 1), item("born", (500,), 1)], 128)
    assert layout.frozen.layout_id == later.frozen.layout_id != layout.layout_id
    assert [f.offset for f in layout.frozen.fragments] == [0, 192]
    assert layout.frozen.is_frozen and not layout.is_frozen
    assert Layout.decode(layout.frozen.encoded) == layout.frozen


@quick
@given(worlds(), st.lists(st.text(min_size=1), max_size=2))
def test_memory_of_an_older_daemon_is_read_and_keeps_its_ids(world: World, without: list[str]) -> None:
    """P7: they are named by other nodes, and in segment headers."""
    for layout in world.layouts.values():
        older = in_rows(replace(layout, without=tuple(without)))
        found = Layout.decode(older)
        assert found == replace(layout, without=tuple(without))
        assert found.encoded == older and found.layout_id == hashlib.blake2b(older, digest_size=16).hexdigest()
    assert Layout.decode(in_rows(sample())).layout_id == "f5fdb495340d6a297343aa9d8a034577"  # as it was then


def test_the_frozen_part_of_an_older_layout_has_the_name_that_its_slot_has() -> None:
    """The slot that holds it was written by itself: whoever leans on it would not find it."""
    whole = build_layout(0, 1, [item("w", (5,)), item("base", (40, 2))._replace(frozen=True)], 64)
    alone = Layout.decode(in_rows(whole.frozen))
    assert Layout.decode(in_rows(whole)).frozen.layout_id == alone.layout_id != whole.frozen.layout_id


@pytest.mark.parametrize("new", [0, -64, 63, 1 << 40, None, True])
def test_a_frozen_part_outside_of_its_place_is_refused(new: Any) -> None:
    layout = build_layout(0, 1, [item("w", (5,)), item("base", (40,))._replace(frozen=True)], 64)
    older, now = msgpack.unpackb(in_rows(layout)), msgpack.unpackb(layout.encoded)
    older[-1] = now[NOW.index("frozen_bytes")] = new
    for head in (older, now):
        if head is older or new != 0:  # without a frozen part it is another layout, that is all
            with pytest.raises(ValueError, match=r"."):
                decode_layout(msgpack.packb(head))


@quick
@given(worlds())
def test_a_built_layout_is_read_back_equal(world: World) -> None:
    for layout in world.layouts.values():
        assert Layout.decode(layout.encoded) == layout
        assert Layout.decode(layout.encoded).layout_id == layout.layout_id


def test_plain_tuples_are_items_and_an_unknown_dtype_is_refused() -> None:
    row = ("w", "F8_E4M3", (2,), Box.whole((2,)), "param", UNIQUE, 1)
    assert build_layout(0, 1, [row]).fragments[0].nbytes == 2
    with pytest.raises(ValueError, match="COMPLEX"):
        build_layout(0, 1, [item("w", (2,), dtype="COMPLEX")])
    assert set(ITEMSIZE.values()) == {1, 2, 4, 8}


def tampered(name: str, new: Any, row: int = 0) -> bytes:
    head = msgpack.unpackb(in_rows(sample()))
    if name in HEAD:
        head[HEAD.index(name)] = new
    else:
        head[HEAD.index("rows")][row][ROW.index(name)] = new
    packed: bytes = msgpack.packb(head)
    return packed


@pytest.mark.parametrize("where", ["fragments", "a fragment's key", "aliases"])
def test_nothing_unfolds_to_more_than_its_place_holds(where: str) -> None:
    """P13, D20: 16 MiB of empty lists were 1.4 GB before the first of them was looked at."""
    lists = b"\xdc\xff\xff" + b"\x90" * 0xFFFF
    many = b"\xdd" + (16).to_bytes(4, "big") + lists * 16
    head = b"\x98\x01\x00\x01\x00\x00\xa0"
    data = {
        "fragments": head + b"\x90" + many, "aliases": head + many + b"\x90",
        "a fragment's key": head + b"\x90\x91\x9a" + many,
    }[where]  # fmt: skip
    with peak_below(4 * len(data)), pytest.raises(ValueError, match="not a layout"):
        Layout.decode(data)


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("version", 2),
        ("version", True),
        ("rank", 2),
        ("rank", -1),
        ("rank", False),
        ("world", 0),
        ("world", 1 << 30),
        ("objects_capacity", 64 + 1),
        ("objects_capacity", 1 << 40),
        ("objects_capacity", 256),  # reaches into the first fragment
        ("payload_bytes", 130),
        ("payload_bytes", 1 << 60),
        ("payload_bytes", 3.5),
        ("plan_id", 7),
        ("aliases", [["a", "b", "c"]]),
        ("aliases", [["w", "s"]]),
        ("aliases", [["x", "x"]]),
        ("aliases", [["x", "w"], ["x", "s"]]),
        ("rows", {}),
        ("rows", [[1]]),
        ("rows", None),
        ("key", ""),
        ("key", b"w"),
        ("key", "k" * 5000),
        ("dtype", "F33"),
        ("dtype", ["F32"]),
        ("shape", [4]),
        ("shape", "ab"),
        ("shape", [1] * 65),
        ("shape", [2, 2]),  # the box leaves it
        ("shape", [True, 3]),
        ("offsets", [3, 0]),
        ("offsets", [-1, 0]),
        ("offsets", [0]),
        ("sizes", [2, 4]),
        ("sizes", [1 << 63, 3]),
        ("offset", 129),
        ("offset", 64),
        ("offset", 192),  # onto the next one
        ("offset", -64),
        ("nbytes", 25),
        ("nbytes", 24.0),
        ("role", "secret"),
        ("sharing", "ours"),
        ("tier", 256),
        ("tier", 0),  # the next one has a higher tier
        ("tier", -1),
    ],
)
def test_every_tampered_field_is_refused(name: str, new: Any) -> None:
    with pytest.raises(ValueError, match=r"."):  # whichever check is first; never another exception
        decode_layout(tampered(name, new))


def columns(**changed: list[int]) -> dict[str, list[int]]:
    """With each box and each offset said, whether it follows or not."""
    fragments = sample().fragments
    boxes = dict(zip(OWN, fragments.flat_boxes(), strict=False))
    found = {name: getattr(fragments.table, name) for name in SHARED} | fragments.own | boxes
    return {name: column.tolist() for name, column in found.items()} | {"rule": [0] * len(fragments)} | changed


def packed(columns: dict[str, list[int]], names: tuple[str, ...]) -> dict[str, Any]:
    data, where = pack({name: np.array(columns[name], np.int64) for name in names})
    return {"where": where, "data": data}


def anew(columns: dict[str, list[int]], within: dict[str, Any] | None = None, **head: Any) -> bytes:
    """The sample with these columns, and other values in the head of its table and in its own."""
    fields = dict(zip(NOW, msgpack.unpackb(sample().encoded), strict=True))
    table = dict(zip(TABLE, msgpack.unpackb(fields["table"]), strict=True)) | packed(columns, SHARED)
    table |= {"rules": []} | (within or {})
    fields |= packed(columns, OWN) | {"table": msgpack.packb(list(table.values())), "places": [], "live": PLACED} | head
    found: bytes = msgpack.packb(list(fields.values()))
    return found


def test_what_is_packed_anew_is_the_same() -> None:
    assert decode_layout(anew(columns())) == sample()


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("dtype", [9, 9, 9, 9]), ("dtype", [1, 1, 1, 1]), ("dtype", [0, 0, 0]), ("role", [0, 0, 0, 0]), ("sharing", [0, 0, 0, 0]),
        ("tier", [2, 1, 1, 256]), ("tier", [1, 2, 1, 0]), ("tier", [2, 1, 1]), ("dims", [2, 0, 2, 65]), ("dims", [2, 0, 2, 2]),
        ("rule", [0, 0, 1, 0]), ("rule", [0, 0, 0]),
        ("shape", [4, 3, 0, 7]), ("shape", [1, 3, 0, 7, 5]), ("offsets", [3, 0, 0, 0, 0]), ("offsets", [1 << 62, 0, 0, 0, 0]),
        ("sizes", [2, 4, 0, 7, 5]), ("sizes", [1 << 62, 3, 0, 7, 5]), ("offset", [129, 192, 256, 256]),
        ("offset", [64, 192, 256, 256]), ("offset", [192, 192, 256, 256]), ("offset", [128, 192, 256, 1 << 40]),
        ("offset", [192, 128, 256, 256]),
    ],
)  # fmt: skip
def test_every_column_that_does_not_fit_is_refused(name: str, new: list[int]) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        decode_layout(anew(columns(**{name: new})))


FOREIGN = [
    {"keys": ["w", "s", "none"]}, {"keys": ["w", "s", "none", 7]}, {"keys": None}, {"keys": ["w", "s", "none", ""]},
    {"words": ["F32"]}, {"words": ["x"] * 100}, {"where": []}, {"where": [["dtype", "<u1", 0]]}, {"where": 3}, {"data": b""},
    {"words": ["F32", "F32", "param", "unique"]}, {"words": ["unique", "param", "F32"]},
    {"where": [["dtype", "<u1", 0, 4]] * 12}, {"where": [["dtype", "<f8", 0, 4]]}, {"data": "text"}, {"more": 1},
    {"rules": 3}, {"rules": [[[0]]]}, {"rules": [[[0, 0]]]}, {"rules": [[[0, 2]]] * 5000}, {"rules": [[[0, 2]] * 17]},
    {"rules": [[[0, 1 << 11], [0, 1 << 11]]]},
]  # fmt: skip


@pytest.mark.parametrize(
    "head",
    [
        {"version": 6}, {"version": 1}, {"places": [[0]]}, {"live": 0}, {"live": 5}, {"places": 3},
        {"without": [3]}, {"frozen_bytes": 1 << 40}, {"rank": 2}, {"aliases": [["w", "s"]]},
        {"payload_bytes": 192}, {"table": b""}, {"table": 7}, {"table": "0" * 32}, {"more": 1}, {"where": []}, {"data": b""},
        *({"table": msgpack.packb(list(foreign.values()))} for foreign in FOREIGN),
    ],
)  # fmt: skip
def test_every_other_field_that_does_not_fit_is_refused(head: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        decode_layout(anew(columns(), **head))


@pytest.mark.parametrize("name", [*SHARED, *OWN])
@pytest.mark.parametrize("times", [1, 100])
def test_numbers_below_zero_are_refused(name: str, times: int) -> None:
    """They would be places from the end."""
    items = [item(f"w{i}", (4,), box=Box((1,), (2,))) for i in range(times)]
    fields = dict(zip(NOW, msgpack.unpackb(build_layout(0, 1, items).encoded), strict=True))
    table = dict(zip(TABLE, msgpack.unpackb(fields["table"]), strict=True))
    within = table if name in SHARED else fields
    rows = max(times, next(rows for column, _, _, rows in within["where"] if column == name))
    others = [row for row in within["where"] if row[0] != name]
    within["where"] = [*others, [name, "<i8", len(within["data"]), rows]]
    within["data"] += np.full(rows, -1, np.int64).tobytes()
    fields["table"] = msgpack.packb(list(table.values()))
    with pytest.raises(ValueError, match="numbers below 0"):
        decode_layout(msgpack.packb(list(fields.values())))


def test_many_tensors_of_many_dimensions_are_refused() -> None:
    """Each row would be made as wide as the widest."""
    items = [item(f"w{i}", (2,)) for i in range(1 << 15)]
    assert len(decode_layout(build_layout(0, 1, [*items, item("wide", (1,) * 63)]).encoded).fragments) == len(items) + 1
    with pytest.raises(ValueError, match="more dimensions"):
        decode_layout(build_layout(0, 1, [*items, *items[:1], item("wide", (1,) * 64)]).encoded)


def test_what_is_empty_may_be_as_wide_as_it_likes() -> None:
    layout = build_layout(0, 1, [item("w", (1 << 62,) * 19 + (0,)), item("v", (2,))])
    assert decode_layout(layout.encoded) == layout


@pytest.mark.parametrize("table", FOREIGN)
def test_every_field_of_a_table_that_does_not_fit_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        decode_layout(anew(columns(), table))


def test_a_leaf_is_read_where_its_table_is() -> None:
    layout = sample()
    assert len(layout.leaf) < len(layout.encoded)
    tables = {layout.fragments.table.digest: layout.fragments.table}
    assert Layout.decode(layout.leaf, tables.get) == layout
    assert Layout.decode(layout.leaf, tables.get).layout_id == layout.layout_id
    with pytest.raises(ValueError, match="not here"):
        Layout.decode(layout.leaf)  # a rank says all of it: it may not name what another user's has
    with pytest.raises(TableNotHere) as raised:
        Layout.decode(layout.leaf, {}.get)
    assert raised.value.digest in tables


def test_more_elements_than_there_are_bytes_for_are_refused() -> None:
    """Their product would not fit a number, and could look like a small one."""
    wide = [1 << 32, 1 << 32, 0, 7, 5]
    with pytest.raises(ValueError, match="more elements"):
        decode_layout(anew(columns(shape=wide, sizes=wide)))


def test_few_bytes_do_not_unfold_to_many_numbers() -> None:
    """D20: columns may lie over each other, each as long as the data."""
    data = bytes(32 << 20)
    for names in (SHARED, OWN):
        long = {"where": [[name, "<u1", 0, len(data)] for name in names], "data": data}
        said = anew(columns(), long) if names is SHARED else anew(columns(), **long)
        with peak_below(6 * len(data)), pytest.raises(ValueError, match="not a layout"):
            Layout.decode(said)


def test_one_key_is_one_tensor() -> None:
    parts = [item("w", (4,), box=Box((0,), (2,))), item("w", (4,), box=Box((2,), (2,)))]
    assert len(decode_layout(build_layout(0, 1, parts).encoded).fragments) == 2
    for wrong in (
        [parts[0], parts[0]],
        [parts[0], item("w", (4,), box=Box((1,), (2,)))],
        [parts[0], item("w", (5,), box=Box((2,), (2,)))],
        [parts[0], item("w", (4,), box=Box((2,), (2,)), dtype="I32")],
    ):
        with pytest.raises(ValueError, match="w:"):
            decode_layout(build_layout(0, 1, wrong).encoded)


@quick
@given(st.binary(max_size=200))
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="layout"):
        decode_layout(data)


@quick
@given(st.data())
def test_a_cut_or_flipped_layout_never_breaks_the_reader(data: st.DataObject) -> None:
    """Either refused, or a layout that keeps all bounds (a flipped letter of a key cannot be seen here)."""
    encoded = bytearray(sample().encoded)
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        layout = decode_layout(bytes(encoded))
    except ValueError:
        return
    assert all(f.offset + f.nbytes <= layout.payload_bytes for f in layout.fragments)
    with pytest.raises(ValueError, match="layout"):
        decode_layout(bytes(encoded[:at]))


# --- cuts -----------------------------------------------------------------------------------------------------------
def shares(world: int, rank: int, *, cuts: bool = True, size: int = 12) -> Layout:
    """Of a world in which each rank has its part of the first dimension, and two ranks each a half of the second."""
    half, at = world // 2, rank // 2
    share = -(-size // half)
    box = Box((min(size, at * share), 3 * (rank % 2)), (min(share, max(0, size - at * share)), 3))
    places = ((0, half, at), (1, 2, rank % 2)) if cuts else None
    return build_layout(rank, world, [LayoutItem("w", "F32", (size, 6), box, "param", UNIQUE, 1, False, places), item("s", ())])


@pytest.mark.parametrize("rank", range(8))
def test_what_is_cut_is_what_was_said_of_it(rank: int) -> None:
    layout = shares(8, rank)
    assert layout == shares(8, rank, cuts=False) == decode_layout(layout.encoded)
    assert layout.fragments.places == ((), (rank // 2, rank % 2)) or layout.fragments.places == ((rank // 2, rank % 2), ())
    assert not len(layout.fragments.own["sizes"])
    assert layout.fragments.table is shares(8, 0).fragments.table, "ranks differ in where they stand alone"
    assert len(layout.leaf) < 256


def test_a_box_that_is_not_what_its_cuts_make_is_kept_as_it_is() -> None:
    wrong = LayoutItem("w", "F32", (12, 6), Box((1, 0), (3, 6)), "param", UNIQUE, 1, False, ((0, 4, 1),))
    layout = build_layout(0, 1, [wrong])
    assert layout.fragments.places == () and decode_layout(layout.encoded).fragments[0].box == wrong.box


@pytest.mark.parametrize(("field", "value"), [("places", [[], [4, 0]]), ("places", [[], [0]]), ("places", [[]]), ("live", 3)])
def test_a_place_outside_of_its_cut_is_refused(field: str, value: Any) -> None:
    said = dict(zip(NOW, msgpack.unpackb(shares(8, 0).encoded), strict=True))
    said["places"] = value if field == "places" else said["places"]
    said["live"] = value if field == "live" else said["live"]
    with pytest.raises(ValueError, match="not a layout"):
        decode_layout(msgpack.packb(list(said.values())))


def test_a_box_of_more_parts_than_there_can_be_ranks_is_said_as_a_box() -> None:
    places = ((0, 1 << 11, 0), (1, 1 << 11, 0))
    layout = build_layout(0, 1, [LayoutItem("w", "U8", (1 << 11, 1 << 11), Box((0, 0), (1, 1)), "param", UNIQUE, 1, False, places)])
    assert layout.fragments.table.rules == () and decode_layout(layout.encoded) == layout


def test_a_table_of_this_version_is_none_of_an_older_one() -> None:
    """Whether it is known or not."""
    layout = build_layout(0, 1, [item("w", (4,), box=Box((1,), (2,)))], 64)
    old = msgpack.unpackb(in_columns(layout, [0, 1, 64, layout.payload_bytes, "", ()]))
    old[9] = layout.fragments.table.encoded
    with pytest.raises(ValueError, match="at most 4"):
        decode_layout(msgpack.packb(old))


def test_a_layout_with_columns_of_boxes_is_read_and_keeps_its_name() -> None:
    """Memory that a daemon of before left (version 4)."""
    items = [item("w", (5,), 2), item("base", (40,))._replace(frozen=True), item("none", (0, 7), 2)]
    layout = build_layout(3, 5, items, 64, "plan", [("v", "w")], ["a.*"])
    said = in_columns(layout, [3, 5, 64, layout.payload_bytes, "plan", layout.aliases])
    older = decode_layout(said)
    assert older == layout and older.is_old and older.encoded == said and older.leaf == said
    assert older.layout_id == hashlib.blake2b(said, digest_size=16).hexdigest() != layout.layout_id
    alone = in_columns(layout.frozen, [3, 5, 0, layout.frozen_bytes, "", ()])
    assert older.frozen.layout_id == decode_layout(alone).layout_id
