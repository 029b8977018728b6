"""Frames and file descriptors over a unix SOCK_SEQPACKET socket (design D2). Both ends use this.

One packet is one frame ``[class name, {field: value}]``; whatever is larger travels as a sealed memfd beside
it. Nothing here waits for a stopped peer: ``send`` returns False when the peer's queue is full.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

import msgpack

from ckptd.wire import rank as wire
from ckptd.wire.memfd import memfd_object, read_memfd_object

__all__ = ["FrameError", "RankSocket", "decode_frame", "encode_frame", "memfd_object", "read_memfd_object"]

ITEMS_MAX = 8192  # of one list or map in a frame
SEND_BUFFER_BYTES = 4 * 1024 * 1024  # asked for; the kernel may give less

# File descriptors that a class may carry; every other class carries none.
FDS_MAX: Mapping[type, int] = {
    wire.Offer: wire.FDS_PER_FRAME_MAX,
    wire.Join: 1,
    wire.Wants: 1,
    wire.SealedSlot: 1,
    wire.Mapped: 1,
    wire.Opened: 1,
    wire.LoadPlan: wire.FDS_PER_FRAME_MAX,
}


class FrameError(ValueError):
    """The peer sent what is no frame of this protocol (or we tried to): the connection is of no more use."""


# --- frames ---------------------------------------------------------------------------------------
def encode_frame(message: object) -> bytes:
    """Raises FrameError when the message is larger than FRAME_BYTES_MAX.

    What is not known and need not be is left out: a peer that was made before there was such a field never hears of it.
    """
    values = {
        field.name: value
        for field in fields(message)  # type: ignore[arg-type]
        if (value := getattr(message, field.name)) is not None or field.default is not None
    }
    data: bytes = msgpack.packb([type(message).__name__, values])
    if len(data) > wire.FRAME_BYTES_MAX:
        limit = wire.FRAME_BYTES_MAX
        raise FrameError(f"{type(message).__name__} of {len(data)} bytes, a frame holds {limit}")
    return data


def decode_frame(data: bytes | memoryview, classes: Sequence[type]) -> Any:
    """One of ``classes`` with checked field names and types. Raises FrameError for anything else."""
    try:
        frame = msgpack.unpackb(
            data, strict_map_key=False, max_array_len=ITEMS_MAX, max_map_len=ITEMS_MAX, max_ext_len=0, ext_hook=_no_ext
        )
    except Exception as error:  # msgpack raises ValueError, its own types and UnicodeDecodeError
        raise FrameError(f"not msgpack: {error}") from error
    if not (isinstance(frame, list) and len(frame) == 2 and type(frame[0]) is str and isinstance(frame[1], dict)):
        raise FrameError("a frame is [class, fields]")
    found = next((cls for cls in classes if cls.__name__ == frame[0]), None)
    if found is None:
        raise FrameError(f"unknown class {frame[0][:40]!r}")
    return _build(found, frame[1])


def _no_ext(code: int, data: bytes) -> object:
    raise ValueError(f"ext type {code}")


def _build(cls: type, values: dict[Any, Any]) -> Any:
    hints, required = _schema(cls)
    unknown, missing = values.keys() - hints.keys(), required - values.keys()
    if unknown or missing:
        strange = sorted(map(str, unknown))[:4]
        raise FrameError(f"{cls.__name__}: unknown fields {strange}, missing {sorted(missing)[:4]}")
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise FrameError(f"{cls.__name__}.{name}: {type(value).__name__} is not {hints[name]}")
    return cls(**values)


@lru_cache(maxsize=128)
def _schema(cls: Any) -> tuple[dict[str, Any], frozenset[str]]:
    required = frozenset(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)
    return typing.get_type_hints(cls), required


def _fits(value: object, hint: Any) -> bool:
    """Has a msgpack value this type? Types are exact (bool is no int), but an int may stand for a float."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in inner)
    if origin is list:
        return type(value) is list and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        if type(value) is not dict:
            return False
        return all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


# --- the socket -----------------------------------------------------------------------------------
class RankSocket:
    """One end. ``receives``: what this end understands (TO_RANK in the trainer, TO_DAEMON in the daemon)."""

    def __init__(self, sock: socket.socket, receives: Sequence[type]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.sock, self._receives = sock, tuple(receives)
        self._buffer = bytearray(wire.FRAME_BYTES_MAX)

    @classmethod
    def connect(cls, path: str | os.PathLike[str], receives: Sequence[type] = wire.TO_RANK) -> RankSocket:
        """Never waits: a daemon stopped behind a full backlog raises BlockingIOError, none at all another
        OSError."""
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        sock = socket.socket(socket.AF_UNIX, kind)
        try:
            sock.connect(os.fspath(path))
        except BaseException:
            sock.close()
            raise
        return cls(sock, receives)

    def fileno(self) -> int:
        """-1 once closed."""
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: object, fds: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
        """False when the peer takes nothing within ``timeout_s`` (it is stopped, or slow). ``fds`` stay the
        caller's. Raises FrameError for a message too large, OSError when the peer is gone."""
        return self.send_frame(encode_frame(message), fds, timeout_s)

    def send_frame(self, data: bytes, fds: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return True
            except BlockingIOError:
                if not self._ready(select.POLLOUT, deadline - time.monotonic()):
                    return False

    def recv(self, timeout_s: float | None = None) -> tuple[Any, list[int]] | None:
        """(message, fds), None at the end. The fds are the caller's to close. ``timeout_s`` None: for ever,
        0: only what is there. Raises TimeoutError, or FrameError for garbage (then close the connection)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return self._recv_now()
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._ready(select.POLLIN, left):
                    raise TimeoutError("no frame in time") from None

    def _ready(self, event: int, left_s: float | None) -> bool:
        if left_s is not None and left_s <= 0:
            return False
        poller = select.poll()  # select() could not watch a descriptor above 1023
        poller.register(self.sock, event)
        poller.poll(None if left_s is None else left_s * 1000)
        return True

    def _recv_now(self) -> tuple[Any, list[int]] | None:
        try:
            size, ancillary, flags = self._recvmsg()
        except ConnectionResetError:  # once, of a peer that closed without reading all that we sent: what it sent comes after
            size, ancillary, flags = self._recvmsg()
        fds = _received_fds(ancillary)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise FrameError("a frame or its descriptors are more than the limit")
            if size == 0:
                close_all(fds)
                return None
            message = decode_frame(memoryview(self._buffer)[:size], self._receives)
            if len(fds) > FDS_MAX.get(type(message), 0):
                raise FrameError(f"{type(message).__name__} with {len(fds)} descriptors")
        except FrameError:
            close_all(fds)
            raise
        return message, fds

    def _recvmsg(self) -> tuple[int, list[tuple[int, int, bytes]], int]:
        space = socket.CMSG_SPACE(wire.FDS_PER_FRAME_MAX * array.array("i").itemsize)
        return self.sock.recvmsg_into([self._buffer], space, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)[:3]


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
