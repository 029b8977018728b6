"""One stream at the receiver, after its proof: chunks straight into the buffer (mode none) or through a bounded scratch."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

from cryptography.exceptions import InvalidTag

from ckptd.core.failpoint import failpoint
from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import Changed, TransferError
from ckptd.wire.landing import Landing
from ckptd.wire.scratch import TAG_BYTES, ScratchPool
from ckptd.wire.tcp_io import Wire, shut


class Stream:
    """``run()`` in a thread of its own; never raises: what goes wrong fails the landing."""

    def __init__(
        self,
        sock: socket.socket,
        landing: Landing,
        number: int,
        secret: frames.StreamSecret,
        idle_timeout_s: float,
        straggler_timeout_s: float,
        pool: ScratchPool,
        moved: Callable[[], None],
    ) -> None:
        self._sock, self._landing, self._number, self._secret = sock, landing, number, secret
        self._idle_timeout_s, self._straggler_timeout_s = idle_timeout_s, straggler_timeout_s
        self._chunks, self._scratch, self._moved = 0, pool, moved

    def interrupt(self) -> None:
        shut(self._sock)

    def run(self) -> None:
        ended = False
        try:
            stopped, idle_s = (lambda: self._landing.failed), self._idle_timeout_s
            wire = Wire(self._sock, stopped, idle_timeout_s=idle_s, moved=self._moved)
            wire.write([frames.pack_reply(frames.OK, self._secret.proof("receiver"))])
            self._receive(wire)
            self._landing.end(self._number)
            ended = True
        except Exception as error:  # MemoryError, say: a stream that ends and says nothing leaves its sender waiting
            self._landing.fail(_as_transfer_error(error))
        finally:
            self._landing.leave(self._number, time.monotonic() + self._straggler_timeout_s)
            try:
                self._say_done(ended)
            finally:
                self._sock.close()

    def _receive(self, wire: Wire) -> None:
        head = memoryview(bytearray(frames.CHUNK_HEAD_BYTES))
        cipher = self._secret.cipher() if self._landing.ticket.mode == "aead" else None
        while True:
            wire.read_into(head)
            offset, length, flags = frames.unpack_chunk(head)
            if flags == frames.LAST:
                return self._last(wire, cipher, head, offset, length)
            if flags:
                raise frames.Malformed(f"chunk with flags {flags:#x}")
            self._take(wire, cipher, head, self._landing.claim(offset, length))
            self._landing.landed(offset, length)
            self._chunks += 1

    def _take(
        self, wire: Wire, cipher: frames.ChunkCipher | None, head: memoryview, into: memoryview
    ) -> None:
        if cipher is None:
            wire.read_into(into)
        else:
            with self._scratch.take(lambda: self._landing.failed) as scratch:
                sealed = scratch[: len(into) + TAG_BYTES]
                wire.read_into(sealed)
                failpoint("bulk.open")
                cipher.open(bytes(head), sealed, into)

    def _last(
        self, wire: Wire, cipher: frames.ChunkCipher | None, head: memoryview, chunks: int, length: int
    ) -> None:
        if length or chunks != self._chunks:
            raise frames.Malformed(f"a stream of {self._chunks} chunks that ends with {chunks}")
        self._take(wire, cipher, head, memoryview(bytearray()))

    def _say_done(self, ended: bool) -> None:
        """After the landing knows, so that a sender that hears DONE finds it done."""
        proof = self._secret.proof("done", struct.pack(">Q", self._chunks))
        reply = frames.pack_reply(frames.OK, proof) if ended else frames.pack_reply(frames.FAILED)
        try:
            self._sock.send(reply, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return  # a sender that is gone need not hear it


def _as_transfer_error(error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    if isinstance(error, InvalidTag):
        return Changed("a chunk was changed on the wire", hint="the connection does not carry what was sent")
    return TransferError(f"the stream broke: {str(error) or type(error).__name__}")
