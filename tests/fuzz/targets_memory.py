"""What lies in memory that a rank can write to, and what describes it: segment header, records, layouts, objects, wants."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import msgpack
import xxhash

from ckptd.arena import header as segment_header
from ckptd.arena import memory
from ckptd.arena.arena import Arena
from ckptd.arena.header import HEADER_BYTES, Header, HeaderCorrupt
from ckptd.arena.objects import split_objects
from ckptd.arena.record import decode_record, encode_record
from ckptd.arena.segment import Segment
from ckptd.arena.sums import digests
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.catalogue import Catalogue
from ckptd.core.state_map.layout import UNIQUE, Layout
from ckptd.core.state_map.layout_build import build_layout
from ckptd.recover.wants import Wants
from tests.fuzz.target import Target
from tests.node.slots import MIB, OWN, PEER, fill_and_seal, frozen_layout, small_arena, small_layout


# --- the segment header and the segment ---------------------------------------------------------------------------------
def tiny_layout() -> Layout:
    items = [
        ("w", "F32", (8, 4), Box.whole((8, 4)), "param", UNIQUE, 1),
        ("s", "I64", (), Box.whole(()), "optim", "maybe", 0),
    ]
    return build_layout(0, 2, items, objects_capacity=128, plan_id="p", aliases=[("tied", "w")])


@cache
def arena() -> tuple[Arena, dict[str, bytes]]:
    """One own and one peer segment with slots in every state, and their bytes."""
    made = small_arena(segment_bytes=MIB)
    for tenant in (OWN, PEER):
        for step in (1, 2):
            fill_and_seal(made.allocate(tenant, 4096), step, layout=tiny_layout())
        made.allocate(tenant, 4096).fill(9)
        made.allocate(tenant, 4096)
    segments = {slot.segment.name: slot.segment for slot in made.slots.values()}
    return made, {name: bytes(segment.view) for name, segment in segments.items()}


def _heads() -> list[bytes]:
    """Both headers, and each alone: the other may have been torn."""
    both = [data[: 2 * HEADER_BYTES] for data in arena()[1].values()]
    gone = bytes(HEADER_BYTES)
    return [head for data in both for head in (data, data[:HEADER_BYTES] + gone, gone + data[HEADER_BYTES:])]


def _header_target(data: bytes) -> Header:
    """Whose segment it is stands in its name, which trainers cannot write; here the sample's that it resembles."""
    name, size = _like(data)
    return segment_header.read_header(data[:HEADER_BYTES], data[HEADER_BYTES : 2 * HEADER_BYTES], name, size)


def _like(data: bytes) -> tuple[str, int]:
    known = arena()[1]
    name = next((name for name in known if name.encode() in data), next(iter(known)))
    return name, len(known[name])


def _bodies() -> list[bytes]:
    found = []
    for name, data in arena()[1].items():
        header = segment_header.read_header(
            data[:HEADER_BYTES], data[HEADER_BYTES : 2 * HEADER_BYTES], name, len(data)
        )
        found.append(segment_header.encode_header(header)[segment_header._PREFIX.size :])
    return found


def _sealed_header(body: bytes) -> Header:
    """As whoever maps the memory can write it: with the right sum."""
    serial = 7
    prefix = segment_header._MAGIC, len(body) % (1 << 32), serial, segment_header._sum(serial, body)
    head = segment_header._PREFIX.pack(*prefix) + body
    name, size = _like(body)
    return segment_header.read_header(head, b"", name, size)


def _segments() -> list[bytes]:
    """(slot number, record) of a segment, to be put where the segment header says with the sum it needs."""
    return [encode_record(record) for record in _records()]


