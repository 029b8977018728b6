"""Who may connect to the control port: ZAP (ZeroMQ RFC 27) with one allowed public key, the cluster's."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"


class ZapHandler:
    """libzmq asks here before a CURVE handshake completes, one context, one door. ``serve()`` when ``fd`` is readable."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: bytes, on_denied: Callable[[str], None]) -> None:
        self._allowed, self._on_denied = z85.decode(allowed), on_denied
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def serve(self) -> None:
        while True:
            try:
                request = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(request))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        # version, request id, domain, address, identity, mechanism, credentials...
        number, address = request[1], request[3].decode(errors="replace")
        if request[0] == VERSION and request[5] == b"CURVE" and request[6:] == [self._allowed]:
            return [VERSION, number, b"200", b"OK", b"daemon", b""]
        self._on_denied(address)
        return [VERSION, number, b"400", b"another cluster key", b"", b""]
