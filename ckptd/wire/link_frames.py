"""Frames of the control link: one zmq message each, at most FRAME_BYTES_MAX, first byte its kind (design D3).

libzmq holds a frame of a peer that has proven nothing until it is whole, so the limit on frames, and not the limit on
messages, is what such a peer can make us hold (P13). Longer messages travel as several frames.

===== ========== =====================================================================================================
kind  body
===== ========== =====================================================================================================
H     HELLO      version u16, then msgpack [node, incarnation, node that is meant]        DEALER -> ROUTER
W     WELCOME    version u16, then msgpack [node, incarnation]                            ROUTER -> DEALER
R     REFUSED    version u16, then msgpack [code, text]                                   ROUTER -> DEALER
P, O  PING, PONG nothing                                                                  there and back
M     MESSAGE    message id u64, index u32, count u32, part of [job length u16, job, codec bytes]     both ways
===== ========== =====================================================================================================

HELLO, WELCOME and REFUSED keep kind and version where they are in every version, so that skew can be named.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.wire.codec import CONTROL_MESSAGE_BYTES_MAX

# 2: both ends of a fetch know where its units end; 3: a fetch says whether it may be paced; 4: and whether to ask again;
# 5: a void says what was written; 6: and which grant was the newest; 7: a snapshot names the grant that it was captured under;
# 8: layouts are in columns; 11: a report names the world by a digest
PROTOCOL_VERSION = 11
FRAME_BYTES_MAX = 256 * 1024  # ZMQ_MAXMSGSIZE
NAME_BYTES_MAX = 256  # node, incarnation, job
TEXT_BYTES_MAX = 1024  # of a refusal

HELLO, WELCOME, REFUSED, PING, PONG, MESSAGE = (kind[0] for kind in (b"H", b"W", b"R", b"P", b"O", b"M"))
PING_FRAME, PONG_FRAME = b"P", b"O"

VERSION_CODE, DUPLICATE, MISDIRECTED, GREET_FIRST = "version", "duplicate", "misdirected", "greet first"

_VERSIONED = struct.Struct(">BH")
_PART = struct.Struct(">BQII")
_JOB = struct.Struct(">H")
_JOB_KEY = re.compile(r"([0-9]{1,10}/[A-Za-z0-9][A-Za-z0-9._-]{0,99})?")  # wire.names.job_key; empty: about the node
PART_BYTES_MAX = FRAME_BYTES_MAX - _PART.size
PARTS_MAX = -(-(CONTROL_MESSAGE_BYTES_MAX + _JOB.size + NAME_BYTES_MAX) // PART_BYTES_MAX)


class BadFrame(CkptdError):
    """An authenticated peer sent what no daemon sends."""


@dataclass(frozen=True, slots=True)
class Skew:
    """A versioned frame of another version; nothing else of it is looked at."""

    version: int


def pack(kind: int, *fields: str) -> bytes:
    return _VERSIONED.pack(kind, PROTOCOL_VERSION) + msgspec.msgpack.encode(fields)


def unpack(frame: bytes, count: int) -> tuple[str, ...] | Skew:
    """The fields of a HELLO, WELCOME or REFUSED. Raises BadFrame."""
    if len(frame) < _VERSIONED.size:
        raise BadFrame("a greeting that is cut off")
    _, version = _VERSIONED.unpack_from(frame)
    if version != PROTOCOL_VERSION:
        return Skew(version)
    try:
        fields = msgspec.msgpack.decode(memoryview(frame)[_VERSIONED.size :], type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a greeting that does not parse: {error}") from error
    if len(fields) != count or any(len(text.encode()) > TEXT_BYTES_MAX for text in fields):
        raise BadFrame("a greeting with other fields")
    return fields


class Letter:
    """One message on its way out: its payload is shared by all who get it, and cut into frames as they are sent."""

    def __init__(self, job: str, message: bytes) -> None:
        name = job.encode()
        if len(name) > NAME_BYTES_MAX:
            raise BadFrame(f"a job name of {len(name)} bytes")
        self._payload = memoryview(_JOB.pack(len(name)) + name + message)
        self.nbytes = len(self._payload)
        self.count = -(-self.nbytes // PART_BYTES_MAX)

    def frames(self, number: int) -> Iterator[bytes]:
        for index in range(self.count):
            part = self._payload[index * PART_BYTES_MAX : (index + 1) * PART_BYTES_MAX]
            yield b"".join((_PART.pack(MESSAGE, number, index, self.count), part))


class Assembler:
    """Puts the frames of one connection together again; they come in order. Holds at most one message."""

    def __init__(self) -> None:
        self._number, self._count, self._next = 0, 0, 0
        self._parts: list[memoryview] = []

    def add(self, frame: bytes) -> tuple[str, memoryview] | None:
        """(job, codec bytes) when this frame completes a message. Raises BadFrame; what was begun is then forgotten."""
        try:
            return self._add(frame)
        except BadFrame:
            self._parts, self._next = [], 0
            raise

    def _add(self, frame: bytes) -> tuple[str, memoryview] | None:
        if len(frame) < _PART.size:
            raise BadFrame("a message frame that is cut off")
        _, number, index, count = _PART.unpack_from(frame)
        if index == 0:
            self._number, self._count, self._next, self._parts = number, count, 0, []
        if (number, index, count) != (self._number, self._next, self._count) or not 0 < count <= PARTS_MAX:
            raise BadFrame("message frames out of order")
        part = memoryview(frame)[_PART.size :]
        if index < count - 1 and len(part) != PART_BYTES_MAX:
            raise BadFrame("a message frame that is too short")
        self._parts.append(part)
        self._next += 1
        if self._next < count:
            return None
        payload = self._parts[0] if count == 1 else memoryview(b"".join(self._parts))
        self._parts, self._next = [], 0
        return _open(payload)


def _open(payload: memoryview) -> tuple[str, memoryview]:
    try:
        (length,) = _JOB.unpack_from(payload)
        if length > len(payload) - _JOB.size:
            raise BadFrame("an envelope that is cut off")
        job = bytes(payload[_JOB.size : _JOB.size + length]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"an envelope that does not parse: {error}") from error
    if not _JOB_KEY.fullmatch(job):
        raise BadFrame(f"an envelope of no job: {job[:80]!r}")
    return job, payload[_JOB.size + length :]
