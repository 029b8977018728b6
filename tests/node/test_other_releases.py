"""What a daemon says when it meets memory, trainers or daemons of another release (P15): each was met by somebody who upgraded."""

from __future__ import annotations

import os
from dataclasses import asdict

import pytest

from ckptd.arena import segment as segments
from ckptd.arena.segment import Segment
from ckptd.core.ids import NodeInfo
from ckptd.core.protocol import instructions as ins
from ckptd.core.state_map.layout import VERSION
from ckptd.wire import rank as wire
from ckptd.wire.memfd import memfd_object
from ckptd.wire.world import pack_world
from tests.node.daemon_rig import layout_here, rig
from tests.node.links import eventually

NEWER = "not a layout: layout of another version"


def refused(*args: object, **more: object) -> None:
    raise ValueError(NEWER)


@pytest.mark.parametrize("why", [NEWER, "its record does not match its sum"])
async def test_memory_that_cannot_be_used_is_not_forgotten_without_a_word(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A newer release wrote it, or a stray write met its record: the step that it held is gone from memory."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(1)
        (slot,) = (slot for slot in house.shell().all_slots() if slot.record is not None)
        if why == NEWER:
            monkeypatch.setattr(segments, "decode_record", refused)
        else:
            slot.segment.view[slot.row.offset + slot.row.capacity] ^= 1
        again = Segment.adopt(slot.segment.name, os.dup(slot.segment.fd), "2")
        assert {found.id for found in again.slots.values() if found.unread} == {slot.id}, "the others held nothing"
        found = again.slots[slot.id]
        assert found.record is None
        house.shell().adopt(found)
        said = house.problems()["memory"]
        assert "held a snapshot that cannot be used" in said and why in said


async def test_a_trainer_that_is_newer_than_its_daemon_is_a_problem_with_a_remedy() -> None:
    async with rig() as house:
        rank, layout = house.rank(), layout_here()
        await rank.begin("a")
        grant = await rank.capture(1, seal=False)
        fd = memfd_object(layout.encoded[:1] + bytes([VERSION + 1]) + layout.encoded[2:])
        rank.say(wire.SealedSlot(grant.slot, grant.grant, 1, "newer", 0), (fd,))
        os.close(fd)
        void = (await rank.heard(wire.Level, step=1))[0].void
        assert void.startswith(f"seal failed: {NEWER}")
        assert "needs a daemon as new" in house.problems()["layout"]


async def test_the_end_of_a_start_names_the_daemons_that_speak_another_version() -> None:
    async with rig() as house:
        rank = house.rank()
        other = NodeInfo("n2", "tcp://127.0.0.1:1", "127.0.0.1:2", "d2", "n2#1")
        me = house.daemon.services.node
        world = pack_world([other.node, me.node], [asdict(other), asdict(me)])
        rank.say_join(wire.Join("a", 1, layout_here().payload_bytes, {"step": None, "source": None, "allow_fresh": False}), world)
        await eventually(lambda: house.daemon.jobs and house.shell().machine.joining.join)
        skew = "node 'n2' speaks version 8 of the control protocol, we speak 9"
        house.daemon._on_problem(skew, "n2")
        house.shell().restore.fail_join(ins.FailJoin("a", "timeout", "no answer from the steward-elect n2"))
        failed = (await rank.heard(wire.Failed))[0]
        assert skew in failed.reason and failed.reason.startswith("no answer from the steward-elect n2; ")
