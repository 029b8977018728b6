"""Bounds what strangers cost at the control port: libzmq accepts without limit, so we count and shut (P13).

libzmq ends a connection that has not completed its handshake in time; until then each holds a descriptor and up to one
frame. A connection counts as a stranger from ACCEPTED until it has said a valid hello, whose message names its descriptor.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

STRANGERS_MAX = 128  # connections that have not greeted; beyond it the one that has waited longest is shut
EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)  # fmt: skip


class RateLimiter:
    """Watches a bound socket. ``on_gone(fd)``: a connection ended. ``on_denied(what)``: a handshake that failed."""

    def __init__(self, door: Socket, port: int, on_gone: Callable[[int], None], on_denied: Callable[[str], None]) -> None:
        self._port, self._on_gone, self._on_denied = port, on_gone, on_denied
        self.strangers: dict[int, None] = {}  # descriptors, oldest first
        self.monitor: Socket = door.get_monitor_socket(EVENTS)

    def serve(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            self._note(event["event"], event["value"])
        while len(self.strangers) > STRANGERS_MAX:
            fd = next(iter(self.strangers))
            del self.strangers[fd]
            _shut(fd, self._port)

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.strangers.pop(value, None)
            self.strangers[value] = None
        elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self.strangers.pop(value, None)
            self._on_gone(value)
        else:
            self._on_denied("a handshake that is not ours")

    def known(self, fd: int) -> None:
        self.strangers.pop(fd, None)


def _shut(fd: int, port: int) -> None:
    """End the connection under libzmq's hands: it sees EOF. The number may be somebody else's by now, so look first."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
            sock.shutdown(socket.SHUT_RDWR)
