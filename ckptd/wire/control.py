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
from ckptd.wire.address_book import NODES_MAX, AddressBook
from ckptd.wire.claims import Claims
from ckptd.wire.complaints import Complaints
from ckptd.wire.control_listener import ControlListener
from ckptd.wire.keys import ClusterKey
from ckptd.wire.peer_link import PeerLink, Verdict

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]

log = logging.getLogger("ckptd.wire")

DOWN_AFTER_S = 3.0  # silence after which a peer is down
TICK_MAX_S = 0.1  # who is silent is found out so often
LOOK_S = 1.0  # sockets are looked at so often even if their wake-up was lost
STALL_SHARE = 4  # a tick that is late by 1/4 of down_after_s: we stood still ourselves, forgive the peers' silence
PROBLEMS_REMEMBERED_MAX = 256  # texts that are not logged again
PROBLEM_AGAIN_S = 60.0  # until then
SOCKETS_MAX = 3 * NODES_MAX + 64  # libzmq's, of which a link has three; it would end at 1,023


class ControlLink:
    """One per daemon. ``bind``: "tcp://ip:port" ("*": any port). All callbacks run in the event loop.

    ``on_message(node, job, message)``: decoded and typed. ``on_peer(node, up)``: for nodes named by ``connect``; the first
    verdict comes within ``down_after_s``. ``on_problem(text, node)``: what an operator should know (wrong key, another version,
    two daemons with one id), each time that it happens; "": of no node in particular. The log has the same text at most once
    in PROBLEM_AGAIN_S.
    """

    def __init__(
        self,
        node: str,
        bind: str,
        secret: ClusterKey,
        on_message: Callable[[str, str, object], None],
        on_peer: Callable[[str, bool], None],
        *,
        incarnation: str = "",
        advertise: str | None = None,
        on_problem: Callable[[str, str], None] | None = None,
        down_after_s: float = DOWN_AFTER_S,
    ) -> None:
        self.node, self.secret, self.down_after_s = node, secret, down_after_s
        self.incarnation = incarnation or secrets.token_hex(8)
        self.claims = Claims(node, self.incarnation, down_after_s)
        self._bind, self._advertise = bind, advertise
        self._on_message, self._on_peer, self._on_problem = on_message, on_peer, on_problem
        self._links: dict[str, PeerLink] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._book = AddressBook(self._works, down_after_s)
        self._moves = Complaints()
        self._dial_due = False
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
        context.max_sockets = SOCKETS_MAX
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
            self._disconnect(node)
        self._moves.close()
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
    def connect(self, info: NodeInfo, job: str = "") -> None:
        """This job names that node, at this address: a link to it is kept until ``release``. Idempotent; our own id is ignored."""
        if info.node == self.node:
            return
        if (known := self._links.get(info.node)) is not None and known.info.control != info.control:
            said = f"node {info.node!r} is said to be at {info.control}, it was dialed at {known.info.control}"
            self._moves.say(f"job {job}", said)
        if not self._book.propose(info, job, self.now()):
            self._cannot_dial(info, f"{NODES_MAX} nodes are named already")
        elif not self._dial_due:
            self._dial_due = True
            self._loop.call_soon(self._dial)  # once for all nodes of a job

    def release(self, job: str) -> list[str]:
        """It names no node any more. Returns those that are left to nobody; on_peer is not called for them."""
        gone = self._book.withdraw(job)
        for node in gone:
            self._disconnect(node)
            self._verdicts.pop(node, None)
        return gone

    def _works(self, node: str) -> bool:
        link = self._links.get(node)
        return link is not None and link.greeted

    def _dial(self) -> None:
        self._dial_due = False
        if self._listener is None:
            return
        moves = self._book.turn(self.now())
        for node in moves.close:
            self._disconnect(node)
        for node in moves.gone:
            self._verdicts.pop(node, None)
            self._moves.say("links", f"node {node!r} was silent or never reached, and gave way to others: {NODES_MAX} are dialed")
        for info in moves.open:
            try:
                self._open(info)
            except zmq.ZMQError as error:
                self._cannot_dial(info, str(error))
        for node in moves.unreached:
            self.told(node, False)

    def _cannot_dial(self, info: NodeInfo, why: str) -> None:
        self.problem(f"cannot connect to node {info.node!r} at {info.control}: {why}", info.node)
        self.told(info.node, False)

    def _open(self, info: NodeInfo) -> None:
        assert self._context is not None, "after start()"
        self._disconnect(info.node)
        verdict = self._verdicts.setdefault(info.node, Verdict())
        link = self._links[info.node] = PeerLink(self, self._context, info, verdict)
        for fd in link.descriptors():
            self._loop.add_reader(fd, self._turn, link)
        self._turn(link)

    def _disconnect(self, node: str) -> None:
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
        verdict = self._verdicts.get(node)
        return verdict.up if verdict is not None else None

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
            self._open(link.info)
        self._dial()
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

    def down(self) -> list[str]:
        """Who was told to be so last: whoever asks begins only now, and is not told before it changes."""
        return [node for node, verdict in self._verdicts.items() if verdict.up is False]

    def problem(self, text: str, node: str = "") -> None:
        if self._on_problem is not None:
            self._on_problem(text, node)
        now = self.now()
        if node and not self._verdicts.get(node, Verdict()).incarnation:
            self._moves.say(f"node {node}", text)  # it never greeted: any local user can name such ones, as many as he likes
            return
        if now - self._problems.get(text, -PROBLEM_AGAIN_S) < PROBLEM_AGAIN_S:
            return
        while len(self._problems) >= PROBLEMS_REMEMBERED_MAX:
            del self._problems[next(iter(self._problems))]
        self._problems[text] = now
        log.warning("%s", text)

