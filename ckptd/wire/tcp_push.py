"""The sending end of one transfer: streams that take chunk after chunk from one queue, each in a thread
where there are threads."""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from collections.abc import Sequence
from functools import partial

from ckptd.core.failpoint import failpoint
from ckptd.thread_pool import ThreadPool, together
from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import (
    CHUNK_BYTES,
    STREAMS_MAX,
    TICKET_ID_BYTES,
    Pace,
    Spans,
    Ticket,
    TransferError,
    chunk_count,
)
from ckptd.wire.scratch import ScratchPool
from ckptd.wire.tcp_io import Wire, connect


class Push:
    def __init__(
        self,
        ticket: Ticket,
        spans: Sequence[memoryview],
        bulk_key: bytes,
        pool: ScratchPool,
        cancelled: threading.Event | None,
        closing: threading.Event,
        pace: Pace | None = None,
        *,
        idle_timeout_s: float,
        handshake_timeout_s: float,
    ) -> None:
        self._ticket, self._spans, self._bulk_key = ticket, Spans(spans), bulk_key
        self._scratch, self._pace = pool, pace
        self._cancelled, self._closing = cancelled or threading.Event(), closing
        self._idle_timeout_s, self._handshake_timeout_s = idle_timeout_s, handshake_timeout_s
        self._id = secrets.token_bytes(TICKET_ID_BYTES)
        self._queue = itertools.count()  # next() is atomic
        self._error: TransferError | None = None
        self._lock = threading.Lock()

    def run(self, streams: int, pool: ThreadPool) -> None:
        """Blocks until every stream has heard DONE. Raises the first TransferError of any stream. The first is this thread's, the
        others are the pool's; those that it has not begun when the first has ended are this thread's too, for the receiver waits
        for each. Neither returns nor raises while one still sends."""
        if self._spans.nbytes != self._ticket.nbytes:
            raise TransferError(f"{self._spans.nbytes} bytes for a ticket of {self._ticket.nbytes}")
        count = max(1, min(streams, STREAMS_MAX, chunk_count(self._ticket.nbytes)))
        for stream in together(pool, [partial(self._stream, number, count) for number in range(count)]):
            stream.result()
        if self._error is not None:
            raise TransferError(self._error.what, where=self._ticket.address, hint=self._error.hint)

    def _stopped(self) -> bool:
        return self._error is not None or self._cancelled.is_set() or self._closing.is_set()

    def _stream(self, number: int, count: int) -> None:
        try:
            sock = connect(self._ticket.address, self._stopped, self._handshake_timeout_s)
            with sock:
                wire = Wire(sock, self._stopped, idle_timeout_s=self._idle_timeout_s)
                hello = frames.Hello(number, count, self._ticket.mode, self._ticket.id, self._id)
                secret = self._greet(wire, hello)
                chunks = self._send(wire, secret)
                self._hear_done(wire, secret, chunks)
        except TransferError as error:
            self._fail(error)
        except Exception as error:  # MemoryError, say: the other streams must not go on without this one
            self._fail(TransferError(f"the stream broke: {str(error) or type(error).__name__}"))

    def _fail(self, error: TransferError) -> None:
        with self._lock:
            self._error = self._error or error

    def _greet(self, wire: Wire, hello: frames.Hello) -> frames.StreamSecret:
        """Prove the ticket, and have the receiver prove that it issued it."""
        wire.write([hello.pack()])
        nonce = frames.unpack_reply(wire.read(frames.REPLY_BYTES))
        secret = frames.StreamSecret(self._ticket, self._bulk_key, hello, nonce)
        wire.write([secret.proof("sender")])
        if not secret.check(frames.unpack_reply(wire.read(frames.REPLY_BYTES)), "receiver"):
            raise TransferError("the receiver cannot prove that it issued the ticket (another cluster key?)")
        return secret

    def _send(self, wire: Wire, secret: frames.StreamSecret) -> int:
        cipher = secret.cipher() if self._ticket.mode == "aead" else None
        total = chunk_count(self._ticket.nbytes)
        sent = 0
        for index in iter(self._queue.__next__, None):
            if index >= total:
                break
            failpoint("bulk.send")
            offset = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, self._ticket.nbytes - offset)
            self._send_chunk(wire, cipher, frames.pack_chunk(offset, length), self._spans.cut(offset, length))
            sent += 1
        self._send_chunk(wire, cipher, frames.pack_chunk(sent, 0, frames.LAST), [])
        return sent

    def _send_chunk(
        self, wire: Wire, cipher: frames.ChunkCipher | None, head: bytes, pieces: list[memoryview]
    ) -> None:
        if cipher is None:
            self._write(wire, [memoryview(head), *pieces])
        else:
            plain = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            with self._scratch.take(self._stopped) as scratch:
                self._write(wire, [memoryview(head), memoryview(cipher.seal(head, plain, scratch))])

    def _write(self, wire: Wire, views: list[memoryview]) -> None:
        """As one, or in the pieces that the pace allows. Raises TransferError when it is called off meanwhile."""
        left = sum(map(len, views))
        while self._pace is not None and left > 0:
            allowed = self._pace.take(left, self._stopped)
            if not allowed:
                raise TransferError("cancelled")
            now, views = _split(views, allowed)
            try:
                wire.write(now)
            finally:
                self._pace.sent(allowed)
            left -= allowed
        if left:
            wire.write(views)

    def _hear_done(self, wire: Wire, secret: frames.StreamSecret, chunks: int) -> None:
        proof = frames.unpack_reply(wire.read(frames.REPLY_BYTES))
        if not secret.check(proof, "done", struct.pack(">Q", chunks)):
            raise TransferError("the receiver's confirmation does not match what was sent")


def _split(views: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first ``nbytes`` of them, and the rest."""
    first: list[memoryview] = []
    for index, view in enumerate(views):
        if len(view) > nbytes:
            return [*first, view[:nbytes]] if nbytes else first, [view[nbytes:], *views[index + 1 :]]
        first.append(view)
        nbytes -= len(view)
    return first, []
