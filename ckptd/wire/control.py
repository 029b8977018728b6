"""The control link between daemons: small messages, authenticated, never blocking (design D3).

Each daemon binds one ROUTER and opens one DEALER per peer that matters to it. CURVE encrypts and authenticates both ends
with keys from the cluster key; libzmq heartbeats end dead connections, our own pings say who is up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from ckptd.core.errors import CkptdError
from ckptd.core.ids import NodeInfo
from ckptd.wire import codec
from ckptd.wire import link_frames as lf
from ckptd.wire.claims import Claims
from ckptd.wire.control_listener import ControlListener
from ckptd.wire.keys import ClusterKey
from ckptd.wire.peer_link import PeerLink, Verdict
from ckptd.wire.tcp_io import require_key

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]

log = logging.getLogger("ckptd.wire")

DOWN_AFTER_S = 3.0  # silence after which a peer is down
TICK_MAX_S = 0.1  # who is silent is found out so often
LOOK_S = 1.0  # sockets are looked at so often even if their wake-up was lost
STALL_SHARE = 4  # a tick that is late by 1/4 of down_after_s: we stood still ourselves, forgive the peers' silence
PROBLEMS_REMEMBERED_MAX = 256  # texts that are not logged again
PROBLEM_AGAIN_S = 60.0  # until then


class ControlLink:
    """One per daemon. ``bind``: "tcp://ip:port" ("*": any port). All callbacks run in the event loop.

    ``on_message(node, job, message)``: decoded and typed. ``on_peer(node, up)``: for nodes named by ``connect``; the first
    verdict comes within ``down_after_s``. ``on_problem(text, node)``: what an operator should know (wrong key, another version,
    two daemons with one id), each time that it happens; "": of no node in particular. The log has the same text at most once
    in PROBLEM_AGAIN_S. Raises CkptdError without a key off loopback.
    """

    def __init__(
        self,
        node: str,
        bind: str,
        secret: ClusterKey | None,
        on_message: Callable[[str, str, object], None],
        on_peer: Callable[[str, bool], None],
        *,
        incarnation: str = "",
        advertise: str | None = None,
        on_problem: Callable[[str, str], None] | None = None,
        down_after_s: float = DOWN_AFTER_S,
    ) -> None:
        require_key(_host_of(bind), secret is not None)
        self.node, self.secret, self.down_after_s = node, secret, down_after_s
        self.incarnation = incarnation or secrets.token_hex(8)
        self.claims = Claims(node, self.incarnation, down_after_s)
        self._bind, self._advertise = bind, advertise
        self._on_message, self._on_peer, self._on_problem = on_message, on_peer, on_problem
        self._links: dict[str, PeerLink] = {}
        self._problems: dict[str, float] = {}
        self._last_letter: tuple[str, object, lf.Letter] | None = None
        self._context: Context | None = None
        self._listener: ControlListener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._more: set[object] = set()  # sockets that have a turn coming
        self._ticked = self._looked = 0.0

    # --- lifecycle ----------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Bind and begin to serve. Raises CkptdError when the address cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._context = context = zmq.Context()
        try:
            listener = self._listener = ControlListener(self, context, self._bind)
        except BaseException:
            context.destroy(0)
            raise
        for fd in listener.descriptors():
            self._loop.add_reader(fd, self._turn, listener)
        self._ticked = self.now()
        self._tick()

    async def stop(self) -> None:
        """Close everything; peers notice at once. Idempotent."""
        if self._context is None or self._listener is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        for node in list(self._links):
            self.disconnect(node)
        listener, self._listener = self._listener, None
        for fd in listener.descriptors():
            self._loop.remove_reader(fd)
        listener.close()
        self._context.destroy(0)

    @property
    def address(self) -> str:
        """"tcp://ip:port" as peers reach it."""
        assert self._listener is not None, "after start()"
        endpoint = self._listener.endpoint
        return f"tcp://{self._advertise}:{endpoint.rpartition(':')[2]}" if self._advertise else endpoint

    # --- what the daemon asks for -------------------------------------------------------------------------------
    def connect(self, info: NodeInfo) -> None:
        """Keep a link to this node, at its newest address. Idempotent; our own id is ignored."""
        known = self._links.get(info.node)
        if info.node == self.node or (known is not None and known.info.control == info.control):
            return
        try:
            require_key(_host_of(info.control), self.secret is not None)
            self._open(info, known.verdict if known else Verdict())
        except (CkptdError, zmq.ZMQError) as error:
            self.problem(f"cannot connect to node {info.node!r} at {info.control}: {error}", info.node)

    def _open(self, info: NodeInfo, verdict: Verdict) -> None:
        assert self._context is not None, "after start()"
        self.disconnect(info.node)
        link = self._links[info.node] = PeerLink(self, self._context, info, verdict)
        for fd in link.descriptors():
            self._loop.add_reader(fd, self._turn, link)
        self._turn(link)

    def disconnect(self, node: str) -> None:
        """The node matters no more. on_peer is not called for it."""
        link = self._links.pop(node, None)
        if link is not None:
            for fd in link.descriptors():
                self._loop.remove_reader(fd)
            link.close()

    def send(self, node: str, job: str, message: object) -> bool:
        """Hand a message over for sending; never blocks. False: the peer is not up, too much waits for it, or the message
        has no wire form (told as a problem). True is no promise that it arrives."""
        try:
            letter = self._letter(job, message)
        except CkptdError as error:
            self.problem(f"a message was not sent: {error}", node)
            return False
        link = self._links.get(node)
        if link is not None and link.greeted:
            sent = link.outbox.post(letter)
            link.outbox.flush()
            self._again(link)
            return sent
        listener = self._listener
        if listener is None or not listener.send(node, letter):
            return False
        self._again(listener)
        return True

    def up(self, node: str) -> bool | None:
        """The last verdict, None: none yet."""
        link = self._links.get(node)
        return link.verdict.up if link else None

    def _letter(self, job: str, message: object) -> lf.Letter:
        """The same message to many peers is encoded once."""
        last = self._last_letter
        if last is None or last[0] != job or last[1] is not message:
            last = self._last_letter = (job, message, lf.Letter(job, codec.encode(message)))
        return last[2]

    # --- in the event loop --------------------------------------------------------------------------------------
    def _turn(self, part: PeerLink | ControlListener) -> None:
        """zmq's descriptors are edge-triggered: read until there is nothing, and come back if there was too much."""
        self._more.discard(part)
        if not part.closed and part.serve():
            self._again(part)

    def _again(self, part: PeerLink | ControlListener) -> None:
        """Sending may have eaten the wake-up of something that came in."""
        if part not in self._more:
            self._more.add(part)
            self._loop.call_soon(self._turn, part)

    def _tick(self) -> None:
        now = self.now()
        late = now - self._ticked - self._interval
        self._ticked = now
        stalled = late > self.down_after_s / STALL_SHARE
        look = now - self._looked >= LOOK_S
        self._looked = now if look else self._looked
        for link in [link for link in self._links.values() if link.spent(now)]:
            self._open(link.info, link.verdict)
        parts: list[PeerLink | ControlListener] = [*self._links.values()]
        if self._listener is not None:
            parts.append(self._listener)
        for part in parts:
            if stalled:
                part.excuse(late)
            if look or stalled:
                self._turn(part)
            if part.tick(now):
                self._again(part)
        self._timer = self._loop.call_later(self._interval, self._tick)

    @property
    def _interval(self) -> float:
        return min(TICK_MAX_S, self.down_after_s / 10)

    # --- what the parts report (peer_link.Host) -----------------------------------------------------------------
    def now(self) -> float:
        return time.monotonic()

    def received(self, node: str, job: str, message: memoryview) -> None:
        try:
            decoded = codec.decode(message)
        except codec.DecodeError as error:
            self.problem(f"node {node!r} sent {error.what}", node)
            return
        try:
            self._on_message(node, job, decoded)
        except Exception as error:  # a fault of ours in handling one message must not stop the link for all
            log.exception("handling a %s from node %r failed", type(decoded).__name__, node)
            self.problem(f"handling a {type(decoded).__name__} from node {node!r} failed: {error!r}", node)

    def told(self, node: str, up: bool) -> None:
        self._on_peer(node, up)

    def problem(self, text: str, node: str = "") -> None:
        if self._on_problem is not None:
            self._on_problem(text, node)
        now = self.now()
        if now - self._problems.get(text, -PROBLEM_AGAIN_S) < PROBLEM_AGAIN_S:
            return
        while len(self._problems) >= PROBLEMS_REMEMBERED_MAX:
            del self._problems[next(iter(self._problems))]
        self._problems[text] = now
        log.warning("%s", text)


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]
