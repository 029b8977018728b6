"""`ckptd forget JOB` on one node: a job that is over leaves nothing, and begins anew (D19, P15)."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.protocol.life import Tombstone, is_grave
from ckptd.daemon import forget, rank_listener
from ckptd.daemon.forget import REQUESTS_PER_USER_MAX
from ckptd.daemon.state import StateDir
from ckptd.persist.commits import list_commits
from ckptd.persist.lineage import claim_epoch, newest_record
from ckptd.persist.storage.posix import PosixStorage
from ckptd.wire import rank as wire
from ckptd.wire.peer import ForgetOrder, ForgetReply
from tests.node.daemon_rig import Rig, rig
from tests.node.links import eventually
from tests.node.rank_child import rank_child
from tests.node.started import Started
from tests.node.test_job_life import SMALL, phase, until_durable

FIRST = f"{os.getuid()}/first"


async def ckptd(house: Rig, *arguments: str) -> tuple[int, str]:
    """The command, as the operator runs it: exit status and what it says."""

    def run() -> tuple[int, str]:
        process = Started(*arguments, "--socket", house.daemon.config.socket)
        said = "".join(process.communicate())
        assert process.returncode is not None
        return process.returncode, said

    return await asyncio.to_thread(run)


async def killed(house: Rig, step: int = 5) -> None:
    async with rank_child(house, "first", SMALL) as child:
        await child.order(f"seal {step}")
        await child.kill()
    await eventually(lambda: phase(house, "first") == "orphaned")


async def begins_anew(house: Rig) -> wire.Ready:
    """Its next start asks for a restore, and nothing is found."""
    rank = house.rank("first")
    rank.join("next")
    ready, _ = await rank.heard(wire.Ready)
    return ready


async def test_a_forgotten_job_leaves_no_memory_and_begins_anew() -> None:
    async with rig() as house:
        await killed(house)
        before = house.shell("first").record
        code, said = await ckptd(house, "forget", "first", "--json")
        assert code == 0, said
        assert json.loads(said)["job"] == FIRST
        await eventually(lambda: house.daemon.arena.used_bytes == 0)
        assert phase(house, "first") == "forgotten" and before is not None
        number = before.number
        assert StateDir(Path(house.daemon.config.state_dir)).tombstones() == {FIRST: Tombstone(number, number, number)}
        assert (await begins_anew(house)).epoch > before.number
        code, said = await ckptd(house, "forget", "first")
        assert code == 1 and "not over" in said and "stop its ranks" in said, said
        code, said = await ckptd(house, "forget", "nobodys")
        assert code == 1 and "no such job" in said


async def test_one_users_jobs_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """D20: each that he began and left cost everybody half a thousandth of the event loop, as long as it was known."""
    monkeypatch.setattr(rank_listener, "JOBS_PER_USER_MAX", 2)
    async with rig() as house:
        await killed(house)
        await house.rank("second").begin("a")
        refused, _ = await house.rank("third").heard(wire.Refused)
        assert "has 2 jobs here already" in refused.what and "ckptd forget" in refused.hint
        await house.rank("second").heard(wire.Welcome)
        assert (await ckptd(house, "forget", "first"))[0] == 0
        await eventually(lambda: FIRST not in house.daemon.jobs)
        await house.rank("third").begin("a")


async def test_what_was_forgotten_stays_so_over_a_restart_of_the_daemon(tmp_path: Path) -> None:
    """Its highest epoch, too: a node that was away supersedes nothing."""
    places: dict[str, Any] = {"state_dir": tmp_path / "state"}
    async with rig(**places) as house:
        await killed(house)
        number = house.shell("first").machine.ctx.number
        assert (await ckptd(house, "forget", "first"))[0] == 0
    async with rig(**places) as house:
        assert not house.daemon.jobs
        assert (await begins_anew(house)).epoch == number + 1


async def test_an_epoch_that_could_not_be_written_down_is_forgotten_by_its_own_number() -> None:
    """The disk was full, and the daemon came back with the epoch before it: the order named that one, and was refused by nobody."""
    async with rig() as house:
        await killed(house)
        shell = house.shell("first")
        assert shell.record is not None
        number = shell.record.number
        shell.record = shell.machine.ctx.record = replace(shell.record, number=number - 1)
        assert house.daemon.forget._refusal(FIRST, number - 1)[0] == f"epoch {number} has begun"
        code, said = await ckptd(house, "forget", "first")
        assert code == 0, said
        assert StateDir(Path(house.daemon.config.state_dir)).tombstones() == {FIRST: Tombstone(number, number, number)}


@pytest.mark.chaos
async def test_checkpoints_stay_and_go_only_when_that_is_said(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "ckpt"), create=True)
    async with rig(storage_root=tmp_path / "ckpt", breakpoint_grace_s=0.2) as house:
        await killed(house)
        await until_durable(house, "first", 5)
        code, said = await ckptd(house, "forget", "first")
        assert code == 0, said
        code, said = await ckptd(house, "ls", "--json")
        assert code == 0, said
        assert [(row["job"], row["step"], row["where"]) for row in json.loads(said)["rows"]] == [(FIRST, 5, ["storage"])]
        async with rank_child(house, "first", SMALL, "restore 5") as child:  # from storage
            old = newest_record(storage, FIRST)
            await child.kill()
        await eventually(lambda: phase(house, "first") not in ("joining", "restoring"))
        code, said = await ckptd(house, "forget", "first", "--storage")
        while "a start of it asked" in said:  # it was called off, and what it was told of stays for some seconds
            assert "ask again in" in said and "stop its ranks" not in said, said
            code, said = await ckptd(house, "forget", "first", "--storage")
        assert code == 0 and "1 checkpoints deleted" in said, said
        assert list_commits(storage, FIRST) == []
        left = newest_record(storage, FIRST)
        assert old is not None and left is not None and is_grave(left)
        assert claim_epoch(storage, FIRST, old) == (False, left.number), "who was away commits nothing any more"
        assert [entry.name for entry in storage.list(FIRST) if entry.name.startswith("epoch-")] == []
        assert (await begins_anew(house)).epoch > left.number


async def test_storage_alone_says_that_a_job_was_forgotten(tmp_path: Path) -> None:
    """To nodes that never knew it."""
    async with rig(storage_root=tmp_path / "ckpt", breakpoint_grace_s=0.2) as house:
        await killed(house)
        await until_durable(house, "first", 5)
        assert (await ckptd(house, "forget", "first", "--storage"))[0] == 0
    async with rig(storage_root=tmp_path / "ckpt") as another:
        assert (await begins_anew(another)).epoch > 1


@pytest.mark.parametrize("where", ["here", pytest.param("there", marks=pytest.mark.chaos)])
async def test_a_start_between_the_question_and_the_order_is_told_of(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """P15: "forgotten" was the answer, of a job that trained. The test plays the job's other node."""
    async with rig() as house:
        await killed(house)
        shell, services, rank = house.shell("first"), house.daemon.services, house.rank("first")
        assert shell.record is not None
        shell.record = replace(shell.record, holders=(*shell.record.holders, replace(shell.record.nodes[0], node="there")))

        async def told(order: ForgetOrder) -> None:
            if not order.look and where == "here":
                rank.join("next")
                await eventually(lambda: shell.machine.lifetime.refusal()[0])
            refuses = where == "there" and not order.look
            reply = ForgetReply(order.request, "ranks of it are here" if refuses else "")
            assert house.daemon.forget.on_message("there", FIRST, reply)

        def send(node: str, job: str, message: object) -> bool:
            if isinstance(message, ForgetOrder):
                services.spawn(told(message), "there")
            return True

        monkeypatch.setattr(services, "send", send)
        code, said = await ckptd(house, "forget", "first")
        assert code == 1 and "a start of it came while it was being forgotten" in said and "stop its ranks" in said, said
        assert ("there: ranks" in said) == (where == "there"), said
        assert not shell.machine.lifetime.buried and house.daemon.arena.used_bytes > 0


