"""Daemons, keepers and ranks that die or stand still at every named instant: what was acknowledged comes back, and only that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos import points
from tests.chaos.job import Job, encrypted
from tests.short import short_folder
from tests.waiting import until

NODES = 3
MET_S = 120.0  # until every failpoint of a group was met
END_S = 90.0  # of a restore in which daemons die or stand still
STOPPED_S = 1.0  # a stopped process goes on after that
STARTS_MAX = 8
LARGER = "100000"  # elements: tensors that are copied in the background, several of them


@pytest.fixture
def root() -> Iterator[Path]:
    with short_folder() as made:
        yield made


def job_in(root: Path, **how: object) -> Job:
    """With storage, everything made durable and little of it kept, and encrypted bulk bytes: whatever there is to be met."""
    storage = {"storage_root": root / "storage", "flush_every_steps": 2, "keep_last": 1}
    policy = str(how.pop("policy", "replicas=1"))
    return Job(root, policy, NODES, **{**storage, **encrypted(root), **how})


def test_every_failpoint_has_its_trial() -> None:
    assert points.in_source() == points.met()


class Waker:
    """Sends SIGCONT to daemons that have stood still for a while."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since: dict[int, float] = {}

    def look(self) -> None:
        for node in self._job.places:
            for process in node.processes():
                with suppress(psutil.NoSuchProcess):
                    self._wake(process.pid, process.status() == psutil.STATUS_STOPPED)

    def _wake(self, pid: int, stopped: bool) -> None:
        if not stopped:
            self._since.pop(pid, None)
        elif time.monotonic() - self._since.setdefault(pid, time.monotonic()) > STOPPED_S:
            os.kill(pid, signal.SIGCONT)


def until_restored_or_refused(job: Job, waker: Waker, died: Callable[[], bool] = lambda: True) -> None:
    """A restore under which a daemon dies may be refused, on all ranks. ``died``: did one?"""

    def over() -> bool:
        waker.look()
        job.listen()
        return job.oracle.done(job.generation)

    until(over, END_S, "the restore to end (D11)")
    job.restored_or_refused(job.oracle.judge(job.generation, crashes=died()))


def meet_all(job: Job, marks: list[Path]) -> None:
    """Train, end, start again, until each mark is there."""
    waker, over = Waker(job), time.monotonic() + MET_S
    early = [mark.name for mark in marks if mark.exists()]
    assert not early, f"met before there is a job, so that nothing of it was interrupted: {early}"
    for turn in range(STARTS_MAX):
        until_back(job, waker)
        nothing = job.oracle.may_begin_anew(job.generation + 1)
        job.start([(turn + rank) % NODES for rank in range(NODES if turn % 2 else NODES - 1)], fresh=nothing)
        until_restored_or_refused(job, waker)
        end = min(over, time.monotonic() + MET_S / STARTS_MAX)

        def met(end: float = end) -> bool:
            waker.look()
            job.listen()
            return all(mark.exists() for mark in marks) or time.monotonic() > end

        if not job.refused():
            until(met, MET_S)
        job.end()
        if all(mark.exists() for mark in marks):
            return
    missing = [mark.name for mark in marks if not mark.exists()]
    raise AssertionError(f"never met: {missing}")


def until_back(job: Job, waker: Waker) -> None:
    def back() -> bool:
        waker.look()
        with suppress(OSError):
            return all(node.get("/status") for node in job.places)
        return False

    until(back, 60, "all daemons to answer")


