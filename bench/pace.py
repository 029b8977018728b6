"""A wire that carries less than two cores can copy: TCP paces itself to so much (SO_MAX_PACING_RATE, no root needed).

On loopback sender and receiver share the cores, so that everything a receiver does besides costs time. On a real wire it waits
for bytes, and what counts is what is left to do after the last one.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from ckptd.wire import tcp_push
from ckptd.wire.tcp_io import connect

SO_MAX_PACING_RATE = 47  # the socket module has no name for it


def paced(sock: socket.socket, bytes_per_s: float) -> socket.socket:
    """The same socket; it sends no faster than that. 0: as fast as it can."""
    if bytes_per_s:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", int(bytes_per_s)))
    return sock


def pace_pushes(bytes_per_s: float) -> None:
    """Every stream that this process pushes from now on."""

    def connect_paced(*args: Any) -> socket.socket:
        return paced(connect(*args), bytes_per_s)

    vars(tcp_push)["connect"] = connect_paced
