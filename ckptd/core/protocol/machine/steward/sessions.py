"""The steward's ends of all sessions: invite, bring what nodes say into order, acknowledge (messages.StewardHello)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptd.core.protocol.machine.context import Context, audience
from ckptd.core.protocol.machine.uplink import KNOCK_S, Fact
from ckptd.core.protocol.messages import Heard, Inventory, StewardHello

KEEPALIVE_S = 2.0  # a daemon that came back and knows of no session is found out by its answer to this
BUFFERED_MAX = 256  # messages of one node that came before their turn


@dataclass
class Seat:
    session: str
    created_at: float
    opened_at: float  # since when it should have answered
    invited_at: float
    expected: int = 0
    early: dict[int, Fact] = field(default_factory=dict)
    turn: int = 0  # of our questions: another one whenever the link went or came back
    established: bool = False  # the inventory that answers this turn is in the books
    done: bool = False
    owes: bool = False  # an acknowledgement
    heard_at: float = 0.0  # when the last one was sent
    incarnation: str = ""  # of the daemon that took it


class Sessions:
    """``deliver`` gets each message once, in order; ``reset`` says that a node's part of the books begins anew."""

    def __init__(self, ctx: Context, deliver: Callable[[str, Fact], None], reset: Callable[[str], None]) -> None:
        self._ctx, self._deliver, self._reset = ctx, deliver, reset
        self.seats: dict[str, Seat] = {}
        self.leaving: set[str] = set()  # live or not: they said so in their session
        self.life: Callable[[], str] = str  # what is to be told of the job's life
        self.waits: Callable[[], str] = str  # why nothing is granted at the moment
        self._count = 0

    def start(self) -> None:
        assert self._ctx.record is not None, "a steward has an epoch"
        for node in audience(self._ctx.record):
            self.invite(node)

    def stop(self) -> None:
        self.seats.clear()
        self.leaving.clear()

    def invite(self, node: str) -> None:
        """Open a new session with this node, at most one per KNOCK_S."""
        seat, now = self.seats.get(node), self._ctx.now
        if seat is not None and now - seat.created_at < KNOCK_S:
            return
        self._count += 1
        self.leaving.discard(node)  # it says so again
        me = self._ctx.me
        self.seats[node] = Seat(f"{me.node}.{me.incarnation}.{self._count}", now, now, now)
        self._reset(node)
        self._hello(node)

    def on_fact(self, sender: str, fact: Fact) -> None:
        seat = self.seats.get(sender)
        if seat is None or seat.session != fact.session or fact.serial - seat.expected > BUFFERED_MAX:
            return
        if isinstance(fact, Inventory) and seat.incarnation not in ("", fact.incarnation):
            self.invite(sender)  # another process took up the session, and counts from zero: all that it says would be old
            return
        seat.owes = True
        if fact.serial < seat.expected:
            return
        seat.early[fact.serial] = fact
        while seat.expected in seat.early:
            ready = seat.early.pop(seat.expected)
            seat.expected += 1
            if isinstance(ready, Inventory):
                seat.established |= ready.turn == seat.turn
                seat.done, seat.incarnation = ready.done, ready.incarnation
            self._deliver(sender, ready)
            if self.seats.get(sender) is not seat:  # what it said ended this session
                return

    def on_tick(self) -> None:
        life = self.life()
        why: str | None = None
        for node, seat in self.seats.items():
            quiet = seat.established and self._ctx.now - seat.heard_at >= KEEPALIVE_S
            if (seat.owes or quiet) and self._ctx.is_up(node):
                seat.owes, seat.heard_at = False, self._ctx.now
                why = self.waits() if why is None else why
                self._ctx.send(node, Heard(self._ctx.number, seat.session, seat.expected - 1, life, why))
            if not seat.established and self._ctx.is_up(node) and self._ctx.now - seat.invited_at >= KNOCK_S:
                self._hello(node)

    def on_link(self, node: str) -> None:
        """It went, or came back: perhaps as another process, or as one that has obeyed another steward meanwhile. It counts again
        when it has answered in this session what it is asked from now on."""
        seat = self.seats.get(node)
        if seat is not None:
            seat.turn, seat.established, seat.opened_at = seat.turn + 1, False, self._ctx.now
            if self._ctx.is_up(node):
                self._hello(node)

    def session(self, node: str) -> str:
        seat = self.seats.get(node)
        return seat.session if seat is not None else ""

    def live(self, node: str) -> bool:
        seat = self.seats.get(node)
        return seat is not None and seat.established and self._ctx.is_up(node)

    def live_nodes(self) -> Iterator[str]:
        return filter(self.live, self.seats)

    def stays(self, node: str) -> bool:
        """It is live and has not said that it is about to go."""
        return node not in self.leaving and self.live(node)

    def settled(self) -> bool:
        """Everyone told what it holds, or is gone, or has been silent for long: the books can be relied upon."""
        patience = self._ctx.policy.steward_timeout_s
        return all(
            seat.established or not self._ctx.is_up(node) or self._ctx.now - seat.opened_at > patience
            for node, seat in self.seats.items()
        )

    def members_live(self) -> bool:
        record = self._ctx.record
        return record is not None and all(self.live(node.node) for node in record.nodes)

    def everyone_live(self) -> bool:
        """Members, and whoever else may hold something of an earlier epoch."""
        return all(map(self.live, self.seats))

    def _hello(self, node: str) -> None:
        seat = self.seats[node]
        seat.invited_at = self._ctx.now
        if not seat.expected:  # Whose word it is only the inventory tells, which has not come: who lives says it again.
            seat.early.clear()
        self._ctx.send(node, StewardHello(self._ctx.number, seat.session, seat.turn))
