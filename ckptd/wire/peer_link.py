"""Our connection to one peer: a DEALER that greets, pings, and says whether the peer is up (design D3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from ckptd.core.ids import NodeInfo
from ckptd.wire import link_frames as lf
from ckptd.wire.claims import Claims
from ckptd.wire.keys import ClusterKey
from ckptd.wire.outbox import Outbox

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]
    Context = zmq.Context[Socket]

RECONNECT_MS, RECONNECT_MAX_MS = 100, 1000
CONNECT_TIMEOUT_MS = 2000
HANDSHAKE_MS = 2000  # from accept to the end of the CURVE handshake
CURVE_BYTES = 64  # what CURVE adds to a frame before libzmq compares it with ZMQ_MAXMSGSIZE
SEND_FRAMES_MAX = 64  # frames in zmq's own queue (ZMQ_SNDHWM); the rest waits in our outbox
RECEIVE_FRAMES_MAX = 1024
FRAMES_PER_TURN = 256  # then the event loop gets its turn
PINGS_PER_SILENCE = 6  # pings within the time after which a silent peer is down
HANDSHAKES_FAILED_MAX = 3  # in a row: then it is no accident (a peer that stands still fails them too)
RENEW_S = 2.0  # libzmq never tries again after a protocol error; we do, with a new socket

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _FAILED


class Host(Protocol):
    """What a link needs of the ControlLink that owns it."""

    node: str
    incarnation: str
    secret: ClusterKey
    claims: Claims
    down_after_s: float

    def now(self) -> float: ...
    def received(self, node: str, job: str, message: memoryview) -> None: ...
    def told(self, node: str, up: bool) -> None: ...
    def problem(self, text: str, node: str = "") -> None: ...


@dataclass
class Verdict:
    """What was last told about a node; it outlives a change of its address."""

    up: bool | None = None
    incarnation: str = ""


class PeerLink:
    """One peer at one address. Everything happens in the event loop's thread, in ``serve`` and ``tick``."""

    def __init__(self, host: Host, context: Context, info: NodeInfo, verdict: Verdict) -> None:
        self._host, self.info, self.verdict = host, info, verdict
        self.greeted = self.closed = False
        self._connected = False
        self._handshakes_failed = 0
        self._given_up: float | None = None
        self._heard = self._pinged = host.now()
        self._assembler = lf.Assembler()
        self.socket: Socket = context.socket(zmq.DEALER)
        tune(self.socket, host.down_after_s)
        self._secure(host.secret)
        self.monitor: Socket = self.socket.get_monitor_socket(_EVENTS)
        self.outbox = Outbox(lambda frame: self.socket.send(frame, zmq.DONTWAIT) and None)
        try:
            self.socket.connect(info.control)
        except zmq.ZMQError:
            self.close()  # what is left open keeps the context from ending, and sockets are counted
            raise

    def _secure(self, secret: ClusterKey) -> None:
        sock = self.socket
        sock.reconnect_ivl, sock.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        sock.connect_timeout = CONNECT_TIMEOUT_MS
        sock.immediate = True  # nothing queues for a peer that is not there
        sock.curve_serverkey = secret.curve_server.public
        sock.curve_publickey, sock.curve_secretkey = secret.curve_client.public, secret.curve_client.secret

    # --- in the event loop --------------------------------------------------------------------------------------
    def serve(self) -> bool:
        """Do what there is to do. True: come back soon, for sending may have eaten the wake-up of what came meanwhile."""
        self._watch()
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._take(frame)
        else:
            return True
        return self.outbox.flush() > 0

    def tick(self, now: float) -> bool:
        """Judge the peer's silence and ping it. True: something was sent."""
        silence_s = self._host.down_after_s
        if now - self._heard > silence_s:
            self._lose()
            self._tell(False)
        due = self._connected and now - self._pinged >= silence_s / PINGS_PER_SILENCE
        if due:
            self._pinged = now
            self._say(lf.PING_FRAME) if self.greeted else self._greet()
        return due

    def spent(self, now: float) -> bool:
        """This socket will not connect again: replace it."""
        return self._given_up is not None and now - self._given_up > RENEW_S

    def excuse(self, seconds: float) -> None:
        """We ourselves stood still for so long: the peer's silence does not count."""
        self._heard += seconds

    def descriptors(self) -> list[int]:
        return [descriptor(self.socket), descriptor(self.monitor)]

    def close(self) -> None:
        self.closed = True
        self._lose()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    # --- what libzmq tells --------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))["event"]
            except zmq.Again:
                return
            self._note(event)

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._handshakes_failed = 0
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._connected = False
            self._lose()  # not down yet: a broken connection may come back at once
        elif event == zmq.EVENT_CLOSED:
            self._tell(False)  # refused: nobody listens there
        else:
            self._handshake_failed(event)

    def _handshake_failed(self, event: int) -> None:
        self._handshakes_failed += 1
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._handshakes_failed >= HANDSHAKES_FAILED_MAX:
            self._problem(f"handshakes with node {self.info.node!r} fail: another cluster key, or a daemon that stands still?")
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._given_up = self._host.now()
        self._tell(False)

    def _greet(self) -> None:
        self._say(lf.pack(lf.HELLO, self._host.node, self._host.incarnation, self.info.node))

    def _say(self, frame: bytes) -> None:
        self.outbox.urgent(frame)
        self.outbox.flush()

    # --- what the peer says -------------------------------------------------------------------------------------
    def _take(self, frame: bytes) -> None:
        try:
            kind = frame[0] if frame else 0
            if kind == lf.PONG:
                self._alive()
            elif kind == lf.WELCOME:
                self._welcome(lf.unpack(frame, 2))
            elif kind == lf.REFUSED:
                self._refused(lf.unpack(frame, 2))
            elif kind == lf.MESSAGE and self._alive():
                self._message(frame)
        except lf.BadFrame as error:
            self._problem(f"node {self.info.node!r} sent {error.what}")

    def _alive(self) -> bool:
        """It has greeted, and still is who it was."""
        if not self.greeted:
            return False
        now = self._host.now()
        if not self._host.claims.heard(self.info.node, self.verdict.incarnation, now):
            self._lose()  # another daemon has its id now; greet again and find out
            return False
        self._heard = now
        return True

    def _welcome(self, fields: tuple[str, ...] | lf.Skew) -> None:
        if isinstance(fields, lf.Skew):
            self._problem(_skew(self.info.node, fields))
            return
        node, incarnation = fields
        now = self._host.now()
        wrong = f"it is {node!r}" if node != self.info.node else self._host.claims.refusal(node, incarnation, now)
        if wrong:
            self._problem(f"{self.info.control} is not node {self.info.node!r}: {wrong}")
            return
        if not self.greeted:
            self._host.claims.open(node, incarnation, now)
        self.greeted, self._heard = True, now
        if self.verdict.up and incarnation != self.verdict.incarnation:
            self._tell(False)  # it was restarted faster than we noticed; whoever relied on its memory must know
        self.verdict.incarnation = incarnation
        self._tell(True)

    def _refused(self, fields: tuple[str, ...] | lf.Skew) -> None:
        self._lose()
        if isinstance(fields, lf.Skew):
            self._problem(_skew(self.info.node, fields))
        elif fields[0] == lf.GREET_FIRST:
            self._greet()
        else:
            self._problem(f"node {self.info.node!r} refuses us: {fields[1]}")

    def _message(self, frame: bytes) -> None:
        whole = self._assembler.add(frame)
        if whole is not None:
            self._host.received(self.info.node, *whole)

    # --- verdicts -----------------------------------------------------------------------------------------------
    def _lose(self) -> None:
        if self.greeted:
            self._host.claims.close(self.info.node, self.verdict.incarnation)
        self.greeted = False
        self._assembler = lf.Assembler()
        self.outbox.clear()

    def _problem(self, text: str) -> None:
        self._host.problem(text, self.info.node)

    def _tell(self, up: bool) -> None:
        if self.verdict.up is not up:
            self.verdict.up = up
            self._host.told(self.info.node, up)


def descriptor(sock: Socket) -> int:
    """Readable when something may have happened to the socket."""
    return cast(int, sock.getsockopt(zmq.FD))


def tune(sock: Socket, silence_s: float) -> None:
    """Bounds and heartbeats, the same on both ends."""
    sock.linger = 0
    sock.maxmsgsize = lf.FRAME_BYTES_MAX + CURVE_BYTES
    sock.sndhwm, sock.rcvhwm = SEND_FRAMES_MAX, RECEIVE_FRAMES_MAX
    sock.handshake_ivl = HANDSHAKE_MS
    sock.heartbeat_ivl = max(1, int(silence_s * 1000 / 3))
    sock.heartbeat_timeout = int(silence_s * 1000)


def _skew(node: str, skew: lf.Skew) -> str:
    return f"node {node!r} speaks version {skew.version} of the control protocol, we speak {lf.PROTOCOL_VERSION}"
