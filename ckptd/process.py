"""A process held by its pidfd: the only proof that it is dead (design D1, D2). The pid alone may be another's
by now."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet
NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)  # the last two: the number is a thread's; which one depends on the kernel
UNKNOWN_START = 0  # /proc did not show it (hidepid): then only the pid is compared


class Process:
    """``pid`` as seen from here, ``started`` in clock ticks since boot (0: unknown)."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        self.started = start_ticks(pid)
        self._dead = False

    @classmethod
    def open(cls, pid: int) -> Process:
        """Raises ProcessLookupError when there is none."""
        return cls(pid, os.pidfd_open(pid))

    @classmethod
    def of_peer(cls, sock: socket.socket) -> Process:
        """The process that connected this unix socket. Raises OSError when it cannot be proven who that
        is."""
        pid, _, _ = peer_credentials(sock)
        if pid <= 0:  # all such have the number 0, and since Linux 6.5 a pidfd
            raise OSError("it is in a pid namespace that this one does not see")
        try:
            (pidfd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))
        except OSError:
            pidfd = os.pidfd_open(pid)
        os.set_inheritable(pidfd, False)
        return cls(pid, pidfd)

    @classmethod
    def find(cls, pid: int, started: int) -> Process | None:
        """The process that had this pid and start; None is the proof that it is gone. Raises OSError: it cannot be known now."""
        try:
            found = cls.open(pid)
        except OSError as error:
            if error.errno in NO_PROCESS:
                return None
            raise
        if UNKNOWN_START not in (started, found.started) and found.started != started:
            found.close()
            return None
        return found

    def same(self, other: Process) -> bool:
        """Are both the same process? Where a start is unknown the pid has to do: while one lives, no other has it."""
        unknown = UNKNOWN_START in (self.started, other.started)
        return self.pid == other.pid and (unknown or self.started == other.started)

    def fileno(self) -> int:
        """Readable once the process is dead."""
        return self._pidfd

    @property
    def alive(self) -> bool:
        """False for ever after, once seen dead. It leaves the descriptor open: somebody may be waiting on it."""
        if not self._dead and self._pidfd >= 0:
            self._dead = _readable(self._pidfd)
        return not self._dead

    def close(self) -> None:
        """For whoever has seen it die, or gives it up: from now on it counts as dead."""
        self._dead = True
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __del__(self) -> None:
        self.close()


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of whoever connected, as the kernel says."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat, UNKNOWN_START when it may not be read."""
    fields = stat_fields(str(pid))
    return int(fields[19]) if len(fields) > 19 else UNKNOWN_START


def stat_fields(who: str) -> list[str]:
    """Those of /proc/WHO/stat from the third on: state, parent and so on; none when it may not be read. who: "PID", or
    "self/task/TID" for a thread of ours."""
    try:
        with open(f"/proc/{who}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