def whole_again(job: Job) -> None:
    """P3, P7, P14: all daemons are back with their memory; what is owed is restored, protected, and survives a node."""
    until_back(job, Waker(job))
    for places in ([0, 1, 2], [1, 2]):
        job.start(places, fresh=job.oracle.may_begin_anew(job.generation + 1))
        verdict = job.judge()
        assert not verdict.error, verdict
        job.until_newer(1)
        if len(places) == NODES:
            job.lose([0])
        job.end()
    job.no_rank_waited_long()


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("group", [name for name in points.DAEMON if name != "direct"])
def test_daemons_at_every_instant(root: Path, group: str, action: str) -> None:
    names = points.DAEMON[group]
    marks = [root / f"met-{name}" for name in names]
    traps = ",".join(f"{name}:{action}_once={mark}" for name, mark in zip(names, marks, strict=True))
    job = job_in(root, failpoint=traps, policy="xor(3)" if group == "coding" else "replicas=1")
    try:
        meet_all(job, marks)
        whole_again(job)
        assert job.oracle.acknowledged > 0
    finally:
        job.close()


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_daemons_in_a_restore_without_room(root: Path, action: str) -> None:
    """Direct mode: the daemon dies, or stands still, after its rank has begun to write. The next start gets what is owed."""
    job = job_in(root)
    try:
        job.start(range(NODES))
        job.judge()
        job.until_newer(1)
        job.lose([2])
        job.end()
        mark = root / "met"
        job.failpoint = f"restore.part:{action}_once={mark}"
        job.settings["memory_budget"] = "1MiB"
        job.replace([2], "new")
        job.until_up()
        job.start([2, 0, 1])
        until_restored_or_refused(job, Waker(job))
        assert mark.exists(), "the failpoint was not met"
        job.end()
        job.start([0, 1])
        assert not job.judge().error
    finally:
        job.close()


def ended(job: Job) -> list[int]:
    """Places whose keeper has ended."""
    return [i for i, node in enumerate(job.places) if node.process is not None and node.process.poll() is not None]


@pytest.mark.chaos
@pytest.mark.parametrize("point", points.KEEPER)
def test_a_keeper_that_dies_is_a_node_that_is_lost(root: Path, point: str) -> None:
    """Its daemon ends with it, and nobody else does."""
    mark = root / "met"
    job = job_in(root, failpoint=f"{point}:kill_once={mark}")
    try:
        for turn in range(STARTS_MAX):
            job.start(
                range(NODES) if turn % 2 == 0 else [0, 1]
            )  # slots of ranks that do not return give their memory back
            until_restored_or_refused(job, Waker(job), mark.exists)  # it may die in the midst of the first restore
            if point == "keeper.restart":
                job.until_level(1)
                job.places[1].signal_daemon(signal.SIGKILL)
            with suppress(AssertionError):
                until(mark.exists, 5)
            if mark.exists():
                break
            job.end()
        assert mark.exists(), "the failpoint was not met"
        until(lambda: ended(job), 10, "its end")
        dead = ended(job)
        assert len(dead) == 1
        job.lose(dead)
        job.end()
        job.replace(dead, "wiped")
        job.until_up()
        job.start(range(NODES))
        assert not job.judge().error
        job.until_newer(1)
    finally:
        job.close()


def armed(point: str, action: str) -> str:
    """The training thread helps at the fence only when the engine's own thread is slow."""
    slow = "capture.tensor:sleep=0.3," if point == "capture.helping" else ""
    return f"{slow}{point}:{action}"


@pytest.mark.chaos
def test_ranks_at_every_instant(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a rank dies at each point in turn. The others are ended, as a launcher does, and the job starts again."""
    monkeypatch.setenv("CHAOS_LARGE", LARGER)
    job = Job(root, "replicas=1", 2)
    try:
        job.start([0, 1])
        job.judge()
        job.until_level(1)
        for point in points.CLIENT:
            job.end()
            job.start([1, 0], failpoints={1: armed(point, "kill")})
            until(lambda: job.ranks[1].ended(), 60, f"{point} to be met")
            job.end()
            job.start([0, 1])
            verdict = job.judge()
            assert not verdict.error, (point, verdict)
            job.until_level(1)
    finally:
        job.close()


@pytest.mark.chaos
def test_ranks_that_stand_still(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5, P14: the others train on, and once it goes on, so do snapshots."""
    monkeypatch.setenv("CHAOS_LARGE", LARGER)
    job = Job(root, "replicas=1", 2)
    try:
        for point in points.CLIENT:
            mark = root / f"met-{point}"
            job.start([1, 0], failpoints={1: armed(point, f"stop_once={mark}")})
            until(mark.exists, 60, f"{point} to be met")
            until(
                lambda: psutil.Process(job.ranks[1].pid).status() == psutil.STATUS_STOPPED,
                10,
                "it to stand still",
            )
            job.train_for_blind(STOPPED_S)
            job.ranks[1].send_signal(signal.SIGCONT)
            assert not job.judge().error
            job.until_newer(1)
            job.end()
    finally:
        job.close()
