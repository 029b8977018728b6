"""The keeper: the tiny parent of ``ckptd run`` where no systemd keeps our descriptors (design D1, P7).

It starts the daemon, holds the memfds that the daemon gives it over the service manager's own protocol
(NOTIFY_SOCKET, FDSTORE=1), starts it again when it dies and hands the memfds back (LISTEN_FDS). It never maps
or reads them. Standard library only: it runs as a script under ``python -I -S``, so that its memory stays at
a few MB beside whatever the daemon imports.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable

FIRST_FD = 3
DATAGRAM_BYTES_MAX = 4096
FDS_PER_DATAGRAM_MAX = 16
STORE_MAX = 8192  # descriptors kept
RESTART_DELAY_S = 0.2
RESTART_DELAY_MAX_S = 5.0
STABLE_AFTER_S = 10.0  # a daemon that lived this long starts the delays anew
DIRECTORY_PREFIX, SOCKET_NAME = "ckptd-keeper-", "notify"
PARENT_CHARS_MAX = 70  # a socket's path has at most 107
UNBOUND_MAX_S = 60.0  # a directory without a socket is this old: nobody is about to bind one in it
STOPS_MAX = 3  # the third request to stop is a SIGKILL: the daemon hangs, or is stopped
ABORT_GRACE_S = 2.0  # between SIGABRT and SIGKILL of a daemon that missed its watchdog
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What a service manager above us may have said to us is not for the daemon.
OUTER_VARIABLES = (
    "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID", "SYSTEMD_EXEC_PID", "FDSTORE",
)  # fmt: skip
PR_SET_PDEATHSIG = 1
SO_PASSCRED = getattr(socket, "SO_PASSCRED", 16)
SCM_CREDENTIALS = 2


def run_under_keeper(argv: list[str], watchdog_s: float = 0.0) -> int:
    """Become the keeper of ``argv`` (a whole command line, such as ``[sys.executable, "-m", "ckptd",
    "run"]``).

    The process is replaced, so what the caller imported leaves memory; the status is the daemon's.
    ``watchdog_s`` > 0: a daemon that is ready and silent for so long is killed and started again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    script = os.path.abspath(__file__)
    os.execv(sys.executable, [sys.executable, "-I", "-S", script, str(watchdog_s), *argv])


def failpoint(name: str) -> None:
    """ckptd/core/failpoint.py, which an isolated script cannot import by name; nothing at all unless something is armed."""
    if "CKPTD_FAILPOINT" in os.environ:
        import runpy

        runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "core", "failpoint.py"))["failpoint"](name)


class Store:
    """Descriptors by name, in the order they came."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}

    def put(self, name: str, fd: int) -> None:
        """Takes ``fd``; an earlier one of this name is closed. Beyond STORE_MAX it is not kept, as in
        systemd."""
        if name not in self.fds and len(self.fds) >= STORE_MAX:
            say(f"{STORE_MAX} descriptors are kept already, {name} is not")
            os.close(fd)
            return
        self.remove(name)
        self.fds[name] = fd

    def remove(self, name: str) -> None:
        fd = self.fds.pop(name, None)
        if fd is not None:
            os.close(fd)


class Child:
    """One life of the daemon."""

    def __init__(self, pid: int) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.started = self.beat = time.monotonic()
        self.ready = False
        self.aborted_at = 0.0

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def reap(self) -> int:
        """Status as a shell tells it: 128 + signal when killed."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


