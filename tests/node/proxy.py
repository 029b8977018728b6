"""A wire that can be listened to, bent, cut and held: a TCP proxy in threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

READ_BYTES = 65536


class Proxy:
    """Forwards connections to ``target`` ("ip:port"). Seen from the side that connects:

    ``bend(at, data)`` may change what goes to the target, ``at`` bytes into the connection. After ``cut_at`` bytes the
    connection is closed; after ``hold_at`` nothing is read any more. ``sent``: everything that went to the target.
    """

    def __init__(
        self,
        target: str,
        *,
        bend: Callable[[int, bytearray], None] | None = None,
        cut_at: int | None = None,
        hold_at: int | None = None,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._bend, self._cut_at, self._hold_at = (host, int(port)), bend, cut_at, hold_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._closing = threading.Event()
        self.sent = bytearray()
        self.holding = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                far = socket.create_connection(self._target)
                self._sockets.append(far)
                if self._closing.is_set():  # close() has gone through the list already
                    near.close()
                    far.close()
                    return
                threading.Thread(target=self._there, args=(near, far), daemon=True).start()
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _there(self, near: socket.socket, far: socket.socket) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(near.recv(READ_BYTES)):
                if self._bend is not None:
                    self._bend(at, data)
                if self._cut_at is not None:
                    del data[max(0, self._cut_at - at) :]
                far.sendall(data)
                self.sent += data
                at += len(data)
                if self._cut_at is not None and at >= self._cut_at:
                    break
                if self._hold_at is not None and at >= self._hold_at:
                    self.holding.set()
                    self._closing.wait()
        _shut(near, far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(READ_BYTES):
                near.sendall(data)
        _shut(near, far)


def _shut(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def flip(position: int, bit: int = 0) -> Callable[[int, bytearray], None]:
    """Flip one bit of the byte at ``position`` of the connection."""

    def bend(at: int, data: bytearray) -> None:
        if at <= position < at + len(data):
            data[position - at] ^= 1 << bit

    return bend
