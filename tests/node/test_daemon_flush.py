"""Flushes when storage hangs, or our own code fails: the machine always hears of it, and memory goes on (P5, P14)."""

from __future__ import annotations

import asyncio
import errno
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.steward import flush, grants
from ckptd.daemon import durable, read_back, retention, services
from ckptd.daemon.server import FLUSH_THREADS_MAX
from ckptd.observe.sight import ALL
from ckptd.persist.commits import list_commits
from ckptd.persist.names import attempt_dir, epoch_dir
from ckptd.persist.retention import Retained
from ckptd.persist.storage.base import StorageError
from ckptd.persist.storage.posix import PosixStorage
from ckptd.wire import rank as wire
from tests.node.checkpoints import epoch_record
from tests.node.daemon_rig import Rank, Rig, rig
from tests.node.links import eventually


def pause(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Between a try that failed and the next one."""
    monkeypatch.setattr(flush, "BACKOFF_FIRST_S", seconds)
    monkeypatch.setattr(flush, "BACKOFF_MAX_S", seconds)


def committed(house: Rig) -> list[int]:
    """Steps in storage."""
    return [info.snapshot.step for info in list_commits(house.daemon.services.storage, house.shell().job)]


async def test_snapshots_go_on_while_every_flush_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: each write that hung kept its slot, so after own_slots of them nothing was captured any more."""
    go, calls = threading.Event(), []

    def hangs(*arguments: Any, **options: Any) -> bytes:
        calls.append(arguments)
        assert go.wait(20)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "write_pieces", hangs)
    monkeypatch.setattr(durable, "CANCEL_PATIENCE_S", 0.05)
    async with rig(storage_root=tmp_path, flush_every_steps=1, write_timeout_s=0.05, own_slots=2) as house:
        rank = house.rank()
        await rank.begin("a")
        step = 0
        while len(calls) < 2:
            grant = await rank.capture(step := step + 1)
            step = max(step, grant.from_step)
        for _ in range(4):
            grant = await rank.capture(step := step + 1)
            step = max(step, grant.from_step)
        assert committed(house) == [], "all of them hung"
        go.set()


