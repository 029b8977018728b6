"""The receiving end of one ticket: which chunks have come, which streams are at work, how it ended.

Shared by all transports, so that what is refused is refused everywhere alike.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import (
    AAD_BYTES_MAX,
    BUFFER_BYTES_MAX,
    CHUNK_BYTES,
    TICKET_ID_BYTES,
    TICKET_KEY_BYTES,
    TICKETS_MAX,
    Mode,
    Ticket,
    TransferError,
    Witness,
    chunk_count,
    flat,
)


class Landing:
    """One announced transfer (bulk.Incoming). Thread-safe. ``done`` resolves once no stream can touch the buffer."""

    def __init__(
        self, ticket: Ticket, buffer: memoryview, deadline: float, witness: Witness | None = None
    ) -> None:
        self.ticket, self.deadline, self._witness = ticket, deadline, witness
        self.done: Future[int] = Future()
        self.done.set_running_or_notify_cancel()  # only cancel() below ends it early
        self._settled = False
        self._buffer = buffer
        self._lock = threading.Lock()
        self._push = b""
        self._streams = 0
        self._open: dict[int, Callable[[], None]] = {}  # stream -> how to interrupt it
        self._used: set[int] = set()
        self._ended = 0
        self._seen = bytearray(chunk_count(ticket.nbytes))
        self._missing = len(self._seen)
        self._error: TransferError | None = None
        self._result: int | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def cancel(self) -> None:
        self.fail(TransferError("cancelled"))

    # --- streams come and go ------------------------------------------------------------------------------------
    def admit(self, hello: frames.Hello, interrupt: Callable[[], None], now: float) -> int:
        """OK: the stream may write, until ``leave``. Else the status to answer with. Only after the proof."""
        with self._lock:
            if self._over or (not self._streams and now > self.deadline):
                return frames.UNKNOWN
            if self._streams and (self._push, self._streams) != (hello.push, hello.streams):
                return frames.IN_USE
            if hello.stream in self._used:
                return frames.IN_USE
            self._push, self._streams = hello.push, hello.streams
            self._used.add(hello.stream)
            self._open[hello.stream] = interrupt
        return frames.OK

    def dismiss(self, stream: int) -> None:
        """It was admitted and cannot be served: as if it had never come."""
        with self._lock:
            self._open.pop(stream, None)
            self._used.discard(stream)
            if not self._used:
                self._push, self._streams = b"", 0
        self._settle()

    def claim(self, offset: int, length: int) -> memoryview:
        """Where this chunk goes. Raises Malformed: out of range, of the wrong length, or sent before."""
        index, rest = divmod(offset, CHUNK_BYTES)
        with self._lock:
            if self._over:
                raise TransferError("the transfer is over")
            fits = index < len(self._seen) and length == min(CHUNK_BYTES, self.ticket.nbytes - offset)
            if rest or not fits:
                raise frames.Malformed(f"chunk of {length} bytes at {offset} is out of range")
            if self._seen[index]:
                raise frames.Malformed(f"chunk at {offset} came twice")
            self._seen[index] = 1
        return self._buffer[offset : offset + length]

    def landed(self, offset: int, length: int) -> None:
        """A claimed chunk is in the buffer, whole. Before it counts, its witness has seen it."""
        if self._witness is not None:
            self._witness(offset, length)
        with self._lock:
            self._missing -= 1

    def end(self, stream: int) -> None:
        """The stream said its last. Raises TransferError when all have and something is missing."""
        with self._lock:
            self._ended += 1
            if self._ended == self._streams and not self._over:
                if self._missing:
                    raise TransferError(f"{self._missing} chunks never came")
                self._result = self.ticket.nbytes

    def leave(self, stream: int, deadline: float) -> None:
        """The stream does not touch the buffer any more. What has not ended by then must come before ``deadline``."""
        with self._lock:
            self._open.pop(stream, None)
            self.deadline = deadline
        self._settle()

    # --- how it ends --------------------------------------------------------------------------------------------
    def fail(self, error: TransferError) -> None:
        """The first failure counts; every stream is interrupted."""
        with self._lock:
            if not self._over:
                self._error = error
            interrupts = list(self._open.values()) if self._error else []
        for interrupt in interrupts:
            interrupt()
        self._settle()

    def expire(self, now: float) -> None:
        """Fail when nobody came in time, or a stream of several stayed away."""
        with self._lock:
            late = not self._over and not self._open and now > self.deadline
        if late:
            self.fail(TransferError("the ticket expired before all streams had come"))

    @property
    def _over(self) -> bool:
        return self._error is not None or self._result is not None

    def _settle(self) -> None:
        with self._lock:
            if self._settled or not self._over or (self._error is not None and self._open):
                return
            self._settled = True
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(self.ticket.nbytes)


class Landings:
    """All tickets a receiver has issued and not yet settled."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Landing] = {}
        self._lock = threading.Lock()
        self._closed = False

    def expect(
        self,
        buffer: memoryview,
        address: str,
        mode: Mode,
        aad: bytes,
        deadline: float,
        witness: Witness | None = None,
    ) -> Landing:
        """Raises TransferError: bounds, too many, or closed."""
        view = flat(buffer)
        if len(aad) > AAD_BYTES_MAX or len(view) > BUFFER_BYTES_MAX or view.readonly:
            raise TransferError("a transfer whose buffer or aad is out of bounds")
        key = secrets.token_bytes(TICKET_KEY_BYTES)
        ticket = Ticket(secrets.token_bytes(TICKET_ID_BYTES), key, address, len(view), mode, aad)
        landing = Landing(ticket, view, deadline, witness)
        with self._lock:
            if self._closed or len(self._by_id) >= TICKETS_MAX:
                raise TransferError("closed" if self._closed else f"{TICKETS_MAX} transfers are announced already")
            self._by_id[ticket.id] = landing
        landing.done.add_done_callback(lambda _: self._forget(ticket.id))
        return landing

    def find(self, ticket: bytes) -> Landing | None:
        with self._lock:
            return self._by_id.get(ticket)

    def expire(self, now: float) -> None:
        for landing in self._all():
            landing.expire(now)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for landing in self._all():
            landing.fail(TransferError("the receiver was closed"))

    def _all(self) -> list[Landing]:
        with self._lock:
            return list(self._by_id.values())

    def _forget(self, ticket: bytes) -> None:
        with self._lock:
            self._by_id.pop(ticket, None)
