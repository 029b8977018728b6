"""The demo's processes, found by the mark in their environment, killed by pidfd, and the memfds they hold."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ckptd.process import stat_fields

MARK = "CKPTD_DEMO_MARK"  # "{run}.{node}.{daemon|job}", inherited by everything that is started with it
DEAD_TIMEOUT_S = 10.0
MEMFD = "/memfd:"

Inode = tuple[int, int]  # device, number: names one memfd for as long as it exists


@dataclass(frozen=True, slots=True)
class Found:
    pid: int
    mark: str
    command: str


def pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def find(prefix: str, known: Iterable[int] = ()) -> list[Found]:
    """Living processes whose mark begins with ``prefix``; with ``known``: also what descends from or shares a session
    with those pids (a process that hides its environment, as daemons with secrets do)."""
    ours: dict[int, str] = {}
    relatives: dict[int, tuple[int, int]] = {}
    for pid in pids():
        if alive(pid):
            relatives[pid] = _parent_and_session(pid)
            mark = _mark(pid)
            if mark.startswith(prefix) and mark:
                ours[pid] = mark
    family = {*ours, *(pid for pid in known if pid in relatives)}
    grown = True
    while grown:
        more = {p for p, (parent, session) in relatives.items() if p not in family and {parent, session} & family}
        grown = bool(more)
        family |= more
    return [Found(pid, ours.get(pid, prefix), command(pid)) for pid in sorted(family) if pid != os.getpid()]


def kill(targets: Iterable[int], number: int = signal.SIGKILL) -> list[int]:
    """Signal each and wait until it is dead. Returns those that live on after DEAD_TIMEOUT_S."""
    fds: dict[int, int] = {}
    for pid in targets:
        with suppress(ProcessLookupError):
            fds[pid] = os.pidfd_open(pid)
            signal.pidfd_send_signal(fds[pid], number)
    deadline = time.monotonic() + DEAD_TIMEOUT_S
    try:
        return [pid for pid, fd in fds.items() if not _dead(fd, deadline)]
    finally:
        for fd in fds.values():
            os.close(fd)


def _dead(pidfd: int, deadline: float) -> bool:
    """A pidfd is readable once its process has ended, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


def alive(pid: int) -> bool:
    return _state(pid) not in ("", "Z", "X")


def command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _mark(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            if entry.startswith(MARK.encode() + b"="):
                return entry.split(b"=", 1)[1].decode()
    return ""


def _state(pid: int) -> str:
    return (stat_fields(str(pid)) or [""])[0]


def _parent_and_session(pid: int) -> tuple[int, int]:
    stat = stat_fields(str(pid))
    return (int(stat[1]), int(stat[3])) if len(stat) > 3 else (0, 0)


def parent(pid: int) -> int:
    return _parent_and_session(pid)[0]


# --- memory -----------------------------------------------------------------------------------------------------
def memfds(pid: int) -> set[Inode]:
    """Every memfd this process holds open or has mapped. Raises OSError when it may not be looked into."""
    return _open_memfds(pid) | _mapped_memfds(pid)


def _open_memfds(pid: int) -> set[Inode]:
    found: set[Inode] = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            path = f"/proc/{pid}/fd/{name}"
            if os.readlink(path).startswith(MEMFD):
                status = os.stat(path)
                found.add((status.st_dev, status.st_ino))
    return found


_MAPPED = re.compile(r"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)\s+/memfd:", re.MULTILINE)


def _mapped_memfds(pid: int) -> set[Inode]:
    with open(f"/proc/{pid}/maps") as file:
        lines = file.read()
    return {(os.makedev(int(a, 16), int(b, 16)), int(inode)) for a, b, inode in _MAPPED.findall(lines)}


def memfds_of(targets: Iterable[int]) -> set[Inode]:
    found: set[Inode] = set()
    for pid in targets:
        with suppress(OSError):
            found |= memfds(pid)
    return found


def holders(inodes: set[Inode]) -> tuple[dict[int, str], int]:
    """(pid -> command of every living process that holds one of these memfds, processes that may not be looked into)."""
    found: dict[int, str] = {}
    unreadable = 0
    for pid in pids():
        try:
            if memfds(pid) & inodes:
                found[pid] = command(pid)
        except PermissionError:
            unreadable += 1
        except OSError:
            continue  # it ended meanwhile
    return found, unreadable


# --- words ------------------------------------------------------------------------------------------------------
def describe(found: Iterable[Found]) -> str:
    """Pids with what each was."""
    return ", ".join(f"{f.pid} {kind(f)}" for f in found)


def kind(found: Found) -> str:
    """"torchrun", "trainer", "keeper" or "daemon", by its command line."""
    marks = {"torch.distributed.run": "torchrun", "ckptd.demo.train": "trainer", "keeper.py": "keeper"}
    return next((name for mark, name in marks.items() if mark in found.command), "daemon")