class NotifySocket:
    """Where the daemon's datagrams arrive, in a directory that only we may enter; the kernel says who sent
    each."""

    def __init__(self) -> None:
        self.directory = _private_directory()
        self.path = os.path.join(self.directory, SOCKET_NAME)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self.sock.bind(self.path)

    def close(self) -> None:
        self.sock.close()
        _remove(self.directory)

    def receive(self) -> tuple[int, list[str], list[int]] | None:
        """(sender's pid, lines, fds), or None when nothing is there."""
        space = socket.CMSG_SPACE(4 * FDS_PER_DATAGRAM_MAX) + socket.CMSG_SPACE(12)
        try:
            data, ancillary, _, _ = self.sock.recvmsg(DATAGRAM_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        pid, fds = 0, array.array("i")
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == SCM_CREDENTIALS:
                pid = struct.unpack("3i", body)[0]
        return pid, data.decode(errors="replace").split("\n"), fds.tolist()


def _private_directory() -> str:
    """Ours alone, and short: a socket's path has at most 107 bytes."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm"):
        if parent and len(parent) <= PARENT_CHARS_MAX and os.access(parent, os.W_OK | os.X_OK):
            break
    _sweep(parent)
    path = os.path.join(parent, DIRECTORY_PREFIX + os.urandom(8).hex())
    os.mkdir(path, 0o700)
    return path


def _sweep(parent: str) -> None:
    """Keepers that were killed left their directories: those where nobody listens any more go. What cannot be
    looked at stays; no start fails for it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            if name.startswith(DIRECTORY_PREFIX) and _is_deserted(path):
                _remove(path)


def _is_deserted(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        status = os.lstat(path)
        if status.st_uid != os.getuid():
            return False
        try:
            probe.connect(os.path.join(path, SOCKET_NAME))
        except ConnectionRefusedError:
            return True
        except FileNotFoundError:  # its keeper was killed before it had bound it, or has yet to
            return time.time() - status.st_mtime > UNBOUND_MAX_S
    return False


def _remove(directory: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, SOCKET_NAME))
    with contextlib.suppress(OSError):
        os.rmdir(directory)


class KeeperProcess:
    """``run`` returns the status to exit with: the daemon's when it ended by itself, was asked to, or never
    got ready."""

    def __init__(self, argv: list[str], watchdog_s: float = 0.0) -> None:
        self._argv, self._watchdog_s = argv, watchdog_s
        self._store = Store()
        self._delay = RESTART_DELAY_S
        self._was_ready = False
        self._stops = 0
        self._child: Child | None = None
        self._wake, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most, most)
        )  # the store may be large; the daemon inherits it
        for number in FORWARDED:
            signal.signal(number, lambda *_: None)
        self._notify = NotifySocket()  # last: a signal, or a failure above, would leave its directory behind

    def run(self) -> int:
        try:
            while True:
                self._be_there()
                self._child = Child(self._start())
                code = self._live(self._child)
                if self._is_final(code):
                    return code
                say(f"the daemon ended with {code}, it starts again in {self._delay:.1f} s")
                self._pause()
                failpoint("keeper.restart")
                if self._stops:
                    return code
        finally:
            for (
                number
            ) in FORWARDED:  # one more of them must not replace the status while the interpreter ends
                signal.signal(number, signal.SIG_IGN)
            self._notify.close()

    def _is_final(self, code: int) -> bool:
        """A daemon that refuses to start (status below 128, never ready) would refuse for ever."""
        return self._stops > 0 or code == 0 or (not self._was_ready and code < 128)

    def _be_there(self) -> None:
        """The daemon that lives is connected; the next one looks for a name, which may be gone (/tmp is swept)."""
        if not os.path.exists(self._notify.path):
            with contextlib.suppress(OSError):  # it is not kept then, but it lives
                gone, self._notify = self._notify, NotifySocket()
                gone.close()

    # --- one life of the daemon ---------------------------------------------------------------------
    def _start(self) -> int:
        keeper = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        pid = os.fork()
        if pid == 0:
            try:
                _handle_no_signals(before)
                self._become_daemon(keeper)
            except OSError as error:
                say(f"the daemon cannot be started: {error}")
            finally:
                os._exit(127)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _become_daemon(self, keeper: int) -> None:
        """In the child. The keeper has one thread, so everything is allowed between fork and exec."""
        os.setpgid(0, 0)  # the terminal's Ctrl-C comes once, through us
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(127)
        names, fds = list(self._store.fds), list(self._store.fds.values())
        end = FIRST_FD + len(fds)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for fd in fds]  # out of the way of the targets
        for index, fd in enumerate(parked):
            os.dup2(fd, FIRST_FD + index)
        env = {**os.environ, "NOTIFY_SOCKET": self._notify.path}
        for name in OUTER_VARIABLES:
            env.pop(name, None)
        if fds:
            env |= {
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDS": str(len(fds)),
                "LISTEN_FDNAMES": ":".join(names),
            }
        if self._watchdog_s > 0:
            env["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        os.execvpe(self._argv[0], self._argv, env)

    def _live(self, child: Child) -> int:
        """Until the daemon is dead. What it stored in its last moment is still in the socket and is taken."""
        poller = select.poll()
        for fd in (self._notify.sock.fileno(), self._wake, child.pidfd):
            poller.register(fd, select.POLLIN)
        while True:
            events = dict(poller.poll(self._watchdog_ms(child)))
            self._take_notes(child)
            self._forward_signals(child)
            if child.pidfd in events:
                break
            self._watch(child)
        code = child.reap()
        self._child = None
        if time.monotonic() - child.started > STABLE_AFTER_S:
            self._delay = RESTART_DELAY_S
        return code

    def _take_notes(self, child: Child) -> None:
        while (note := self._notify.receive()) is not None:
            pid, lines, fds = note
            if pid == child.pid:
                self._note(child, dict(line.partition("=")[::2] for line in lines if "=" in line), fds)
            for fd in fds:
                os.close(fd)

    def _note(self, child: Child, note: dict[str, str], fds: list[int]) -> None:
        name = note.get("FDNAME", "stored")
        if note.get("FDSTOREREMOVE") == "1":
            failpoint("keeper.remove")
            self._store.remove(name)
        elif note.get("FDSTORE") == "1" and is_name(name):
            failpoint("keeper.store")
            while fds:
                self._store.put(name, fds.pop(0))
        if note.get("READY") == "1":
            child.ready = self._was_ready = True
        if "READY" in note or "WATCHDOG" in note:
            child.beat = time.monotonic()

    # --- signals, watchdog, delays ------------------------------------------------------------------
    def _forward_signals(self, child: Child | None) -> None:
        try:
            numbers = os.read(self._wake, 64)
        except BlockingIOError:
            return
        for number in numbers:
            self._stops += number in (signal.SIGTERM, signal.SIGINT)
            if child is not None:
                child.signal(signal.SIGKILL if self._stops >= STOPS_MAX else number)

    def _watchdog_ms(self, child: Child) -> float | None:
        if self._watchdog_s <= 0 or not child.ready:
            return None
        due = child.aborted_at + ABORT_GRACE_S if child.aborted_at else child.beat + self._watchdog_s
        return max(10.0, (due - time.monotonic()) * 1000)

    def _watch(self, child: Child) -> None:
        if self._watchdog_s <= 0 or not child.ready:
            return
        now = time.monotonic()
        if not child.aborted_at:
            if now - child.beat > self._watchdog_s:
                say(f"the daemon was silent for {self._watchdog_s} s, it is aborted")
                child.aborted_at = now
                child.signal(signal.SIGABRT)
        elif now - child.aborted_at > ABORT_GRACE_S:
            child.signal(signal.SIGKILL)

    def _pause(self) -> None:
        deadline = time.monotonic() + self._delay
        self._delay = min(self._delay * 2, RESTART_DELAY_MAX_S)
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._stops and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            self._forward_signals(None)


def _handle_no_signals(mask: Iterable[int]) -> None:
    """In the child: until exec it has the keeper's handlers and pipe, and what the keeper forwards to it would come
    back as one more request to stop."""
    signal.set_wakeup_fd(-1)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_name(name: str) -> bool:
    """What systemd takes as FDNAME."""
    return 0 < len(name) < 256 and name.isascii() and name.isprintable() and ":" not in name


def say(text: str) -> None:
    """Unless that would wait for whoever reads it: the daemon is worth more."""
    taker = select.poll()
    with contextlib.suppress(OSError):
        taker.register(sys.stderr, select.POLLOUT)
        if not taker.poll(0):
            return
        sys.stderr.write(f"ckptd keeper: {text}\n")
        sys.stderr.flush()


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        say("usage: keeper.py WATCHDOG_SECONDS COMMAND...")
        return errno.EINVAL
    try:
        keeper = KeeperProcess(argv[1:], float(argv[0]))
    except OSError as error:  # a container with a read-only root, for example
        say(f"there is no place for its socket: {error}; set TMPDIR to a directory that may be written")
        return 1
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
