"""How a restore is cut: into parts that fit the scratch memory, and into frames that hold their descriptors."""

from __future__ import annotations

import os

import msgpack
import numpy as np
import pytest

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.pieces import Form, Origin, Pieces
from ckptd.core.state_map.recovery import DURABLE, OWN, Plan, Want
from ckptd.recover.assembly import Assembly
from ckptd.recover.handover import Blobs, Handover
from ckptd.recover.parts import parts_of
from ckptd.wire import rank as wire
from ckptd.wire.memfd import memfd_object
from tests.node.pieces import placed, rows_in


def pieces(*rows: tuple[int, tuple[int, int], str]) -> Pieces:
    """(want, first row and how many, source) of each."""
    boxes = [Box((first, 0), (count, 8)) for _, (first, count), _ in rows]
    want, nbytes = np.array([row[0] for row in rows]), np.array([box.volume * 4 for box in boxes])
    each = np.arange(len(rows))
    forms, origins = [Form(box, box) for box in boxes], [Origin(source, "", 0) for *_, source in rows]
    return Pieces(want, each, each, np.zeros_like(each), nbytes, forms, origins, dict.fromkeys(want.tolist(), "w"))


def test_parts_hold_what_fits_and_own_memory_costs_nothing() -> None:
    whole = Box((0, 0), (100, 8))
    asked = [Want(i, "w", "F32", (100, 8), whole) for i in range(3)]
    plan = Plan(pieces((0, (0, 100), DURABLE), (1, (0, 60), OWN), (1, (60, 40), DURABLE), (2, (0, 100), OWN)))
    parts = parts_of(plan, asked, 1, 1000)
    rows = [[(want.index, want.box.offsets[0], want.box.sizes[0]) for want in part] for part in parts]
    # 31 rows are 992 bytes; want 0 comes first, then what lies here, then the rest of want 1.
    assert rows == [
        [(0, 0, 31)], [(0, 31, 31)], [(0, 62, 31)],
        [(0, 93, 7), (1, 0, 60), (2, 0, 100)], [(1, 60, 31)], [(1, 91, 9)],
    ]  # fmt: skip


async def test_more_segments_than_a_frame_holds_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified mode too: a rank that takes slices of 200 slots."""
    assembly, blobs = Assembly(), Blobs(memfd_object(b"objects"), 7, {"loader": (0, 7)})
    for index in range(200):
        assembly.fds.append(memfd_object(bytes([index])))
        assembly.segment_bytes.append(1)
    monkeypatch.setattr(Assembly, "placed", placed([[at % 50, (at,), (1,), at, 0, (at,), (1,)] for at in range(200)]))
    assembly.bytes_by_source["own"] = 200
    handover = Handover(assembly, blobs, first=10)
    seen, plans = [], []
    try:
        while True:
            frame = handover.frame()
            assert 1 + len(frame.fds) <= wire.FDS_PER_FRAME_MAX and len(frame.fds) == len(frame.segment_bytes)
            plan = msgpack.unpackb(frame.plan, strict_map_key=False)
            plans.append(plan)
            for want, box, segment, *_ in rows_in(plan):
                assert os.pread(frame.fds[segment], 1, 0) == bytes(box.offsets)
                seen.append((want, box.offsets[0]))
            segment, at, length = plan["objects"]["loader"]
            assert os.pread(frame.fds[segment], length, at) == b"objects"
            if handover.last:
                break
            await handover.advance()
    finally:
        handover.release()
        blobs.close()
    assert sorted(seen) == sorted((index % 50, index) for index in range(200))
    assert all(want < 10 for want, _ in seen[:40]), "what is checked first comes first"
    assert [plan["part"] for plan in plans] == [0, 1, 2, 3]
    assert [plan["last"] for plan in plans] == [False, False, False, True]
    assert {plan["mode"] for plan in plans} == {"verified"}
    assert sum(plan["bytes"].get("own", 0) for plan in plans) == 200