async def test_a_fault_of_our_own_in_a_write_is_an_answer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one the slot stayed pinned and the flush open for ever."""

    def broken(*arguments: Any, **options: Any) -> bytes:
        raise KeyError("nobody expected this")

    monkeypatch.setattr(durable, "write_pieces", broken)
    async with rig(storage_root=tmp_path) as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(3)
        rank.waits(3, "durable")
        await eventually(lambda: "nobody expected" in house.problems().get("internal", ""))
        monkeypatch.undo()
        await rank.heard(wire.Level, step=3, durable=True)
        assert committed(house) == [3]


async def test_a_commit_that_hangs_is_tried_again_and_may_end_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: first commit wins, so the one that hung does no harm whenever it goes on."""
    go, real, calls = threading.Event(), durable.commit, []

    def hangs_once(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            assert go.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(durable, "commit", hangs_once)
    async with rig(storage_root=tmp_path, write_timeout_s=2.0) as house:
        await house.durable(3)
        assert len(calls) >= 2
        go.set()
        await eventually(lambda: not house.daemon.services.tasks)
        assert committed(house) == [3]


async def test_hanging_commits_of_one_job_leave_threads_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: each try that hung kept a thread of the daemon's few, until no job could write any more."""
    go, real, tries = threading.Event(), durable.commit, []

    def hangs(storage: Any, job: str, *arguments: Any, **options: Any) -> Any:
        if job.endswith("/stuck"):
            tries.append(job)
            assert go.wait(60)
        return real(storage, job, *arguments, **options)

    monkeypatch.setattr(durable, "commit", hangs)
    pause(monkeypatch, 0.05)
    async with rig(storage_root=tmp_path, write_timeout_s=0.5, memory_budget="256MiB") as house:
        stuck, other = house.rank("stuck"), house.rank()
        for rank in (stuck, other):
            await rank.begin("a")
            await rank.sealed(3)
        stuck.waits(3, "durable")
        await eventually(lambda: "earlier tries" in house.problems().get("flush", ""))
        assert len(tries) == durable.HUNG_MAX
        await other.durable(3)
        go.set()
        await stuck.heard(wire.Level, step=3, durable=True)


async def test_a_retention_that_hangs_keeps_one_thread_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5, P14: a delete that never ended kept a flush thread for ever, and each commit began another one."""
    go, passes = threading.Event(), []

    def hangs(storage: Any, job: str, policy: Any, *, cancelled: threading.Event, **_: Any) -> Retained:
        passes.append(cancelled)
        assert go.wait(60)
        return Retained()

    monkeypatch.setattr(retention, "retain", hangs)
    monkeypatch.setattr(retention, "RETENTION_TIMEOUT_S", 0.05)
    monkeypatch.setattr(retention, "CANCEL_PATIENCE_S", 0.05)
    async with rig(storage_root=tmp_path, memory_budget="256MiB") as house:
        rank, other = house.rank(), house.rank("other")
        await rank.begin("a")
        for step in range(1, FLUSH_THREADS_MAX + 2):
            await rank.sealed(step)
            await rank.durable(step)
        await eventually(lambda: "does not let go" in house.problems().get("retention", ""))
        assert len(passes) == 1
        assert passes[0].is_set()
        await other.begin("a")
        await other.sealed(3)
        await other.durable(3)
        go.set()
        await eventually(lambda: len(passes) == 4)  # of both jobs, and once more for what each committed meanwhile
        await eventually(lambda: "retention" not in house.problems())


@pytest.mark.parametrize(("where", "name"), [(read_back, "read_back"), (retention, "retain")])
async def test_what_storage_failed_at_while_it_was_away_is_not_told_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    """P14: for ten minutes after it was back, health said that it had vanished."""
    real, away = getattr(where, name), [True]

    def vanished(*arguments: Any, **options: Any) -> Any:
        if away[0]:
            raise StorageError("the storage directory has vanished")
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, vanished)
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3)
        await eventually(lambda: "retention" in house.problems())
        assert "vanished" in house.problems()["retention"]
        away[0] = False
        await rank.sealed(4)
        await rank.durable(4)
        await eventually(lambda: "retention" not in house.problems())
        assert house.problems() == {} and committed(house) == [3, 4]


async def test_what_was_hidden_goes_after_its_grace_without_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: on a full storage there is no other one, so it stayed full; the last ones of each job stayed for ever."""
    monkeypatch.setattr(retention, "retain", partial(retention.retain, grace_s=0.5))
    monkeypatch.setattr(retention, "AGAIN_S", 0.6)
    async with rig(storage_root=tmp_path, keep_last=1) as house:
        rank = house.rank()
        await rank.begin("a")
        for step in (1, 2):
            await rank.sealed(step)
            await rank.durable(step)
        directory = tmp_path / epoch_dir(house.shell().job, 1)
        await eventually(lambda: len(list(directory.glob("step-*"))) == 1, what="the hidden one is gone")
    assert [path.name[-2:] for path in directory.glob("step-*")] == ["02"]


async def test_a_pass_after_the_grace_is_on_behalf_of_the_newest_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It put the epoch before in the place of the one that had committed meanwhile, whose only pass found itself superseded."""
    go, passes = threading.Event(), list[Any]()

    def waiting(*_: Any, epoch: Any, **__: Any) -> Retained:
        passes.append(epoch)
        if len(passes) == 2:
            go.wait(20)
        return Retained(waiting=True)

    monkeypatch.setattr(retention, "retain", waiting)
    monkeypatch.setattr(retention, "AGAIN_S", 0.3)
    async with rig(storage_root=tmp_path) as house:
        before, newest = epoch_record(1), epoch_record(2)
        made = retention.Retention(house.daemon.services, "0/other", set(), 2, lambda writer: False, lambda lasting: None)
        made.begin(before)
        again = await eventually(lambda: made._again)
        made.begin(before)
        await eventually(lambda: len(passes) == 2)
        made.begin(newest)
        await eventually(lambda: asyncio.get_running_loop().time() > again.when())
        go.set()
        await eventually(lambda: len(passes) == 3)
        made.cancel()
    assert passes == [before, before, newest]


async def test_a_daemon_that_begins_looks_for_what_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: what was hidden less than a minute before a daemon ended stayed until the job's next commit, which may never come."""
    root, state = tmp_path / "ckpt", tmp_path / "state"
    async with rig(storage_root=root, state_dir=state, keep_last=3) as house:
        rank = house.rank()
        await rank.begin("a")
        for step in (1, 2, 3):
            await rank.sealed(step)
            await rank.durable(step)
        directory = root / epoch_dir(house.shell().job, 1)
    assert len(list(directory.glob("step-*"))) == 3
    monkeypatch.setattr(retention, "retain", partial(retention.retain, grace_s=0.0))
    async with rig(storage_root=root, state_dir=state, keep_last=1):
        await eventually(lambda: [path.name[-2:] for path in directory.glob("step-*")] == ["03"])


@pytest.mark.parametrize("at", ["write", "commit"])
async def test_a_full_storage_is_looked_through_for_what_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """P14: only a commit began a pass, and there was no room for one: a dead daemon's attempt kept it for ever."""
    monkeypatch.setattr(retention, "retain", partial(retention.retain, attempt_stale_s=0.0))
    monkeypatch.setattr(flush, "BACKOFF_ASKED_MAX_S", 0.05)
    async with rig(storage_root=tmp_path) as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(1)
        left = tmp_path / attempt_dir(house.shell().job, SnapshotId(1, 0), "dead")
        left.mkdir(parents=True)
        free_bytes, commit = PosixStorage.free_bytes, durable.commit

        def full(*arguments: Any) -> None:
            if left.exists():
                raise StorageError("no room", errno=errno.ENOSPC)
            commit(*arguments)

        if at == "write":
            monkeypatch.setattr(PosixStorage, "free_bytes", lambda self: 0 if left.exists() else free_bytes(self))
        monkeypatch.setattr(durable, "commit", full)
        await rank.durable(1)
        assert not left.exists()


async def failing(house: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, list[Any]]:
    """A rank that has sealed step 3 while every write fails; the tries."""
    tries: list[Any] = []

    def broken(*arguments: Any, **options: Any) -> bytes:
        tries.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_pieces", broken)
    rank = house.rank()
    await rank.begin("a")
    await rank.sealed(3)
    return rank, tries


async def test_who_waits_for_durable_need_not_wait_for_the_pause_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause grows to a minute; storage may long be back."""
    pause(monkeypatch, 3600.0)
    with monkeypatch.context() as broken:
        async with rig(storage_root=tmp_path, flush_every_steps=1) as house:
            rank, tries = await failing(house, broken)
            await eventually(lambda: house.problems().get("flush"))
            assert len(tries) == 1
            broken.undo()
            await rank.durable(3)
            assert committed(house) == [3]


async def test_who_waited_already_when_storage_failed_waits_a_short_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(monkeypatch, 3600.0)
    monkeypatch.setattr(flush, "BACKOFF_ASKED_MAX_S", 0.05)
    with monkeypatch.context() as broken:
        async with rig(storage_root=tmp_path) as house:
            rank, tries = await failing(house, broken)
            rank.waits(3, "durable")
            await eventually(lambda: len(tries) >= 3)
            broken.undo()
            await rank.heard(wire.Level, step=3, durable=True)
            assert committed(house) == [3]


async def test_lists_do_not_wait_for_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(durable, "list_commits", lambda *a: go.wait(20))
    monkeypatch.setattr(services, "LIST_TIMEOUT_S", 0.05)
    async with rig(storage_root=tmp_path, inventory_timeout_s=0.2) as house:
        rank = house.rank()
        rank.join("a", allow_fresh=True)
        await rank.heard(wire.Ready)
        await rank.sealed(3)
        for request in range(8):  # more than there are threads
            rank.say(wire.ListSteps(request))
            answer, _ = await rank.heard(wire.Steps, request=request)
            assert [row["step"] for row in answer.rows] == [3]
        assert "no answer" in house.problems()["storage"]
        go.set()


async def test_lists_that_were_given_up_do_not_pile_up_while_storage_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody asks for them once a second, and storage hangs for a day."""
    go = threading.Event()
    monkeypatch.setattr(services, "LIST_TIMEOUT_S", 0.01)
    async with rig(storage_root=tmp_path) as house:
        await house.durable(3)
        with monkeypatch.context() as patch:
            patch.setattr(house.daemon.services.storage, "entries", lambda path: go.wait(30) or [])
            for _ in range(50):
                await house.shell().durable.steps()
                await house.daemon.status.ls(ALL)
            assert house.daemon.services.disk._shared._queue.qsize() <= 2
        go.set()
        await eventually(lambda: not house.daemon.services.given_up)
        monkeypatch.undo()
        assert [row["step"] for row in await house.shell().durable.steps() if "storage" in row["where"]] == [3]


async def test_a_list_of_many_jobs_waits_for_hanging_storage_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: each job waited five seconds after the one before, and the page gives up after ten: `ckptd ls` showed nothing at all."""
    asked = 0

    async def listed(*_: object) -> object:
        nonlocal asked
        asked += 1
        await eventually(lambda: asked == 3, what="all are asked before the first one has an answer")
        raise CkptdError("no answer")

    async with rig(storage_root=tmp_path) as house:
        await house.durable(3)
        other = house.rank("other")
        await other.begin("b")
        await other.sealed(1)
        monkeypatch.setattr(house.daemon.services, "listed", listed)
        found = await house.daemon.status.ls(ALL)
        assert [(row["job"].partition("/")[2], row["step"]) for row in found["rows"]] == [("other", 1), ("rig", 3)]
        assert found["errors"] == ["storage: no answer"]


async def test_a_read_back_that_hangs_does_not_hurry_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: it was given up, but what it had to read stayed with the pacer, overdue, so that nothing was paced any more."""
    go, begun = threading.Event(), threading.Event()

    def hangs(*_: object) -> object:
        begun.set()
        go.wait(30)
        raise StorageError("at last")

    monkeypatch.setattr(read_back, "read_back", hangs)
    monkeypatch.setattr(read_back, "READ_BACK_S", 0.5)
    async with rig(storage_root=tmp_path) as house:
        await house.durable(3)
        await eventually(begun.is_set)
        await eventually(lambda: not house.shell().durable.read_back._running, what="it is given up")
        assert not house.daemon.services.pacer._transfers
        go.set()


async def test_one_cause_of_failing_flushes_is_one_line_of_the_log_and_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P15: every 5 s there were two, since each try has another name."""
    pause(monkeypatch, 0.05)
    tries: list[str] = []

    def full(storage: object, job: str, snapshot: object, attempt: str, *rest: Any, **options: Any) -> bytes:
        tries.append(attempt)
        raise StorageError("create the file: No space left on device", where=f"/ckpt/{attempt}.part/n0", hint="free space")

    monkeypatch.setattr(durable, "write_pieces", full)
    with caplog.at_level("INFO", logger="ckptd"):
        async with rig(storage_root=tmp_path, flush_every_steps=1) as house:
            rank = house.rank()
            await rank.begin("a")
            await rank.sealed(1)
            await eventually(lambda: len(set(tries)) > 4)
    ours = (record.getMessage() for record in caplog.records if record.name.startswith("ckptd"))  # asyncio has the last try
    said = [text for text in ours if "No space left" in text]
    assert [line.partition(", ")[0] for line in said] == ["job=0/rig flush failed", "job=0/rig alarm=flush"], said
    assert "step 1 of epoch 1" in said[0] and "SnapshotId" not in caplog.text


async def test_memory_for_one_slot_goes_from_snapshot_to_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: a budget for one; nobody asks for a flush, and the rank waits for a later step."""
    monkeypatch.setattr(grants, "RETURN_S", 0.1)
    async with rig(storage_root=tmp_path, memory_budget="8MiB") as house:
        rank = house.rank()
        rank.join("a")
        await rank.heard(wire.Ready)
        for step in (1, 2, 3):
            await eventually(lambda: len(house.shell().local_slots.slots) == 1)
            if step > 1:
                rank.say(wire.Called(step, True))  # must=True
            await rank.sealed(step)
        assert committed(house) == [1, 2]
