"""A Transport without a network, for tests and the simulator: the same tickets and refusals, bytes moved by memcpy."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Sequence

from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import (
    CHUNK_BYTES,
    STREAMS_DEFAULT,
    TICKET_ID_BYTES,
    TICKET_TTL_S,
    Pace,
    Spans,
    Ticket,
    TransferError,
    Witness,
    chunk_count,
    wait_turn,
)
from ckptd.wire.landing import Landing, Landings

EXPIRE_EVERY_S = 0.05


class MemoryNetwork:
    """The transports that can reach each other."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self.numbers = itertools.count(1)


class MemoryTransport:
    """Any number of them on one MemoryNetwork. ``bulk_key`` as in TcpTransport."""

    def __init__(self, network: MemoryNetwork, *, bulk_key: bytes = b"") -> None:
        self._network, self._bulk_key = network, bulk_key
        self.address = f"127.0.0.1:{next(network.numbers)}"
        self._landings = Landings()
        self._closing = threading.Event()
        network.transports[self.address] = self
        threading.Thread(target=self._expire, name="memory-transport", daemon=True).start()

    def expect(
        self,
        buffer: memoryview,
        *,
        aad: bytes = b"",
        ttl_s: float = TICKET_TTL_S,
        witness: Witness | None = None,
    ) -> Landing:
        deadline = time.monotonic() + ttl_s
        return self._landings.expect(buffer, self.address, "none", aad, deadline, witness)

    def push(
        self,
        ticket: Ticket,
        spans: Sequence[memoryview],
        *,
        streams: int = STREAMS_DEFAULT,
        cancelled: threading.Event | None = None,
        pace: Pace | None = None,
    ) -> None:
        source = Spans(spans)
        if source.nbytes != ticket.nbytes:
            raise TransferError(f"{source.nbytes} bytes for a ticket of {ticket.nbytes}")
        if cancelled is not None and cancelled.is_set():
            raise TransferError("cancelled", where=ticket.address)
        receiver = self._network.transports.get(ticket.address)
        if receiver is None:
            raise TransferError("cannot connect: nobody is there", where=ticket.address)
        hello = frames.Hello(0, 1, ticket.mode, ticket.id, secrets.token_bytes(TICKET_ID_BYTES))
        landing = receiver._enter(ticket, hello, self._bulk_key)
        _copy(landing, source, cancelled or threading.Event(), pace)

    def _enter(self, ticket: Ticket, hello: frames.Hello, bulk_key: bytes) -> Landing:
        landing = self._landings.find(ticket.id)
        status = frames.UNKNOWN
        if landing is not None:
            nonce = secrets.token_bytes(frames.NONCE_BYTES)
            theirs = frames.StreamSecret(ticket, bulk_key, hello, nonce).proof("sender")
            proven = frames.StreamSecret(landing.ticket, self._bulk_key, hello, nonce).check(theirs, "sender")
            status = landing.admit(hello, lambda: None, time.monotonic()) if proven else frames.WRONG_KEY
        frames.unpack_reply(frames.pack_reply(status))
        assert landing is not None, "an unknown ticket raised above"
        return landing

    def _expire(self) -> None:
        while not self._closing.wait(EXPIRE_EVERY_S):
            self._landings.expire(time.monotonic())

    def close(self) -> None:
        self._network.transports.pop(self.address, None)
        self._closing.set()
        self._landings.close()


def _copy(landing: Landing, source: Spans, cancelled: threading.Event, pace: Pace | None) -> None:
    def stopped() -> bool:
        return cancelled.is_set() or landing.failed

    try:
        for index in range(chunk_count(source.nbytes)):
            offset = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, source.nbytes - offset)
            if stopped() or not wait_turn(pace, length, stopped):
                raise TransferError("cancelled", where=landing.ticket.address)
            into, at = landing.claim(offset, length), 0
            for piece in source.cut(offset, length):
                into[at : at + len(piece)] = piece
                at += len(piece)
            landing.landed(offset, length)
        landing.end(0)
    except TransferError as error:
        landing.fail(error)
        raise
    finally:
        landing.leave(0, time.monotonic())
