"""System calls of a live daemon that fail, through snapshots, replicas, flushes and a restore (strace -e inject).

The daemon lives or ends cleanly and is brought back; nothing false is acknowledged; when the calls work again, or the node is
replaced, what is owed comes back.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.chaos.job import Job
from tests.places import needs_root
from tests.short import short_folder
from tests.waiting import until

NODES = 3
SICK = 1  # place of the daemon whose calls fail
ATTACH_S = 120.0  # to a process of many threads, or away from it
FAULT_S = 3.0
BACK_S = 120.0  # its keeper aborts a daemon that hangs for 60 s
pytestmark = [
    *needs_root,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]
CASES = [
    ("write", "ENOSPC"), ("pwrite64", "EIO"), ("pwrite64", "ENOSPC"), ("pwrite64", "EINTR"), ("fsync,fdatasync", "EIO"),
    ("link,linkat", "EIO"), ("rename,renameat,renameat2", "EIO"), ("rename,renameat,renameat2", "ENOSPC"),
    ("mkdir,mkdirat", "ENOSPC"), ("openat", "EMFILE"), ("mmap", "ENOMEM"), ("memfd_create", "EMFILE"), ("recvmsg", "ENOMEM"),
    ("sendmsg", "ENOBUFS"), ("sendto", "ECONNRESET"), ("recvfrom", "ECONNRESET"), ("accept4", "EMFILE"), ("socket", "EMFILE"),
    ("pread64", "EIO"), ("ftruncate,fallocate", "ENOSPC"),
]  # fmt: skip
RARE = ("link,linkat", "rename,renameat,renameat2", "mkdir,mkdirat")  # made now and then by whoever commits or claims an epoch
SPREAD = ("pread64", "pwrite64")  # made by one of several threads, so that few of them make a second one
EVERY = ("mmap",)  # made a few times only, and by new threads first of all: each fails
FIRST = dict.fromkeys((*RARE, *SPREAD, *EVERY), 1)  # which call of a thread fails first; else the second


class Injection:
    """Fails every third of these calls (of EVERY: each) in each thread of the process, from the ``first`` on, until ``close``."""

    def __init__(self, pid: int, calls: str, error: str, log: Path, first: int) -> None:
        self._log = log
        inject = f"inject={calls}:error={error}:when={first}+{1 if calls in EVERY else 3}"
        self._strace = subprocess.Popen(
            ["strace", "-f", "-o", str(log), "-e", f"trace={calls}", "-e", inject, "-p", str(pid)],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True,
        )  # fmt: skip
        try:
            until(lambda: self._struck(Path(f"/proc/{pid}/status")), ATTACH_S, "strace to attach")
        except BaseException:
            self.close()
            raise

    def _struck(self, status: Path) -> bool:
        """It is attached; or the process has ended since, of its first failed call (libuv aborts if it cannot wake its loop)."""
        try:
            return f"TracerPid:\t{self._strace.pid}" in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return self.count() > 0

    def count(self) -> int:
        return self._log.read_text(errors="replace").count("(INJECTED)") if self._log.exists() else 0

    def close(self) -> None:
        if self._strace.poll() is None:
            self._strace.send_signal(signal.SIGTERM)  # it lets go of the process
        self._strace.communicate(timeout=ATTACH_S)


@pytest.fixture
def job() -> Iterator[Job]:
    with short_folder() as root:
        made = Job(
            root,
            "replicas=1",
            NODES,
            storage_root=root / "storage",
            flush_every_steps=2,
            keep_last=1,
            restore_timeout_s=20,
        )
        try:
            made.start(range(NODES))
            made.judge()
            made.until_level(1)
            yield made
        finally:
            made.close()


ABORTS = "import os\nout = os.open('/dev/null', os.O_WRONLY)\ntry:\n while True: os.write(out, b'x')\nexcept OSError: os.abort()"


def test_a_process_that_ends_of_its_first_call_was_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ABORTS]) as victim, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(victim.wait)  # so that nothing is left of it
        looks = until
        monkeypatch.setattr(sys.modules[__name__], "until", lambda *how: (ended.result(ATTACH_S), looks(*how)))  # it looks too late
        with closing(Injection(victim.pid, "write", "ENOSPC", tmp_path / "strace.log", 1)) as injection:
            assert ended.result(ATTACH_S) == -signal.SIGABRT
            assert injection.count() > 0


@pytest.mark.chaos
@pytest.mark.parametrize(("calls", "error"), CASES)
def test_a_call_that_fails_again_and_again(job: Job, calls: str, error: str) -> None:
    """P2, P4, P5, P11: over training, flushes and a restore."""
    sick = job.places if calls in RARE else [job.places[SICK]]
    with ExitStack() as stack:
        injections = [
            stack.enter_context(
                closing(Injection(node.daemon_pid(), calls, error, node.root / "strace.log", FIRST.get(calls, 2)))
            )
            for node in sick
        ]
        job.train_for(FAULT_S)
        job.no_rank_waited_long()
        job.end()
        job.start([2, 1, 0])
        verdict = job.judge()
        job.restored_or_refused(verdict)
        if not job.refused():
            job.train_for(1.0)
    failed = sum(injection.count() for injection in injections)
    assert failed > 0, "no call failed: nothing was tried"
    job.end()
    until(lambda: all(node.daemon_other_than(0) for node in sick), BACK_S, "the daemons to answer")
    job.start([0, 1, 2])
    verdict = job.judge()
    assert not verdict.error, verdict
    job.until_newer(1)
    job.no_rank_waited_long()
    job.lose([SICK])
    job.end()
    job.start([0, 2])
    verdict = job.judge()
    assert not verdict.error, (verdict, failed)
