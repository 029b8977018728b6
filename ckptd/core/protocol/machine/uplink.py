"""The session with the steward: every fact of this node, in order, repeated until it is heard (messages.OpenSession).

A node has one session at a time. Whoever says hello last and stands first in the succession has it; what it does not obey
any more, it tells nobody. So two stewards do no harm, and what a steward knows about a node is true up to a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import RESEND_S, Context, place_in_order, succession
from ckptd.core.protocol.machine.ranks import Rank, Ranks
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.machine.waiting import NO_STEWARD, shown
from ckptd.core.protocol.messages import (
    Ack,
    Held,
    HoldingFact,
    Inventory,
    LayoutReply,
    LayoutRequest,
    Leaving,
    Missed,
    OpenSession,
    RankState,
    Sealed,
    Shortage,
)
from ckptd.core.protocol.written import Written
from ckptd.core.state_map.layout import Layout

OUTBOX_MAX = 8192  # messages nobody heard; beyond, the session is given up and begun anew
RESEND_MOST_S = 8.0  # a steward that is behind must not be kept behind by what it is told once more
RESENT_MAX = 64  # messages repeated at once
SESSIONS_LEFT_MAX = 256  # remembered, so that a late hello does not open one of them again
REGISTER_S = 1.0  # between attempts to find the steward
SILENT_LEAST_S = 5.0  # however short steward_timeout_s is; one that knows of our session says Ack every two seconds

Fact: TypeAlias = "RankState | Sealed | Missed | Held | Shortage | Leaving | Inventory"
Certified = tuple[tuple[SnapshotId, int, bool], ...]


class Uplink:
    """``opened`` is called when a session begins, before the first message: grants of an older one are nobody's business."""

    def __init__(self, ctx: Context, ranks: Ranks, slots: Slots, opened: Callable[[], None]) -> None:
        self._ctx, self._ranks, self._slots, self._opened = ctx, ranks, slots, opened
        self.steward = ""
        self.session = ""
        self.certified: Callable[[], Certified] = tuple
        self.grant_seen = 0  # the newest; ranks remember it for a daemon that was restarted
        self._serial = 0
        self._turn = 0  # of the steward's newest question
        self._outbox: deque[Fact] = deque()
        self._known_layouts: set[str] = set()
        self._told: dict[int, tuple[object, ...]] = {}  # rank -> the fields of its last RankState
        self._left: dict[str, None] = {}
        self._waits = ""  # the steward's word
        self._waiting_since = 0.0
        self._sent_at = 0.0
        self._resend_s = RESEND_S  # without a word of the steward, twice as long each time until it has heard all
        self._registered_at = -1e9
        self.heard_at = 0.0  # the steward's newest word in a session, which it may have begun

    # --- the session --------------------------------------------------------------------------------------------
    def on_hello(self, sender: str, hello: OpenSession) -> None:
        """Answered with an inventory, unless a steward earlier in the succession is up."""
        if hello.nonce == self.session and sender == self.steward:
            self._turn, self.heard_at = max(self._turn, hello.turn), self._ctx.now
            self.tell_inventory()  # it was not sure whether we are still the same
            return
        if not self._gives_way_to(sender):
            return
        if hello.nonce in self._left:  # we told another steward since: this one must begin anew with us
            self.register(sender)
            return
        self._leave()
        self._opened()
        self.steward, self.session, self._serial, self._turn = sender, hello.nonce, 0, hello.turn
        self.heard_at, self._waits = self._ctx.now, ""
        self._outbox.clear()
        self._known_layouts.clear()
        self._told.clear()
        self.tell_inventory()
        self.tell_ranks()

    def close(self) -> None:
        self._leave()
        self.steward, self.session = "", ""
        self._outbox.clear()

    def _leave(self) -> None:
        self._left[self.session] = None
        while len(self._left) > SESSIONS_LEFT_MAX:
            del self._left[next(iter(self._left))]

    def on_heard(self, sender: str, message: Ack) -> None:
        if not self.is_from_steward(sender, message.session):
            return
        self.heard_at, self._waits = self._ctx.now, message.waits
        before = len(self._outbox)
        while self._outbox and self._outbox[0].serial <= message.serial:
            self._outbox.popleft()
        if len(self._outbox) != before:
            self._waiting_since = self._ctx.now

    def on_tick(self) -> None:
        ctx = self._ctx
        if self._outbox and ctx.now - max(self._sent_at, self._waiting_since) >= self._resend_s:
            self._sent_at, self._resend_s = ctx.now, min(2 * self._resend_s, RESEND_MOST_S)
            for message in list(self._outbox)[:RESENT_MAX]:
                ctx.send(self.steward, message)
        if self.stalled() and ctx.now - self._registered_at >= REGISTER_S:
            self.register()

    def stalled(self) -> bool:
        """Nobody hears us although we have something to say, or we hear nobody."""
        if not self.session:
            return bool(self._ranks.here or self._slots.sealed)
        if len(self._outbox) > OUTBOX_MAX:
            self.close()
            return True
        return self._unheard()

    def _unheard(self) -> bool:
        """A steward that has forgotten the job, or lost its state directory, knows of no session, and its link need not have
        gone: who was stopped meanwhile, and has nothing to say, must not wait for its word for ever."""
        now, patience_s = self._ctx.now, self._ctx.policy.steward_timeout_s
        waits = bool(self._outbox) and now - self._waiting_since > patience_s / 2
        return waits or now - self.heard_at > max(patience_s, SILENT_LEAST_S)

    def waits(self) -> str:
        """Why no snapshot is granted at the moment, as far as this node knows; "": one is. Asked while an epoch runs (view.py)."""
        ctx = self._ctx
        if not self.session:
            return f"{NO_STEWARD}: none of {shown(self._candidates())} has answered yet"
        if not ctx.is_up(self.steward):
            return f"{NO_STEWARD}: {self.steward} is down; another node speaks after {ctx.policy.steward_timeout_s:g} s"
        if self._unheard():
            return f"{NO_STEWARD}: {self.steward} does not answer"
        return self._waits

    def register(self, at: str = "") -> None:
        """Ask for a session: ``at`` one node, else at all that may be the steward, up to ourselves."""
        self._registered_at = self._ctx.now
        for name in [at] if at else self._candidates():
            self._ctx.send(name, Inventory("", self._ctx.record, ()))

    def _candidates(self) -> tuple[str, ...]:
        """Who may be the steward: up to ourselves."""
        record, me = self._ctx.record, self._ctx.me.node
        names = succession(record) if record is not None else ()
        return names[: names.index(me) + 1] if me in names else names

    def is_from_steward(self, sender: str, session: str) -> bool:
        """Is this order to be obeyed? One of an earlier steward that we left makes us ask it for a new session."""
        if session == self.session and sender == self.steward:
            return True
        if self._gives_way_to(sender) and self._ctx.now - self._registered_at >= REGISTER_S:
            self.register(sender)
        return False

    def _gives_way_to(self, sender: str) -> bool:
        record = self._ctx.record
        assert record is not None, "orders of an unknown epoch are turned away before"
        if not self.session or sender == self.steward or not self._ctx.is_up(self.steward):
            return True
        return place_in_order(record, sender) < place_in_order(record, self.steward)

    # --- facts --------------------------------------------------------------------------------------------------
    def tell_inventory(self) -> None:
        ctx = self._ctx
        self._say(
            Inventory("", ctx.record, self._slots.facts(), {}, self.certified(), done=ctx.done,
                      incarnation=ctx.me.incarnation, turn=self._turn)
        )  # fmt: skip

    def tell_ranks(self) -> None:
        """Whatever changed since it was last told. This is asked after every event."""
        if self.session and self._ranks.here:
            capacities = self._slots.capacities()
            for rank in self._ranks.here.values():
                self._tell(rank, capacities.get(rank.rank, 0))

    def tell_rank(self, rank: Rank) -> None:
        if self.session:
            self._tell(rank, self._slots.capacities().get(rank.rank, 0))

    def _tell(self, rank: Rank, capacity: int) -> None:
        short = self._slots.short.get(rank.rank, "")
        state = self._ctx.number, rank.rank, rank.step, capacity, rank.asks, rank.left, short
        if (self._ctx.done or rank.left) and self._told.get(rank.rank) != state:
            self._told[rank.rank] = state
            self._say(RankState(*state, self.grant_seen))

    def tell_sealed(self, fact: HoldingFact, layout: Layout, came_at: int | None) -> None:
        layouts = {} if fact.layout_id in self._known_layouts else {fact.layout_id: layout.leaf}
        self._known_layouts.add(fact.layout_id)
        self._say(Sealed(self._ctx.number, fact, layout.plan_id, layouts, came_at))

    def tell_missed(self, grant: int, rank: int, reason: str, written: Written | None = None) -> None:
        self._say(Missed(self._ctx.number, grant, rank, reason, written or {}))

    def tell_held(self, fact: HoldingFact, *, lost: bool = False) -> None:
        self._say(Held(self._ctx.number, fact, lost))

    def on_released(self, snapshot: SnapshotId) -> None:
        """What the steward has not heard yet of it has gone, too. It would count that where somebody brings copies back (P2)."""
        for said in tuple(self._outbox):
            if isinstance(said, Held) and not said.lost and said.fact.snapshot == snapshot:
                self.tell_held(said.fact, lost=True)

    def tell_shortage(self, short: bool, reason: str) -> None:
        self._say(Shortage(self._ctx.number, short, reason))

    def tell_leaving(self, leaving: bool) -> None:
        self._say(Leaving(self._ctx.number, leaving))

    def on_layout_request(self, sender: str, message: LayoutRequest) -> None:
        found = self._slots.layouts().get(message.layout_id)
        if found is not None:
            data = found.encoded if message.whole else found.leaf
            self._ctx.send(sender, LayoutReply(self._ctx.number, {message.layout_id: data}))

    def _say(self, fact: Fact) -> None:
        if not self.session:
            return
        if not self._outbox:
            self._waiting_since = self._ctx.now
            self._resend_s = RESEND_S
        stamped = replace(fact, session=self.session, serial=self._serial)
        self._serial += 1
        self._outbox.append(stamped)
        self._ctx.send(self.steward, stamped)
