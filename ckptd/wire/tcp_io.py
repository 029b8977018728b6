"""One blocking socket that notices cancellation and death of the other side.

The kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) wake a blocked call every POLL_S; Python's would make the socket
non-blocking and cost a poll() per call, and MSG_WAITALL would not fill a chunk in one call.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from ckptd.wire.bulk import IDLE_TIMEOUT_S, POLL_S, TransferError

IOV_MAX = 1024  # buffers of one sendmsg
PORT_MAX = 65535
_PORT = re.compile(r"[0-9]{1,5}")  # int() takes more: signs, underscores, other scripts


class Wire:
    """``stopped`` is asked between chunks and at least every POLL_S while blocked. ``moved`` hears of bytes that came, in parts of
    POLL_S at the most."""

    def __init__(
        self,
        sock: socket.socket,
        stopped: Callable[[], bool],
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.sock, self._stopped, self._idle_timeout_s = sock, stopped, idle_timeout_s
        self._moved = moved
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        interval = struct.pack("ll", int(POLL_S), int(POLL_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def read_into(self, view: memoryview) -> None:
        """Fill the view. Raises TransferError when the stream ends, stops or stands still."""
        self._move(self._read_some, view)

    def read(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send all pieces. Raises TransferError when the receiver is gone, stops or stands still."""
        views = [memoryview(piece) for piece in pieces]
        for first in range(0, len(views), IOV_MAX):
            self._write_row(views[first : first + IOV_MAX])

    def _write_row(self, views: list[memoryview]) -> None:
        if len(views) > 1:
            views = self._send_together(views)
        for view in views:
            self._move(self.sock.send, view)

    def _send_together(self, views: list[memoryview]) -> list[memoryview]:
        """One sendmsg; returns what it did not take."""
        try:
            sent = self.sock.sendmsg(views)
        except BlockingIOError:
            return views
        except OSError as error:
            raise TransferError(f"the stream broke: {error.strerror}") from error
        for index, view in enumerate(views):
            if sent < len(view):
                return [view[sent:], *views[index + 1 :]]
            sent -= len(view)
        return []

    def _read_some(self, view: memoryview) -> int:
        got = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
        if got == 0:
            raise TransferError("the other side closed the stream")
        self._moved()
        return got

    def _move(self, call: Callable[[memoryview], int], view: memoryview) -> None:
        deadline = time.monotonic() + self._idle_timeout_s
        while len(view):
            if self._stopped():
                raise TransferError("cancelled")
            try:
                view = view[call(view) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransferError(f"no byte moved for {self._idle_timeout_s:g} s") from None
                continue
            except OSError as error:
                raise TransferError(f"the stream broke: {error.strerror}") from error
            deadline = time.monotonic() + self._idle_timeout_s

    def close(self) -> None:
        self.sock.close()


def shut(sock: socket.socket) -> None:
    """End both directions: whoever is blocked in it wakes up. Leaves the descriptor to its owner."""
    with contextlib.suppress(OSError):  # already gone
        sock.shutdown(socket.SHUT_RDWR)


def connect(address: str, stopped: Callable[[], bool], timeout_s: float) -> socket.socket:
    """A connected socket. Raises TransferError (refused, unreachable, late, cancelled)."""
    host, port = split_address(address)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect((host, port))
        _await_connection(sock, stopped, time.monotonic() + timeout_s)
    except OSError as error:
        sock.close()
        raise TransferError(f"cannot connect: {error.strerror or error}", where=address) from error
    except TransferError:
        sock.close()
        raise
    return sock


def _await_connection(sock: socket.socket, stopped: Callable[[], bool], deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while not poll.poll(POLL_S * 1000):
        if stopped():
            raise TransferError("cancelled")
        if time.monotonic() > deadline:
            raise TransferError("no connection in time")
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def split_address(address: str) -> tuple[str, int]:
    """"ip:port" or "[ip6]:port". Raises TransferError; names are never resolved here."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise TransferError("not an ip:port address", where=address) from error
    if not _PORT.fullmatch(port) or int(port) > PORT_MAX:
        raise TransferError("not an ip:port address", where=address)
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