def _adopt(data: bytes) -> None:
    """A segment whose first slot's record is ``data``, summed as it should be: it comes back, or that slot is free."""
    name, whole = next(iter(arena()[1].items()))
    header = segment_header.read_header(
        whole[:HEADER_BYTES], whole[HEADER_BYTES : 2 * HEADER_BYTES], name, len(whole)
    )
    row = replace(header.slots[0], meta_bytes=len(data), meta_sum=xxhash.xxh3_128_digest(data))
    fd = memory.make_memfd(name, len(whole))
    try:
        os.pwrite(fd, segment_header.encode_header(replace(header, slots=(row, *header.slots[1:]))), 0)
        os.pwrite(fd, data[: row.meta_capacity], row.offset + row.capacity)
        segment = Segment.adopt(name, fd, "again")
    except HeaderCorrupt:
        os.close(fd)
        raise
    assert {slot.state for slot in segment.slots.values()} <= {"free", "sealed"}
    for slot in segment.slots.values():
        assert slot.record is None or slot.record.layout.live_bytes(slot.record.tier) <= slot.row.capacity
    segment.destroy()


def _records() -> list[Any]:
    return [slot.record for slot in arena()[0].slots.values() if slot.record is not None]


# --- layouts and what is wanted of them -------------------------------------------------------------------------
def _layouts() -> list[bytes]:
    return [
        layout.encoded
        for layout in (tiny_layout(), small_layout(), frozen_layout(), build_layout(0, 1, [], 0))
    ]


def _wants() -> list[bytes]:
    rows = [["w", "F32", [8, 4], [0, 0], [8, 2]], ["s", "I64", [], [], []]]
    some = {"tensors": rows, "objects": ["rng", "loader"], "first": 1}, {"tensors": [], "objects": []}
    return [msgpack.packb(wants) for wants in (*some, {"tensors": rows, "objects": [], "ranks": {1: 3}})]


def _pack_wants(wants: Wants) -> bytes:
    rows = [[t.key, t.dtype, t.shape, t.box.offsets, t.box.sizes] for t in wants.tensors]
    ranks = {t.index: t.rank for t in wants.tensors if t.rank is not None}
    packed: bytes = msgpack.packb({"tensors": rows, "objects": wants.objects, "first": wants.first, "ranks": ranks})
    return packed


def _wanted(data: bytes) -> Wants:
    wants = Wants.decode(data)
    assert all(piece.box.volume >= 0 for piece in wants.tensors), "whose bytes are counted"
    return wants


def _objects() -> list[bytes]:
    return [msgpack.packb({"rng": b"1" * 40, "loader": b""}) + bytes(20), msgpack.packb({})]


def _digests(data: bytes) -> Any:
    layout = tiny_layout()
    sums = bytes(16 * len(layout.blocks()))
    return digests(
        layout, sums, memoryview(data[:128].ljust(layout.payload_bytes, b"\0")), min(len(data), 128)
    )


def _catalogues() -> list[bytes]:
    layouts = {0: tiny_layout(), 1: replace(tiny_layout(), rank=1)}
    names = {0: ["rng", "loader"], 1: ["rng"]}
    one = Catalogue.from_layouts(layouts, names, ["o:rng"])
    other = replace(one, variants={"w": {1: one.tensors["s"]}})
    return [one.to_bytes(), other.to_bytes()]


TARGETS = [
    Target("header", _header_target, _heads, (HeaderCorrupt,), summed=True),
    Target("header-forged", _sealed_header, _bodies, (HeaderCorrupt,), "msgpack"),
    Target("slot-record", decode_record, _segments, (ValueError,), "msgpack", encode_record),
    Target("segment", _adopt, _segments, (HeaderCorrupt,), "msgpack"),
    Target("layout", Layout.decode, _layouts, (ValueError,), "msgpack", lambda layout: layout.encoded),
    Target("wants", _wanted, _wants, (ValueError,), "msgpack", _pack_wants),
    Target("objects", split_objects, _objects, (ValueError,), "msgpack", msgpack.packb),
    Target("object-digests", _digests, lambda: [msgpack.packb({"rng": b"1" * 40, "loader": b""})], (ValueError,), "msgpack"),
    Target("catalogue", Catalogue.from_bytes, _catalogues, (ValueError,), "msgpack", Catalogue.to_bytes),
]  # fmt: skip
