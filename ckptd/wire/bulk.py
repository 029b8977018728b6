"""Bulk bytes between daemons: tickets, the Transport contract and the protocol on a stream (design D4).

Whoever *receives* issues a ticket for a buffer (``expect``) and tells it to the sender over the control link; the sender
connects with it and pushes. A ticket is single-use, expires, names the exact number of bytes, and is proven before the
receiver takes a single byte of payload, in both modes:

- ``none``: bytes go straight from the sender's spans into the receiver's buffer. For loopback and trusted wires: found
  damage is found by block sums (D14), not here.
- ``aead``: AES-256-GCM per chunk, its own key per connection, so that nonces (a counter) never repeat under a key.

On the wire, version 1, big-endian. One TCP connection is one *stream* of a push; all streams of a push carry one random
push id. The stream secret is HKDF(ticket key, salt = bulk key of the cluster): a ticket alone, without the cluster key,
opens nothing.

======== ========== ================================================================================================
sender   HELLO      64 bytes: magic "CKPTBULK", version u16, stream u16, streams u16, mode u8, 0, ticket 16, push 16, 0...
receiver CHALLENGE  40 bytes: "CKPT", status u8 (0: go on; else why not, and the connection ends), 0 0 0, nonce 32
sender   PROOF      32 bytes: HMAC-SHA256(stream secret, "sender" | HELLO | nonce)
receiver ACCEPT     40 bytes: "CKPT", status u8, 0 0 0, HMAC-SHA256(stream secret, "receiver" | HELLO | nonce)
sender   CHUNK...   16 bytes: offset u64, length u32, flags u32 (1: last), then length bytes (aead: and a 16-byte tag)
sender   CHUNK last offset = chunks sent in this stream, length 0: the stream ended on purpose, nothing was cut off
receiver DONE       40 bytes: "CKPT", status u8, 0 0 0, HMAC-SHA256(stream secret, "done" | HELLO | nonce | chunks u64)
======== ========== ================================================================================================

A chunk starts on a multiple of CHUNK_BYTES and is that long, but for the last one of the buffer; which stream takes which
chunk is open. So the receiver sees at once what is out of range, of the wrong length or sent twice, and what is missing.
aead: key = HKDF(stream secret, salt = nonce | HELLO); nonce of the n-th chunk of a stream = n (12 bytes); AAD = ticket aad
and its length, stream, offset, length, last flag.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from ckptd.core.errors import CkptdError

Mode = Literal["none", "aead"]
Witness = Callable[[int, int], None]  # of (offset, length) in a buffer that is being filled, see Transport.expect

TICKET_ID_BYTES = 16
TICKET_KEY_BYTES = 32
TICKET_BYTES_MAX = 8 * 1024  # an encoded ticket
AAD_BYTES_MAX = 4 * 1024
BUFFER_BYTES_MAX = 1 << 44  # one transfer
CHUNK_BYTES = 4 * 1024 * 1024  # one sendmsg, one AEAD seal (256 KiB: 0.76 of raw TCP; 2 to 8 MiB: 0.9 to 1.0)
STREAMS_MAX = 16  # of one push
STREAMS_DEFAULT = 2
TICKETS_MAX = 4096  # outstanding at one receiver
TICKET_TTL_S = 30.0  # from expect() to the first stream
HANDSHAKE_TIMEOUT_S = 5.0  # from accept to PROOF; also for connecting
HANDSHAKE_BYTES_MAX = 96  # HELLO and PROOF: all that is read from a peer that has proven nothing
HANDSHAKES_MAX = 128  # connections that have proven nothing; the oldest makes room for the newest
CONNECTIONS_MAX = 256  # streams that have proven a ticket, of all transfers together
IDLE_TIMEOUT_S = 20.0  # a stream that moves no byte for so long is dead
POLL_S = 0.2  # how soon a blocked stream notices that it was cancelled


class TransferError(CkptdError):
    """A transfer that did not happen: refused, broken, cancelled or late. Nothing of the buffer may be used."""


class Changed(TransferError):
    """What came is not what was to be sent (P10)."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to push ``nbytes`` bytes to ``address``, once. ``aad`` is what both sides know about the transfer."""

    id: bytes
    key: bytes = field(repr=False)
    address: str  # "ip:port"
    nbytes: int
    mode: Mode
    aad: bytes = b""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Ticket:
        """Raises TransferError for anything that is not a ticket."""
        if len(data) > TICKET_BYTES_MAX:
            raise TransferError(f"a ticket of {len(data)} bytes")
        try:
            ticket = msgspec.msgpack.decode(data, type=Ticket)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise TransferError(f"not a ticket: {error}") from error
        sound = len(ticket.id) == TICKET_ID_BYTES and len(ticket.key) == TICKET_KEY_BYTES
        if not sound or len(ticket.aad) > AAD_BYTES_MAX or not 0 <= ticket.nbytes <= BUFFER_BYTES_MAX:
            raise TransferError("a ticket whose fields are out of bounds")
        return ticket


