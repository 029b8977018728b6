"""A machine that broke is made anew in the same process: who comes and goes meanwhile is not forgotten (P7, P14)."""

from __future__ import annotations

from ckptd.core.ids import NodeInfo
from ckptd.core.protocol import events as ev
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.daemon.job import JobShell
from ckptd.wire import rank as wire
from tests.node.daemon_rig import Rank, rig
from tests.node.links import eventually


def break_down(shell: JobShell) -> JobMachine:
    """Returns the machine that broke."""
    broken = shell.machine
    broken._events[ev.NodeUp] = lambda event: 1 // 0
    shell.feed(ev.NodeUp("somebody"))
    return broken


def hung_up(rank: Rank) -> bool:
    while True:
        try:
            if rank.link.recv(0) is None:
                return True
        except TimeoutError:
            return False


async def test_a_rank_that_comes_back_before_there_is_a_machine_is_heard() -> None:
    """A client is back within a tenth of a second, and says only once that it is there."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(5)
        shell = house.shell()
        broken = break_down(shell)
        early = house.rank()
        early.join("a", grant=rank.captured[5])
        await early.heard(wire.Ready)
        assert shell.machine is broken, "it came while there was none"
        await eventually(lambda: shell.machine is not broken)
        await eventually(lambda: hung_up(early), what="the end of a connection that the machine knows nothing of")
        again = house.rank()
        again.join("a", grant=rank.captured[5])
        await again.sealed(6)


async def test_a_machine_hears_who_was_gone_before_it_was_made() -> None:
    """Else it waits for ever for a steward that was lost while there was none."""
    async with rig() as house:
        await house.rank().begin("a")
        shell = house.shell()
        house.daemon.control.connect(NodeInfo("b", "tcp://127.0.0.1:1", "127.0.0.1:1", "b"), shell.job)
        await eventually(lambda: shell.machine.view()["down"] == ["b"])
        broken = break_down(shell)
        await eventually(lambda: shell.machine is not broken)
        assert shell.machine.view()["down"] == ["b"]
        await house.rank("other").begin("b")
        assert house.shell("other").machine.view()["down"] == ["b"]


async def test_what_was_released_is_not_listed_again() -> None:
    """P2: which levels are over only the machine that broke had been told."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        for step in (5, 6, 7):
            await rank.sealed(step)
        shell = house.shell()
        assert [row["step"] for row in await shell.durable.steps()] == [7]
        broken = break_down(shell)
        await eventually(lambda: shell.machine is not broken and shell.machine.slots.sealed)
        house.rank().join("a", grant=rank.captured[7])
        await eventually(lambda: shell.machine.levels.told, what="the steward's word")
        assert [row["step"] for row in await shell.durable.steps()] == [7]
