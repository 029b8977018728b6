"""Our side of the service manager's protocol (sd_notify): keep descriptors over a restart, say that we live
(design D1).

The other side is systemd, or ckptd's own keeper (keeper.py), which speaks the same.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import time

FIRST_FD = 3  # LISTEN_FDS begins here
SEND_TIMEOUT_S = 5.0  # the service manager may be busy; it is never a reason to hang
SEND_BUFFER_BYTES = 1 << 20
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN)  # there any more; who does now has bound the name anew


class NullKeeper:
    """Nobody keeps anything: started by hand, without ``ckptd run``'s parent and without systemd."""

    present = False
    watchdog_interval_s = 0.0

    def store(self, name: str, fd: int) -> bool:
        return True  # nothing is lost that could have been kept

    def remove(self, name: str) -> bool:
        return True

    def taken(self) -> dict[str, int]:
        return {}

    def ready(self) -> None:
        """Nobody waits for it."""

    def stopping(self) -> None:
        """Nobody waits for it."""

    def watchdog(self) -> None:
        """Nobody watches."""

    def status(self, text: str) -> None:
        """Nobody reads it."""

    def close(self) -> None:
        """Nothing is open."""


class Keeper(NullKeeper):
    """Speaks to whoever set NOTIFY_SOCKET. A message that cannot be sent returns False; it raises nothing. It stays connected, as
    the socket's name may go (/tmp is swept) while who listens is there."""

    present = True

    def __init__(self, address: str, taken: dict[str, int] | None = None, watchdog_s: float = 0.0) -> None:
        self._taken = taken or {}
        self.watchdog_interval_s = watchdog_s / 2  # systemd's advice
        self._beat = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._connect()

    @staticmethod
    def from_env() -> NullKeeper:
        """Reads NOTIFY_SOCKET, LISTEN_* and WATCHDOG_*, and removes them so that no child believes they are
        its own."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        taken = _listen_fds()
        watchdog_s = _watchdog_s()
        return Keeper(address, taken, watchdog_s) if address else NullKeeper()

    def store(self, name: str, fd: int) -> bool:
        """Keep ``fd`` under ``name``; after a restart ``taken()`` has it."""
        return self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))

    def remove(self, name: str) -> bool:
        return self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def taken(self) -> dict[str, int]:
        """What an earlier life stored, once; the caller owns the descriptors."""
        taken, self._taken = self._taken, {}
        return taken

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        """Say that we live; may be called as often as one likes. Never waits: a lost beat is followed by the next."""
        now = time.monotonic()
        if self.watchdog_interval_s and now - self._beat >= self.watchdog_interval_s / 2:
            self._beat = now
            self._send("WATCHDOG=1", wait=False)

    def status(self, text: str) -> None:
        self._send(f"STATUS={text.splitlines()[0] if text else ''}", wait=False)

    def close(self) -> None:
        self._socket.close()

    def _send(self, text: str, fds: tuple[int, ...] = (), *, wait: bool = True) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        for again in (True, False):
            try:
                self._socket.sendmsg([text.encode()], rights, flags)
                return True
            except OSError as error:
                if not (again and error.errno in NOBODY_LISTENS and self._connect()):
                    break
        return False

    def _connect(self) -> bool:
        try:
            self._socket.connect(self._address)
        except OSError:
            return False
        return True


def has_service_manager() -> bool:
    """Is there somebody above this very process who may keep descriptors? A NOTIFY_SOCKET that was inherited from a
    service which started our shell (systemd says for whom it is since 248) is none."""
    meant_for = os.environ.get("SYSTEMD_EXEC_PID", str(os.getpid()))
    return bool(os.environ.get("NOTIFY_SOCKET")) and meant_for == str(os.getpid())


def _listen_fds() -> dict[str, int]:
    """Descriptors passed to this very process, by name; a name that comes twice keeps its first."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    taken: dict[str, int] = {}
    if pid != str(os.getpid()) or not _is_number(count):
        return taken
    for index in range(int(count)):
        fd = FIRST_FD + index
        os.set_inheritable(fd, False)
        name = names[index] if index < len(names) else f"unnamed-{index}"
        if name in taken:
            os.close(fd)
        else:
            taken[name] = fd
    return taken


def _watchdog_s() -> float:
    pid, usec = os.environ.pop("WATCHDOG_PID", ""), os.environ.pop("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if _is_number(usec) and pid in ("", str(os.getpid())) else 0.0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
