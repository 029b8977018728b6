"""What a daemon's health says of its links ends with its cause: an operator looks where nothing is wrong any more otherwise."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import time

import pytest

from ckptd.arena.tenant import Tenant
from ckptd.core.ids import NodeInfo
from ckptd.core.protocol.life import Tombstone
from ckptd.daemon import graveyard
from ckptd.observe.sight import ALL
from ckptd.wire import link_frames as lf
from ckptd.wire import rank as wire
from ckptd.wire.peer import StatusAsk, StatusReply
from tests.node.daemon_rig import Rank, Rig, everything, layout_here, rig
from tests.node.links import Link, RawPeer, eventually
from tests.node.slots import MIB, small_arena
from tests.short import short_folder


def said(house: Rig) -> set[str]:
    return {problem.text for problem in house.daemon.health.problems() if problem.kind == "control"}


async def test_a_complaint_about_a_node_goes_when_it_is_up_and_only_that() -> None:
    """It stood for ten minutes, serious, with the node up and no job left; of two nodes only one was named."""
    async with rig() as house:
        control = house.daemon.control
        async with Link("x", secret=control.secret) as x, Link("y", secret=control.secret) as y:
            control.connect(NodeInfo("b", x.address, "", ""))
            control.connect(NodeInfo("c", y.address, "", ""))
            expected = {"node 'b' refuses us: this is node 'x', not 'b'", "node 'c' refuses us: this is node 'y', not 'c'"}
            await eventually(lambda: said(house) == expected, 10, "both are named")
            address = x.address
            await x.stop()
            async with Link("b", address, control.secret):
                await eventually(lambda: control.up("b"))
                await eventually(lambda: said(house) == {"node 'c' refuses us: this is node 'y', not 'c'"}, 10, "b is well")


async def test_a_complaint_about_nobody_known_goes_when_it_has_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone under a node's id was shown for minutes after its end, in the same words."""
    ahead = [0.0]
    async with rig() as house:
        monkeypatch.setattr(house.daemon.health, "_clock", lambda: time.time() + ahead[0])
        clone = RawPeer(house.daemon.control.address, house.daemon.secret)
        for _ in range(3):
            assert (await clone.greet("rig", "another", "rig"))[0] == lf.REFUSED
            assert any("node id 'rig' is already taken" in text for text in said(house))
            ahead[0] += 25.0
            assert said(house), "it tries many times in this time"
        ahead[0] += 6.0
        assert not said(house)
        clone.close()


async def test_connections_that_were_refused_are_no_problem_any_more_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said of a peer that had stood still; the third one says it anew though the log waits for the fourth."""
    ahead = [0.0]
    async with rig() as house:
        monkeypatch.setattr(house.daemon.health, "_clock", lambda: time.time() + ahead[0])
        listener = house.daemon.control._listener
        assert listener is not None
        for _ in range(3):
            listener._on_denied("10.0.0.9")
            ahead[0] += 25.0
            assert any("were refused, the last: 10.0.0.9" in text for text in said(house))
        ahead[0] += 6.0
        assert not said(house)


async def test_two_callers_of_status_do_not_take_each_others_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two peers is stopped; the second caller asks just before the first one's time is over."""
    async with rig() as house:
        status = house.daemon.status
        house.daemon.peers_up.update({"well": True, "stopped": True})

        def send(node: str, job: str, message: object) -> bool:
            if isinstance(message, StatusAsk) and node == "well":
                reply = StatusReply(message.request, {"memory": {"budget_bytes": 7}, "ranks": {}})
                asyncio.get_running_loop().call_later(0.2, status.on_message, node, job, reply)
            return True

        monkeypatch.setattr(status._services, "send", send)
        first = asyncio.ensure_future(status._ask_peers())
        await asyncio.sleep(0.9)
        second = asyncio.ensure_future(status._ask_peers())
        assert "well" in await first
        assert "well" in await second
        assert not status._asked


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e308, -1.0])
async def test_seconds_that_a_rank_makes_up_take_nobodys_pages_away(seconds: float) -> None:
    """D20: with one frame any user of the machine took /metrics from everybody, and /status from root."""
    async with rig() as house:
        rank, sessions = house.rank(), house.daemon.rank_listener._link.sessions
        await rank.begin("a")
        await rank.sealed(1)
        grant = await rank.capture(2, seal=False)
        rank.say(wire.SealedSlot(grant.slot, grant.grant, 2, layout_here().layout_id, 0, capture_s=seconds))
        await eventually(lambda: not sessions, what="it is garbage")
        rank = house.rank()
        rank.join("b")
        note, _ = await rank.opened()
        rank.want(note.round, everything(layout_here()))
        await rank.heard(wire.LoadPlan)
        rank.say(wire.Loaded(note.round, True, "", seconds))
        await eventually(lambda: not sessions, what="this, too")
        routes = house.daemon.status.routes()
        assert f'job="{os.getuid()}/rig"'.encode() in routes.metrics(ALL)
        assert json.dumps(await routes.status(ALL), allow_nan=False)


