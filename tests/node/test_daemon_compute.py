"""What a job's machine has computed in a thread (core.protocol.instructions.Compute)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.protocol.machine.steward import restore
from ckptd.daemon import supervisor
from tests.node.daemon_rig import rig
from tests.node.links import eventually


async def test_what_breaks_in_a_thread_breaks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: the start would be waited for, for ever."""
    monkeypatch.setattr(supervisor, "PAUSE_FIRST_S", 0.05)
    judge, calls = restore.judge, list[int]()

    def broken_once(*args: Any) -> Any:
        calls.append(threading.get_ident())
        return judge(*args) if len(calls) > 1 else 1 // 0

    monkeypatch.setattr(restore, "judge", broken_once)
    async with rig() as house:
        house.rank().join("a")
        shell = await eventually(lambda: house.daemon.jobs and house.shell())
        broken = shell.machine
        await eventually(lambda: shell.machine is not broken)
        assert "integer division" in house.problems()["internal"]
        await house.rank().begin("b")
        assert threading.get_ident() not in calls


async def test_what_another_machine_had_asked_for_is_not_told_to_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as house:
        await house.rank().begin("a")
        shell, go, heard = house.shell(), threading.Event(), list[ev.Event]()
        monkeypatch.setattr(shell, "feed", heard.append)
        shell._compute(ins.Compute(99, go.wait))
        shell.machine = JobMachine(shell.job, house.daemon.services.node, house.daemon.services.policy)
        shell._compute(ins.Compute(1, go.wait))
        go.set()
        await eventually(lambda: ev.Computed(1, True) in heard)
        assert ev.Computed(99, True) not in heard