async def test_only_the_owner_and_the_operator_may(tmp_path: Path) -> None:
    async with rig() as house:
        await killed(house)
        asked: list[Any] = []
        session: Any = type("Session", (), {"uid": os.getuid() + 7, "send": lambda self, message: asked.append(message)})()
        house.daemon.forget.on_ask(session, wire.ForgetAsk(FIRST))
        assert isinstance(asked[0], wire.Refused) and "owner" in asked[0].what
        house.daemon.forget.on_ask(session, wire.ForgetAsk("../x"))
        assert asked[1] == wire.Refused("not a job's name", "../x", "name it as `ckptd status` does: NAME or UID/NAME")
        assert phase(house, "first") == "orphaned"


async def test_one_user_has_few_orders_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 655,380, of jobs that there are not, had a task and a question to storage, which then answered nobody (D20)."""
    going = threading.Event()
    monkeypatch.setattr(forget, "highest_epoch", lambda *_: going.wait(30) and 0)
    async with rig(storage_root=tmp_path) as house:
        rank = house.rank()
        for number in range(REQUESTS_PER_USER_MAX + 3):
            rank.say(wire.ForgetAsk(f"nojob{number}", True))
        for _ in range(3):
            assert "too many orders" in (await rank.heard(wire.Refused))[0].what
        going.set()
        for _ in range(REQUESTS_PER_USER_MAX):
            assert "no such job" in (await rank.heard(wire.Refused))[0].what
        assert not house.daemon.forget._under_way
