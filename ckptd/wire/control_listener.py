"""Connections of peers to us: a ROUTER that answers greetings and pings and takes their messages (design D3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from ckptd.core.errors import CkptdError
from ckptd.wire import link_frames as lf
from ckptd.wire.outbox import Outbox
from ckptd.wire.peer_link import FRAMES_PER_TURN, Host, descriptor, tune
from ckptd.wire.rate_limiter import RateLimiter
from ckptd.wire.zap import ZapHandler

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]
    Context = zmq.Context[Socket]

CONNECTIONS_MAX = 4096  # peers that have greeted
SILENCES_KEPT = 2  # a connection is forgotten after so many times the silence that means down
BACKLOG = 512  # connections the kernel holds for libzmq
ZAP_DOMAIN = b"ckptd"


@dataclass
class Connection:
    """A connection that has said a valid hello."""

    node: str
    incarnation: str
    fd: int
    heard: float
    outbox: Outbox
    assembler: lf.Assembler = field(default_factory=lf.Assembler)


class ControlListener:
    """``endpoint`` is what was bound. Everything happens in the event loop's thread, in ``serve`` and ``tick``."""

    def __init__(self, host: Host, context: Context, bind: str) -> None:
        self._host = host
        self._connections: dict[bytes, Connection] = {}  # by zmq's routing id, one per connection
        self._latest: dict[str, bytes] = {}  # node -> its newest connection
        self._waiting: set[bytes] = set()  # connections that zmq had no room for
        self._denied, self._denial = 0, ""
        self.closed = False
        self.zap = ZapHandler(context, host.secret.curve_client.public, self._on_denied)
        self.socket: Socket = context.socket(zmq.ROUTER)
        tune(self.socket, host.down_after_s)
        self._secure()
        self.endpoint = self._bind(bind)
        port = int(self.endpoint.rpartition(":")[2])
        self.rate_limiter = RateLimiter(self.socket, port, self._on_gone, self._on_denied)

    def _secure(self) -> None:
        self.socket.router_mandatory = True
        self.socket.backlog = BACKLOG
        self.socket.curve_server = True
        self.socket.curve_secretkey = self._host.secret.curve_server.secret
        self.socket.zap_domain = ZAP_DOMAIN

    def _bind(self, bind: str) -> str:
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.socket.close(0)
            hint = "is bind_address an address of this machine (`ip -br addr`)? is the port free (`ss -ltnp`)?"
            raise CkptdError(f"cannot listen for control: {error}", where=bind, hint=hint) from error
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # --- in the event loop --------------------------------------------------------------------------------------
    def serve(self) -> bool:
        """Do what there is to do. True: come back soon, for sending may have eaten the wake-up of what came meanwhile."""
        self.zap.serve()
        self.rate_limiter.serve()
        for _ in range(FRAMES_PER_TURN):
            try:
                parts = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            if len(parts) == 2:
                self._take(parts[0].bytes, parts[1])
        else:
            return True
        waiting, self._waiting = self._waiting, set()
        return sum(self._flush(identity) for identity in waiting) > 0

    def tick(self, now: float) -> bool:
        for identity, connection in list(self._connections.items()):
            if now - connection.heard > SILENCES_KEPT * self._host.down_after_s:
                self._forget(identity)
        return False

    def excuse(self, seconds: float) -> None:
        for connection in self._connections.values():
            connection.heard += seconds

    def send(self, node: str, letter: lf.Letter) -> bool:
        """To a peer that is connected to us, whoever opened the connection."""
        identity = self._latest.get(node)
        connection = self._connections.get(identity) if identity is not None else None
        if identity is None or connection is None or not connection.outbox.post(letter):
            return False
        self._flush(identity)
        return identity in self._connections

    def descriptors(self) -> list[int]:
        sockets = [self.socket, self.rate_limiter.monitor, self.zap.socket]
        return [descriptor(sock) for sock in sockets]

    def close(self) -> None:
        self.closed = True
        self.socket.disable_monitor()
        self.rate_limiter.monitor.close(0)
        self.socket.close(0)
        self.zap.socket.close(0)

    # --- what peers say -----------------------------------------------------------------------------------------
    def _take(self, identity: bytes, frame: zmq.Frame) -> None:
        data = frame.bytes
        kind = data[0] if data else 0
        connection = self._connections.get(identity)
        try:
            if kind == lf.HELLO:
                self._greeted(identity, data, _descriptor(frame), _address(frame))
            elif connection is None or not self._alive(connection):
                self._forget(identity)
                self._reply(identity, lf.pack(lf.REFUSED, lf.GREET_FIRST, "say hello first"))
            elif kind == lf.PING:
                self._reply(identity, lf.PONG_FRAME)
            elif kind == lf.MESSAGE:
                whole = connection.assembler.add(data)
                if whole is not None:
                    self._host.received(connection.node, *whole)
            else:
                raise lf.BadFrame(f"a frame of unknown kind {kind}")
        except lf.BadFrame as error:
            who = repr(connection.node) if connection else "(not greeted)"
            self._host.problem(f"node {who} sent {error.what}", connection.node if connection else "")

    def _alive(self, connection: Connection) -> bool:
        connection.heard = self._host.now()
        return self._host.claims.heard(connection.node, connection.incarnation, connection.heard)

    def _greeted(self, identity: bytes, data: bytes, fd: int, address: str) -> None:
        self.rate_limiter.serve()  # what ended before this hello must be known before it is judged
        self.rate_limiter.known(fd)
        fields = lf.unpack(data, 3)
        if isinstance(fields, lf.Skew):
            text = f"protocol version {fields.version}, this daemon speaks {lf.PROTOCOL_VERSION}"
            self._host.problem(f"a peer at {address} was refused: {text}")
            self._reply(identity, lf.pack(lf.REFUSED, lf.VERSION_CODE, text))
            return
        node, incarnation, meant = fields
        refused = self._refusal(node, incarnation, meant, address)
        if refused is None:
            self._admit(identity, node, incarnation, fd)
        else:
            self._reply(identity, lf.pack(lf.REFUSED, *refused))

    def _refusal(self, node: str, incarnation: str, meant: str, address: str) -> tuple[str, str] | None:
        """(code, text), None: welcome."""
        if meant != self._host.node:
            return lf.MISDIRECTED, f"this is node {self._host.node!r}, not {meant!r}"
        text = self._host.claims.refusal(node, incarnation, self._host.now())
        if not text and len(self._connections) >= CONNECTIONS_MAX:
            text = f"{CONNECTIONS_MAX} peers are connected"
        if not text:
            return None
        self._host.problem(f"a peer at {address} was refused: {text}")
        return lf.DUPLICATE, text

    def _admit(self, identity: bytes, node: str, incarnation: str, fd: int) -> None:
        self._forget(identity)
        now = self._host.now()
        self._host.claims.open(node, incarnation, now)
        outbox = Outbox(lambda frame: self._send(identity, frame))
        self._connections[identity] = Connection(node, incarnation, fd, now, outbox)
        self._latest[node] = identity
        self._reply(identity, lf.pack(lf.WELCOME, self._host.node, self._host.incarnation))

    # --- answers ------------------------------------------------------------------------------------------------
    def _send(self, identity: bytes, frame: bytes) -> None:
        self.socket.send_multipart([identity, frame], zmq.DONTWAIT)

    def _reply(self, identity: bytes, frame: bytes) -> None:
        """Ahead of letters. A peer that is gone, or does not read, gets none: it asks again."""
        connection = self._connections.get(identity)
        try:
            if connection is None:
                self._send(identity, frame)
            else:
                connection.outbox.urgent(frame)
                connection.outbox.flush()
        except zmq.Again:
            return
        except zmq.ZMQError:
            self._forget(identity)

    def _flush(self, identity: bytes) -> int:
        connection = self._connections.get(identity)
        if connection is None:
            return 0
        try:
            sent = connection.outbox.flush()
        except zmq.ZMQError:
            self._forget(identity)
            return 0
        if connection.outbox.nbytes:
            self._waiting.add(identity)
        return sent

    # --- who is gone --------------------------------------------------------------------------------------------
    def _on_gone(self, fd: int) -> None:
        for identity, connection in list(self._connections.items()):
            if connection.fd == fd:
                self._forget(identity)

    def _on_denied(self, what: str) -> None:
        self._denied += 1
        if self._denied & (self._denied - 1) == 0:  # 1, 2, 4, 8...: a flood must not flood the log, which says each text seldom
            self._denial = f"{self._denied} connections were refused, the last: {what} (another key, or this daemon stood still?)"
        self._host.problem(self._denial)

    def _forget(self, identity: bytes) -> None:
        connection = self._connections.pop(identity, None)
        if connection is None:
            return
        self._host.claims.close(connection.node, connection.incarnation)
        if self._latest.get(connection.node) == identity:
            del self._latest[connection.node]


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection that a frame came by; libzmq's own name for it."""
    return int(frame.get(zmq.SRCFD))


def _address(frame: zmq.Frame) -> str:
    """Whence it came, without a port, which is another one each time."""
    return str(frame.get("Peer-Address"))
