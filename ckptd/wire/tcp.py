"""Bulk bytes over plain TCP: one blocking thread per stream, straight between the spans and the buffer (design D4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ckptd.thread_pool import ThreadPool
from ckptd.wire.bulk import (
    CONNECTIONS_MAX,
    HANDSHAKE_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    STREAMS_DEFAULT,
    TICKET_TTL_S,
    Mode,
    Pace,
    Ticket,
    Witness,
)
from ckptd.wire.keys import ClusterKey
from ckptd.wire.landing import Landing, Landings
from ckptd.wire.scratch import ScratchPool
from ckptd.wire.tcp_io import is_loopback, join_address
from ckptd.wire.tcp_listener import BulkListener
from ckptd.wire.tcp_push import Push

HELPERS_MAX = 256  # threads that send, beside those that called push
HELPERS_READY = 4


class TcpTransport:
    """Listens from the first moment. ``advertise``: the IP that tickets name, when it is not the one bound.

    ``mode`` of the tickets issued here; None: plain on loopback, AES-256-GCM elsewhere. ``secret``: the cluster
    key. ``connections_max`` bounds the streams at work.
    """

    def __init__(
        self,
        bind: str,
        port: int = 0,
        *,
        secret: ClusterKey,
        mode: Mode | None = None,
        advertise: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._bulk_key = secret.bulk
        self._mode: Mode = mode or ("none" if is_loopback(bind) else "aead")
        self._idle_timeout_s, self._handshake_timeout_s = idle_timeout_s, handshake_timeout_s
        self._landings, self._pool = Landings(), ScratchPool()
        self._closing = threading.Event()
        self._helpers = ThreadPool(HELPERS_MAX, "bulk-push", ready=HELPERS_READY, daemon=True)
        self._listener = BulkListener(
            bind, port, self._landings, self._bulk_key,
            connections_max=connections_max, idle_timeout_s=idle_timeout_s, handshake_timeout_s=handshake_timeout_s,
        )  # fmt: skip
        self.address = join_address(advertise or bind, self._listener.port)

    @property
    def connections(self) -> int:
        """Streams that are being received right now, for metrics."""
        return self._listener.streams

    def on_bytes(self, call: Callable[[], None]) -> None:
        """``call``, from the streams' threads, whenever bytes of a transfer have come."""
        self._listener.on_bytes = call

    def expect(
        self,
        buffer: memoryview,
        *,
        aad: bytes = b"",
        ttl_s: float = TICKET_TTL_S,
        witness: Witness | None = None,
    ) -> Landing:
        deadline = time.monotonic() + ttl_s
        return self._landings.expect(buffer, self.address, self._mode, aad, deadline, witness)

    def push(
        self,
        ticket: Ticket,
        spans: Sequence[memoryview],
        *,
        streams: int = STREAMS_DEFAULT,
        cancelled: threading.Event | None = None,
        pace: Pace | None = None,
    ) -> None:
        push = Push(
            ticket, spans, self._bulk_key, self._pool, cancelled, self._closing, pace,
            idle_timeout_s=self._idle_timeout_s, handshake_timeout_s=self._handshake_timeout_s,
        )  # fmt: skip
        push.run(streams, self._helpers)

    def close(self) -> None:
        """Stop listening and fail what is under way, pushes too; returns when no thread writes into a buffer any more."""
        self._closing.set()
        self._landings.close()
        self._listener.close()
        self._helpers.shutdown(wait=False)  # each push waits for its own