class Pace(Protocol):
    """When a sender may send. Called by the threads of its streams."""

    def take(self, nbytes: int, stopped: Callable[[], bool]) -> int:
        """How many of these bytes may go now, at least one; waits until then. 0: ``stopped`` said so."""
        ...

    def sent(self, nbytes: int) -> None:
        """They have gone, or have failed to: once after each ``take`` that allowed any."""
        ...


def wait_turn(pace: Pace | None, nbytes: int, stopped: Callable[[], bool]) -> bool:
    """Returns when all of these bytes may go, which count as gone then. False: the pace lets no more of them go, ``stopped`` or the
    like."""
    while pace is not None and nbytes > 0:
        allowed = pace.take(nbytes, stopped)
        if not allowed:
            return False
        pace.sent(allowed)
        nbytes -= allowed
    return True


class Incoming(Protocol):
    """An announced transfer. ``done`` resolves to the number of bytes, or raises TransferError; after ``done`` (and only
    then) the transport no longer touches the buffer."""

    @property
    def ticket(self) -> Ticket: ...
    @property
    def done(self) -> Future[int]: ...
    def cancel(self) -> None:
        """Fail ``done`` and end its streams; idempotent."""
        ...


class Transport(Protocol):
    """Moves bytes. TCP (wire.tcp) and memory (wire.memory_transport) pass one conformance suite, tests/node/test_bulk.py."""

    @property
    def address(self) -> str: ...

    def expect(
        self,
        buffer: memoryview,
        *,
        aad: bytes = b"",
        ttl_s: float = TICKET_TTL_S,
        witness: Witness | None = None,
    ) -> Incoming:
        """Issue a ticket for filling exactly ``buffer``. Raises TransferError when too many are outstanding.

        ``witness(offset, length)`` is called for every byte once, as soon as it lies in the buffer and before ``done``, in the
        thread that put it there, so it may be called by several threads at once. It must not block."""
        ...

    def push(
        self,
        ticket: Ticket,
        spans: Sequence[memoryview],
        *,
        streams: int = STREAMS_DEFAULT,
        cancelled: threading.Event | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Send the spans one after the other into the ticket's buffer, as fast as ``pace`` lets it; blocks until the receiver has
        confirmed it.
        Raises TransferError (refused, broken, cancelled, or the spans are not exactly ``ticket.nbytes`` long)."""
        ...

    def close(self) -> None: ...


def flat(buffer: memoryview) -> memoryview:
    """The buffer's bytes. Raises TransferError when they do not lie in a row."""
    if not buffer.contiguous:
        raise TransferError("the buffer is not contiguous")
    if buffer.nbytes == 0:
        return memoryview(bytearray())
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def chunk_count(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


class Spans:
    """Several buffers read as one row of bytes."""

    def __init__(self, spans: Sequence[memoryview]) -> None:
        self._views = [view for view in (flat(span) for span in spans) if len(view)]
        self._starts: list[int] = []
        self.nbytes = 0
        for view in self._views:
            self._starts.append(self.nbytes)
            self.nbytes += len(view)

    def cut(self, offset: int, length: int) -> list[memoryview]:
        """The pieces that make up ``[offset, offset + length)``."""
        pieces: list[memoryview] = []
        index = bisect_right(self._starts, offset) - 1
        while length > 0:
            start = offset - self._starts[index]
            piece = self._views[index][start : start + length]
            pieces.append(piece)
            offset, length, index = offset + len(piece), length - len(piece), index + 1
        return pieces
