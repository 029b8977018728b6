"""The room of a slot's record follows from its layout (D1, P14, P15)."""

from __future__ import annotations

import pytest

from ckptd.arena.record import SlotRecord, encode_record
from ckptd.arena.sums import digests
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE, Layout
from ckptd.core.state_map.layout_build import build_layout
from ckptd.core.state_map.record_size import SUM_BYTES, predicted_record, record_bytes
from ckptd.daemon import local_slots
from ckptd.wire import rank as wire
from tests.node.daemon_rig import rig
from tests.node.slots import JOB, write_payload


def many(count: int, sharing: str = MAYBE, key: str = "модель.layers.{}.weight") -> Layout:
    items = [(key.format(i), "F32", (3, 2), Box.whole((3, 2)), "param", sharing, 0) for i in range(count)]
    return build_layout(0, 1, items, objects_capacity=4096)


@pytest.mark.parametrize("sharing", [MAYBE, UNIQUE])
@pytest.mark.parametrize("count", [1, 500, 5000])
def test_what_is_predicted_is_enough_and_not_much_more(count: int, sharing: str) -> None:
    layout = many(count, sharing)
    payload = memoryview(bytearray(layout.payload_bytes))
    objects_bytes = write_payload(payload, layout, seed=1)
    sums = bytes(SUM_BYTES * (count + 1))
    found = digests(layout, sums, payload, objects_bytes)
    needed = len(encode_record(SlotRecord(JOB, SnapshotId(1, 1), 0, 0, layout, objects_bytes, sums, found)))
    for room in (predicted_record(layout), record_bytes(len(layout.encoded), len(sums), found)):
        assert needed <= room <= 1.2 * needed + (64 << 10)


async def test_a_record_larger_than_said_is_told_and_gets_a_larger_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: the rank predicts; when it was wrong the snapshot is void for that reason, and the next one has room."""
    monkeypatch.setattr(local_slots, "RECORD_BYTES_MIN", 4096)
    layout = many(1000)
    async with rig() as house:
        rank = house.rank()
        rank.join("a", layout.payload_bytes)
        await rank.capture(1, layout=layout)
        first = (await rank.heard(wire.Level, step=1))[0].void
        assert first.startswith("record too large: ") and "larger slots are made" in first
        await rank.sealed(2, layout=layout)
        assert 'reason="record too large"' in house.daemon.metrics.render().decode()