async def no_memory(house: Rig, rank: Rank) -> None:
    """Its state grows beyond all memory."""
    rank.say(wire.Resize(200 << 20))
    await eventually(lambda: "no_memory" in house.problems())


async def test_a_rank_that_needs_less_again_lacks_no_memory() -> None:
    """The user took his change back, and started again: all slots were there, and the node stayed unhealthy for the whole run."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(1)
        await no_memory(house, rank)
        again = house.rank()
        again.join("b", allow_fresh=True)
        note, _ = await again.opened()
        again.want(note.round, everything(layout_here()))
        await again.heard(wire.LoadPlan)
        again.say(wire.Loaded(note.round, True))
        await again.heard(wire.Ready)
        await again.sealed(2)
        await eventually(lambda: "no_memory" not in house.problems())
        assert not any(house.shell().machine.slots.short.values())


async def test_a_rank_that_is_gone_lacks_no_memory() -> None:
    """The next start had fewer ranks, so none had its number, and none could get what it had lacked."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await no_memory(house, rank)
        assert any(house.shell().machine.slots.short.values())
        rank.say(wire.Goodbye(True))
        await eventually(lambda: "no_memory" not in house.problems(), what="an end of what the rank lacked")
        assert not any(house.shell().machine.slots.short.values()), "nor does the core think that it lacks any"


async def test_a_state_directory_that_has_room_again_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/healthz` said 503 until the daemon was restarted, once a list of forgotten jobs could not be written."""
    monkeypatch.setattr(graveyard, "RETRY_S", 0.05)
    async with rig() as house:
        with monkeypatch.context() as patch:
            patch.setattr(house.daemon.state, "write", full)
            house.daemon.graveyard.add("1000/gone", Tombstone(1, 1))
            await eventually(lambda: "state" in house.problems())
        await eventually(lambda: "state" not in house.problems())
        assert house.daemon.state.tombstones() == {"1000/gone": Tombstone(1, 1)}


async def test_memory_beyond_a_budget_that_was_lowered_is_told_until_it_is_gone() -> None:
    """P8: the operator halved it for want of memory and restarted the daemon, which used as much as before without a word."""
    before = small_arena()
    slots = [before.allocate(Tenant("0/rig", 0, "own", rank), 10 * MIB) for rank in range(3)]
    with short_folder() as root:
        house = Rig(root, memory_budget="16MiB")
        taken = {slot.segment.name: os.dup(slot.segment.fd) for slot in slots}
        house.daemon.keeper.taken = lambda: taken  # type: ignore[method-assign]
        await house.start()
        assert "memory_budget is 16.0 MiB now" in house.problems()["over_budget"]
        house.daemon._tell_memory()
        assert "over_budget" in house.problems()
        house.daemon._forget_job("0/rig")
        await eventually(lambda: house.daemon.arena.used_bytes == 0)
        house.daemon._tell_memory()
        assert "over_budget" not in house.problems()
        await house.stop()
    before.close()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
