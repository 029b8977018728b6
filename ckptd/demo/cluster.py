"""The machine room of the demo: nodes, their shared storage, and the promise that nothing of it outlives the demo."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.demo import processes
from ckptd.demo.job import Job
from ckptd.demo.node import Node, plain_environ

POLL_S = 0.05
SAMPLE_EVERY_S = 0.5
START_TIMEOUT_S = 30.0
TEMP_PATH_BYTES_MAX = 24  # leaves room for ours and a keeper's socket below it (107 bytes, and 64 to its folder)
COMMAND_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
TEMPORARY = "ckptd-demo-"
LEVELS = ("sealed", "protected", "durable")


class DemoFailed(CkptdError):
    """The story cannot go on; what was claimed so far is still reported."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Newest step at each level at one moment, as the daemons say; -1: none."""

    time: float
    trained: int
    sealed: int
    protected: int
    durable: int


class Cluster:
    """``with Cluster(folder, deadline) as cluster``. folder: logs and notebooks stay there; everything else is temporary."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.logs, self.notebook = folder / "logs", folder / "notebook"
        self.deadline = deadline  # time.monotonic()
        self.run = f"demo-{os.getpid()}-{secrets.token_hex(3)}"
        self.nodes: list[Node] = []
        self.samples: list[Sample] = []
        self._jobs: list[Job] = []
        self._named = 0  # nodes so far; a number is never used twice

    def __enter__(self) -> Cluster:
        for path in (self.logs, self.notebook):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        self.root = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir=short_temp()))
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "ckptd.demo.reaper", self.run, str(self.root)],
            stdin=subprocess.PIPE, env=plain_environ(), start_new_session=True,
        )  # fmt: skip
        self.storage, self._away = self.root / "storage", self.root / "storage.away"
        self.saves, self._key = self.root / "saves", self.root / "cluster.key"
        self.storage.mkdir(mode=0o700)
        self.saves.mkdir(mode=0o700)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """The reaper does the work, here and when this process is killed: closing its stdin is the word."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        try:
            self._reaper.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
        for agent in (agent for job in self._jobs for agent in job.agents.values()):
            agent.poll()
        for node in self.nodes:
            node.daemon_ended()

    # --- nodes --------------------------------------------------------------------------------------------------
    def keygen(self) -> None:
        command = [sys.executable, "-m", "ckptd", "keygen", str(self._key)]
        done = subprocess.run(command, env=plain_environ(), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        if done.returncode or not self._key.exists():
            raise DemoFailed("ckptd keygen failed", where=str(self._key), hint=(done.stderr or done.stdout)[-2000:])

    def start_nodes(self, count: int) -> list[Node]:
        """Fresh nodes, with the next numbers; returns when their daemons answer."""
        fresh = self.plain_hosts(count)
        for node in fresh:
            node.start()
        self.nodes += fresh
        self.wait(lambda: all(self._is_up(node) for node in fresh), START_TIMEOUT_S, "the daemons to answer")
        return fresh

    def plain_hosts(self, count: int) -> list[Node]:
        """Names and addresses for that many more nodes; no daemon runs there."""
        first, self._named = self._named, self._named + count
        return [
            Node(i, root=self.root, logs=self.logs, storage=self.storage, key=self._key, run=self.run)
            for i in range(first, first + count)
        ]

    def _is_up(self, node: Node) -> bool:
        ended = node.daemon_ended()
        if ended is not None:
            raise DemoFailed(f"ckptd run ended with status {ended}", where=node.name, hint=node.log_tail())
        return node.status() is not None

    def power_off(self, node: Node) -> list[processes.Found]:
        killed = node.kill()
        self.nodes.remove(node)
        return killed

    def storage_away(self) -> None:
        self.storage.rename(self._away)

    def storage_back(self) -> None:
        """Raises DemoFailed when somebody made a new directory in its place."""
        if self.storage.exists():
            raise DemoFailed("something was written where the storage was taken away", where=str(self.storage))
        self._away.rename(self.storage)

    # --- jobs ---------------------------------------------------------------------------------------------------
    def job(self, name: str, nodes: Sequence[Node], arguments: Sequence[str]) -> Job:
        job = Job(name, tuple(nodes), self.logs, self.notebook, arguments)
        self._jobs.append(job)
        return job.start()

    # --- waiting and looking ------------------------------------------------------------------------------------
    def wait(self, predicate: Callable[[], Any], timeout: float, what: str, job: Job | None = None) -> Any:
        """The predicate's first true value. Raises DemoFailed at the timeout, at the demo's own deadline, and when the
        job that is waited for failed by itself."""
        end = min(time.monotonic() + timeout, self.deadline)
        while True:
            ended = job is not None and job.finished()
            value = predicate()
            if value:
                return value
            if job is not None:
                _must_run(job, ended, what)
            if time.monotonic() > end:
                late = "the demo's time is over" if end == self.deadline else f"not within {timeout:g} s"
                raise DemoFailed(f"{late}: waiting for {what}", hint=job.log_tail() if job else "")
            time.sleep(POLL_S)

    def levels(self) -> dict[str, int]:
        """Newest step at each level that any living daemon knows of; -1: none. One sample for the plot."""
        newest = dict.fromkeys(LEVELS, -1)
        for status in [node.status() for node in self.nodes]:
            for job in status.get("jobs", []) if status else []:
                for level in LEVELS:
                    newest[level] = max(newest[level], job.get("newest", {}).get(level, -1))
        return newest

    def sample(self, job: Job) -> dict[str, int]:
        newest = self.levels()
        self.samples.append(Sample(time.time(), job.pages.refresh().last_step(), **newest))
        return newest

    def sampled(self, job: Job) -> None:
        """Called while waiting: at most one sample each SAMPLE_EVERY_S."""
        if not self.samples or time.time() - self.samples[-1].time > SAMPLE_EVERY_S:
            self.sample(job)


def _must_run(job: Job, ended: bool, what: str) -> None:
    failed = job.failed()
    if failed:
        raise DemoFailed(f"training failed by itself on {failed} ({what})", where=job.name, hint=job.log_tail())
    if ended:
        raise DemoFailed(f"training ended too early: waiting for {what}", where=job.name)


def short_temp() -> str:
    """The temporary directory, unless unix sockets in it would have too long a path."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= TEMP_PATH_BYTES_MAX else "/tmp"
