"""The steward's ends of all sessions: invite, bring what nodes say into order, acknowledge (messages.OpenSession)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptd.core.protocol.machine.context import MEMBER_AWAY_S, Context, audience
from ckptd.core.protocol.machine.uplink import REGISTER_S, Fact
from ckptd.core.protocol.messages import Ack, Inventory, OpenSession

KEEPALIVE_S = 2.0  # a daemon that came back and knows of no session is found out by its answer to this
BUFFERED_MAX = 256  # messages of one node that came before their turn


@dataclass
class Session:
    id: str
    created_at: float
    opened_at: float  # since when it should have answered
    unheard_since: float  # when it last was not live any more, however often its link has come back
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
        self.by_node: dict[str, Session] = {}
        self.leaving: set[str] = set()  # live or not: they said so in their session
        self.life: Callable[[], str] = str  # what is to be told of the job's life
        self.waits: Callable[[], str] = str  # why nothing is granted at the moment
        self._count = 0

    def start(self) -> None:
        assert self._ctx.record is not None, "a steward has an epoch"
        for node in audience(self._ctx.record):
            self.invite(node)

    def stop(self) -> None:
        self.by_node.clear()
        self.leaving.clear()

    def invite(self, node: str) -> None:
        """Open a new session with this node, at most one per REGISTER_S."""
        session, now = self.by_node.get(node), self._ctx.now
        if session is not None and now - session.created_at < REGISTER_S:
            return
        self._count += 1
        self.leaving.discard(node)  # it says so again
        me = self._ctx.me
        since, unheard = now, now
        if session is not None and not session.established:  # whoever never answers is not waited for
            since, unheard = session.opened_at, session.unheard_since
        name = f"{me.node}.{me.incarnation}.{now}.{self._count}"  # a machine made anew in the same process counts from zero, later
        self.by_node[node] = Session(name, now, since, unheard, now)
        self._reset(node)
        self._hello(node)

    def on_fact(self, sender: str, fact: Fact) -> None:
        session = self.by_node.get(sender)
        if session is None or session.id != fact.session or fact.serial - session.expected > BUFFERED_MAX:
            return
        if isinstance(fact, Inventory) and _another_took(session, fact):
            self.invite(sender)  # it counts from zero: all that it says would be old
            return
        session.owes = True
        if fact.serial < session.expected:
            return
        session.early[fact.serial] = fact
        while session.expected in session.early:
            ready = session.early.pop(session.expected)
            session.expected += 1
            if isinstance(ready, Inventory):
                session.established |= ready.turn == session.turn
                session.done, session.incarnation = ready.done, ready.incarnation
            self._deliver(sender, ready)
            if self.by_node.get(sender) is not session:  # what it said ended this session
                return

    def on_tick(self) -> None:
        life = self.life()
        why: str | None = None
        for node, session in self.by_node.items():
            quiet = session.established and self._ctx.now - session.heard_at >= KEEPALIVE_S
            if (session.owes or quiet) and self._ctx.is_up(node):
                session.owes, session.heard_at = False, self._ctx.now
                why = self.waits() if why is None else why
                self._ctx.send(node, Ack(self._ctx.number, session.id, session.expected - 1, life, why))
            if not session.established and self._ctx.is_up(node) and self._ctx.now - session.invited_at >= REGISTER_S:
                self._hello(node)

    def on_link(self, node: str) -> None:
        """It went, or came back: perhaps as another process, or as one that has obeyed another steward meanwhile. It counts again
        when it has answered in this session what it is asked from now on."""
        session = self.by_node.get(node)
        if session is not None:
            session.unheard_since = self._ctx.now if session.established else session.unheard_since
            session.turn, session.established, session.opened_at = session.turn + 1, False, self._ctx.now
            if self._ctx.is_up(node):
                self._hello(node)

    def session(self, node: str) -> str:
        session = self.by_node.get(node)
        return session.id if session is not None else ""

    def live(self, node: str) -> bool:
        session = self.by_node.get(node)
        return session is not None and session.established and self._ctx.is_up(node)

    def live_nodes(self) -> Iterator[str]:
        return filter(self.live, self.by_node)

    def stays(self, node: str) -> bool:
        """It is live and has not said that it is about to go."""
        return node not in self.leaving and self.live(node)

    def settled(self) -> bool:
        """Everyone told what it holds, or is gone, or has been silent for long: the books can be relied upon."""
        patience = self._ctx.policy.steward_timeout_s
        return all(
            session.established or not self._ctx.is_up(node) or self._ctx.now - session.opened_at > patience
            for node, session in self.by_node.items()
        )

    def waited_for(self) -> Iterator[str]:
        """Who is away or silent, and not for so long that it counts as gone."""
        patience = self._ctx.policy.steward_timeout_s + MEMBER_AWAY_S
        for node, session in self.by_node.items():
            short = self._ctx.now - session.unheard_since <= patience and not self._ctx.lost(node, MEMBER_AWAY_S)
            if short and not self.live(node):
                yield node

    def members_live(self) -> bool:
        record = self._ctx.record
        return record is not None and all(self.live(node.node) for node in record.nodes)

    def everyone_live(self) -> bool:
        """Members, and whoever else may hold something of an earlier epoch."""
        return all(map(self.live, self.by_node))

    def _hello(self, node: str) -> None:
        session = self.by_node[node]
        session.invited_at = self._ctx.now
        if not session.expected:  # Whose word it is only the inventory tells, which has not come: who lives says it again.
            session.early.clear()
        self._ctx.send(node, OpenSession(self._ctx.number, session.id, session.turn))


def _another_took(session: Session, said: Inventory) -> bool:
    """Another process took up the session; or another machine of the same one: it answers what we ask only now under a number
    that the first one has used."""
    anew = not session.established and said.turn == session.turn and said.serial < session.expected
    return anew or session.incarnation not in ("", said.incarnation)
