"""The job state machine of one node: every event goes to the part that owns it, every part adds instructions (design D5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.instructions import Instruction, Supersede
from ckptd.core.protocol.machine import view
from ckptd.core.protocol.machine.asks import Asks
from ckptd.core.protocol.machine.capture import Capture
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.encoding import Encoding
from ckptd.core.protocol.machine.holdings import Holdings
from ckptd.core.protocol.machine.joining import Joining
from ckptd.core.protocol.machine.leaving import Leaving
from ckptd.core.protocol.machine.levels import Levels
from ckptd.core.protocol.machine.lifetime import Lifetime
from ckptd.core.protocol.machine.opening import Opening
from ckptd.core.protocol.machine.ranks import CLEAN, DIED, FINISHED, Ranks
from ckptd.core.protocol.machine.replicate import Replication
from ckptd.core.protocol.machine.shortage import Shortages
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.machine.steward.steward import Steward
from ckptd.core.protocol.machine.uplink import Uplink
from ckptd.core.protocol.machine.writing import Writing
from ckptd.core.redundancy.policies import parse

SPOKE_S = 2.0  # without a word, a node whose link had been down and not been told to be up again is down
FREEZE_PATIENCE_S = (
    5.0  # beyond inventory_timeout_s: what an inventory named stays until the decision can be known
)

# What a steward hears by the thousand: it changes nothing of its own ranks and slots.
FOR_THE_BOOKS = frozenset({msg.RankState, msg.Sealed, msg.Missed, msg.Held})


class JobMachine:
    """``now`` must never go backwards within one process; nothing else is asked of it."""

    def __init__(self, job: str, node: NodeInfo, policy: Policy) -> None:
        self.ctx = ctx = Context(job, node, policy)
        ctx.nodes[node.node] = node
        self.ranks = Ranks()
        self.slots = Slots(ctx)
        self.joining = Joining(ctx)
        self.opening = Opening(ctx, self.joining, self.ranks, self.slots)
        self.uplink = Uplink(ctx, self.ranks, self.slots, self._session_opened)
        self.levels = Levels(ctx, self.slots, self.uplink.on_released)
        self.uplink.certified = self.levels.certified
        self.capture = Capture(ctx, self.ranks, self.slots, self.uplink)
        self.replication = Replication(ctx, self.slots)
        self.holdings = Holdings(ctx, self.slots, self.uplink, self.replication)
        self.encoding = Encoding(ctx, self.slots, self.levels, self.holdings)
        self.shortages = Shortages(ctx, self.uplink)
        self.leaving = Leaving(ctx, self.uplink)
        self.writing = Writing(ctx, self.slots)
        self.asks = Asks(ctx, self.uplink, self.levels, self.slots)
        self.steward = Steward(ctx, self.joining)
        self.lifetime = Lifetime(ctx, self.ranks, self.slots, self.levels, self.uplink, self.joining, self.opening,
                                 self.steward.holds)  # fmt: skip
        self._events = self._event_table()
        self._messages = self._message_table()

    def _event_table(self) -> dict[type, Callable[[Any], None]]:
        return {
            ev.RankJoined: self._rank_joined,
            ev.RankLeft: self._rank_left,
            ev.SlotsReady: lambda e: self.slots.add(e.rank, e.slots),
            ev.SlotsGone: lambda e: self.capture.on_slots_gone(self.slots.remove(e.slots)),
            ev.SlotsShort: self.capture.on_short,
            ev.RankProgress: self.capture.on_progress,
            ev.RankMissed: self._rank_missed,
            ev.SlotSealed: self._slot_sealed,
            ev.SlotDamaged: self.holdings.on_damaged,
            ev.HoldingFound: self._holding_found,
            ev.ReplicaArrived: self._replica_arrived,
            ev.ReplicaSent: self._replica_sent,
            ev.ParityMade: self._parity_made,
            ev.ParityFailed: self._parity_failed,
            ev.NodeUp: self._node_up,
            ev.NodeDown: self._node_down,
            ev.Received: self._received,
            ev.Computed: self.steward.on_computed,
            ev.EpochClaimed: self.steward.on_claimed,
            ev.DurableRead: self._durable_read,
            ev.FilesWritten: self.writing.on_written,
            ev.CommitDone: self.steward.on_committed,
            ev.RankFetched: self.opening.on_fetched,
            ev.RankLoaded: self.opening.on_loaded,
            ev.FlushAsked: self.asks.on_flush,
            ev.LevelAsked: self.asks.on_level,
            ev.DrainAsked: self.leaving.on_asked,
            ev.SpareAsked: self.lifetime.on_spare,
            ev.ForgetOrdered: self.lifetime.on_forget,
            ev.Restarted: self._restarted,
            ev.Reading: lambda e: self.slots.read(e.reader, e.snapshots),
            ev.Tick: self._tick,
        }

    def _message_table(self) -> dict[type, Callable[[str, Any], None]]:
        of_session = self.uplink.is_from_steward
        return {
            msg.JoinReport: self.steward.on_report,
            msg.ReportAgain: self.joining.on_again,
            msg.InventoryRequest: self._inventory_request,
            msg.Inventory: self._inventory,
            msg.EpochOpen: self._epoch_open,
            msg.JoinRefused: lambda s, m: self._join_refused(m),
            msg.Vote: lambda s, m: self.steward.restoring.on_vote(m),
            msg.RestoreGo: self.opening.on_go,
            msg.RestoreAbort: lambda s, m: self.opening.on_abort(m),
            msg.RestoreDone: lambda s, m: self._learn_done(m),
            msg.RankState: self.steward.on_fact,
            msg.Sealed: self.steward.on_fact,
            msg.Missed: self.steward.on_fact,
            msg.Held: self._held,
            msg.Shortage: self.steward.on_fact,
            msg.Leaving: self.steward.on_fact,
            msg.Departures: lambda s, m: self._departures(m) if of_session(s, m.session) else None,
            msg.Remainder: lambda s, m: self.leaving.on_remainder(m) if of_session(s, m.session) else None,
            msg.DegradationChanged: lambda s, m: self._in_force(m) if of_session(s, m.session) else None,
            msg.Grant: lambda s, m: self.capture.on_grant(m) if of_session(s, m.session) else None,
            msg.Void: lambda s, m: self._void(m) if of_session(s, m.session) else None,
            msg.Certificate: self._certificate,
            msg.Holders: lambda s, m: self.replication.on_holders(m) if of_session(s, m.session) else None,
            msg.ParityOrder: lambda s, m: self.encoding.on_order(m) if of_session(s, m.session) else None,
            msg.LayoutRequest: self.uplink.on_layout_request,
            msg.LayoutReply: lambda s, m: self.steward.on_layouts(m),
            msg.WriteOrder: self.writing.on_order,
            msg.Wrote: self.steward.on_wrote,
            msg.WriteCancel: lambda s, m: self.writing.on_cancel(m),
            msg.FlushAsk: self.steward.on_ask,
            msg.LevelAsk: self.steward.on_level_ask,
            msg.OpenSession: self._hello,
            msg.Ack: self._heard,
            msg.Stale: lambda s, m: self._stale(m),
        }

    # --- the contract -------------------------------------------------------------------------------------------
    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        """What to do about it, in this order. Never raises for what other nodes say; broken invariants assert."""
        stood_still = now - self.ctx.now > self.ctx.policy.steward_timeout_s / 2
        self.ctx.now = now
        self.ctx.out = []
        if stood_still:
            self.steward.stood_still()
        self._events[type(event)](event)
        if not isinstance(event, ev.Received) or type(event.message) not in FOR_THE_BOOKS:
            self.uplink.tell_ranks()
        return self.ctx.out

    def validate(self) -> None:
        """AssertionError when an invariant is broken."""
        view.validate(self)

    def view(self) -> dict[str, Any]:
        """For status and metrics: plain values."""
        return view.view(self)

    def admits_replica(self, snapshot: SnapshotId, rank: int) -> str:
        """May a peer send us this rank's slot? "" or the reason it may not."""
        return self.holdings.refusal(snapshot, rank)

    # --- life ---------------------------------------------------------------------------------------------------
    def _restarted(self, event: ev.Restarted) -> None:
        if event.known is not None and self.ctx.record is None:
            self.ctx.record, self.ctx.ran = event.known, event.ran
            self.ctx.learn_of(event.known)
        self.lifetime.on_restarted(event)

    def _tick(self, event: ev.Tick) -> None:
        self._look_for_silent()
        self.slots.on_tick()
        self.joining.on_tick()
        self.opening.on_tick()
        self.uplink.on_tick()
        self.replication.act()
        self.encoding.act()
        self.shortages.on_tick()
        self.leaving.on_tick()
        self.asks.on_tick()
        self.steward.on_tick()
        self.lifetime.on_tick()

    def _node_up(self, event: ev.NodeUp) -> None:
        self.ctx.down.pop(event.node, None)
        self.ctx.spoke_at.pop(event.node, None)
        self.replication.act()
        self.steward.on_link(event.node)

    def _look_for_silent(self) -> None:
        """It spoke while our own link to it was down, and was taken for up. The link says nothing when it goes again."""
        for node, spoke_at in list(self.ctx.spoke_at.items()):
            if self.ctx.now - spoke_at > SPOKE_S:
                del self.ctx.spoke_at[node]
                self._node_down(ev.NodeDown(node))

    def _node_down(self, event: ev.NodeDown) -> None:
        self.ctx.spoke_at.pop(event.node, None)
        self.ctx.down.setdefault(event.node, self.ctx.now)
        self.replication.on_down(event.node)
        self.steward.on_link(event.node)

    def _received(self, event: ev.Received) -> None:
        """An older epoch is told so; a newer one that we have not been let into is not ours to judge."""
        message, sender = event.message, event.sender
        epoch = getattr(message, "epoch", None)
        if sender in self.ctx.spoke_at:
            self.ctx.spoke_at[sender] = self.ctx.now
        if sender != self.ctx.me.node and sender in self.ctx.down:
            del self.ctx.down[sender]  # it speaks
            self.ctx.spoke_at[sender] = self.ctx.now
            self.steward.on_link(sender)
        if epoch is not None and epoch != self.ctx.number:
            self._other_epoch(sender, epoch)
        else:
            self._messages[type(message)](sender, message)

    def _other_epoch(self, sender: str, epoch: int) -> None:
        if self.ctx.record is not None and epoch < self.ctx.number:
            self.ctx.send(sender, msg.Stale(self.ctx.record))
        else:
            self.uplink.register(sender)

    def _stale(self, message: msg.Stale) -> None:
        """The job has moved on without us. What the operator had forgotten does not come back by it, and who has trained in a later
        epoch knows better: its record is lost here, and was never heard there."""
        if self.opening.is_forgotten(message.known):
            return
        if self.steward.restoring.opens(message.known):
            return
        self.steward.restoring.on_higher(message.known)
        if self.ctx.number < message.known.number and message.known.number >= self.slots.newest_own_epoch():
            self._enter(message.known)

    # --- local ranks --------------------------------------------------------------------------------------------
    def _rank_joined(self, event: ev.RankJoined) -> None:
        record = self.ctx.record
        self.uplink.grant_seen = max(self.uplink.grant_seen, event.grant)
        of_this_epoch = self.ctx.trained_in(event.attempt) and self.opening.open is None
        of_this_epoch = of_this_epoch and record is not None and event.ranks == record.ranks
        if of_this_epoch and (event.running or self.ctx.done) and event.rank in self.ctx.local_ranks():
            self._learn_done(msg.RestoreDone(self.ctx.number, self.ctx.number))
            self.capture.on_rejoined(event.rank)
            self.ranks.attach(event.rank)
            return
        if record is not None and self.joining.is_past(event.attempt):
            self.ctx.emit(Supersede(event.rank, record.number))
        self.joining.on_joined(event)
        self.opening.on_joined()

    def _rank_left(self, event: ev.RankLeft) -> None:
        rank = self.ranks.here.get(event.rank)
        if rank is not None:
            rank.left = FINISHED if event.finished else CLEAN if event.clean else DIED
            rank.asks = None
        self.opening.on_left(event.rank)
        self.joining.on_left(event.rank)
        self.capture.on_left(event.rank)

    def _rank_missed(self, event: ev.RankMissed) -> None:
        self.capture.on_missed(event)
        self.asks.on_missed(event)

    def _replica_sent(self, event: ev.ReplicaSent) -> None:
        if self.replication.on_sent(event):
            self.shortages.on_result(event.ok, event.reason, event.to)

    def _parity_made(self, event: ev.ParityMade) -> None:
        self.shortages.on_result(True, "", self.ctx.me.node)
        self.encoding.on_made(event)

    def _parity_failed(self, event: ev.ParityFailed) -> None:
        if not event.data:  # what a loss took is made again on any level
            self.shortages.on_result(False, event.reason, self.ctx.me.node)
        self.encoding.on_failed(event)

    def _in_force(self, message: msg.DegradationChanged) -> None:
        try:
            found = parse(message.redundancy)
        except ValueError:
            return  # of another version
        if found is not None:
            self.ctx.in_force = found
            self.replication.on_degradation(found.text)

    def _departures(self, message: msg.Departures) -> None:
        self.leaving.on_departures(message)
        self.replication.act()

    def _holding_found(self, event: ev.HoldingFound) -> None:
        self.holdings.on_found(event)
        self.lifetime.on_found(event)
        if self.ctx.record is not None and event.snapshot.epoch == self.ctx.number:
            self._learn_done(msg.RestoreDone(self.ctx.number, self.ctx.number))  # it could not have been captured otherwise

    def _replica_arrived(self, event: ev.ReplicaArrived) -> None:
        self.holdings.on_arrived(event)
        self.encoding.on_arrived(event)

    def _slot_sealed(self, event: ev.SlotSealed) -> None:
        slot = self.capture.on_sealed(event)
        if slot is not None:
            self.replication.on_held(slot)

    # --- epochs -------------------------------------------------------------------------------------------------
    def _inventory_request(self, sender: str, message: msg.InventoryRequest) -> None:
        self.ctx.learn((node for node in message.nodes if node.node not in self.ctx.nodes), -1)
        freeze = self.ctx.policy.inventory_timeout_s + FREEZE_PATIENCE_S
        self.slots.frozen_until = max(self.slots.frozen_until, self.ctx.now + freeze)
        self.slots.frozen_for = message.attempt
        *before, layouts = self.slots.leaves(message.tables)
        parts = len(before) + 1
        for part, some in enumerate(before, 1):
            self.ctx.send(sender, msg.Inventory(message.attempt, None, (), some, turn=message.turn, part=part, parts=parts))
        self.ctx.send(
            sender,
            msg.Inventory(message.attempt, self.ctx.record, self.slots.frozen_facts(), layouts, self.levels.certified(),
                          done=self.ctx.done, never=self.ctx.never, incarnation=self.ctx.me.incarnation, ran=self.ctx.ran,
                          turn=message.turn, buried=self.ctx.forgotten.epoch, forgotten=self.ctx.forgotten.ordered,
                          sealed=self.ctx.sealed, part=parts, parts=parts),
        )  # fmt: skip

    def _inventory(self, sender: str, message: msg.Inventory) -> None:
        """An answer for a gathering, a fact of a session, or of one that registers."""
        if message.attempt:
            self.steward.restoring.on_inventory(sender, message)
            return
        if message.forgotten:  # of one that has no machine for it, and that answers whatever is said of that epoch
            self.lifetime.on_tombstone(message.forgotten)
            return
        number = message.known.number if message.known is not None else 0
        if number > self.ctx.number and message.known is not None:
            self._stale(msg.Stale(message.known))
        elif message.session and number == self.ctx.number:
            self.steward.on_fact(sender, message)
        else:
            if number < self.ctx.number and self.ctx.record is not None:
                self.ctx.send(sender, msg.Stale(self.ctx.record))
            self.steward.on_register(sender)

    def _join_refused(self, message: msg.JoinRefused) -> None:
        self.joining.on_refused(message)
        self.opening.on_refused(message)

    def _durable_read(self, event: ev.DurableRead) -> None:
        if self.lifetime.on_tombstone(event.forgotten):
            return
        self.steward.on_durable(event)

    def _epoch_open(self, sender: str, message: msg.EpochOpen) -> None:
        if self.opening.is_forgotten(message.record):
            return  # its steward has not heard yet; a later decision takes a higher number
        if not self.opening.refuses(message.record) and message.record != self.ctx.record:
            self._leave(message.record.nonce)
        self.opening.on_open(sender, message)

    def _enter(self, record: EpochRecord) -> None:
        """A newer epoch that we heard of from the side."""
        self._leave(record.nonce)
        self.steward.restoring.overtaken(record)
        self.opening.enter(record)
        if self.joining.trains_in(record.nonce):
            # Our ranks were let into it. Whoever else was told so may have forgotten it, too, or have been away.
            self._learn_done(msg.RestoreDone(record.number, record.number))

    def _leave(self, nonce: str) -> None:
        """Everything of the epoch so far ends here."""
        if self.ctx.record is not None and self.ctx.record.nonce != nonce:
            self.joining.retire(self.ctx.record.nonce)
        self.capture.forget_grants("a newer epoch opened")
        self.replication.forget_flights()
        self.encoding.clear()
        self.leaving.clear()
        self.ctx.in_force = None
        self.writing.cancel_all()
        self.uplink.close()
        self.asks.clear()
        self.steward.leave_epoch()
        self.lifetime.new_epoch()

    def _learn_done(self, message: msg.RestoreDone) -> None:
        """Pins fall, and what lies beyond the fork goes at once."""
        waiting = self.joining.join
        if not self.opening.on_done(message):
            return
        record = self.ctx.record
        assert record is not None, "an epoch that is done is known"
        if waiting is not None and waiting.attempt == record.nonce:
            for rank in waiting.asks:
                self.ranks.here.setdefault(rank, self.ranks.attach(rank))
        self.holdings.drop_beyond_fork()
        if self.slots.frozen_for == record.nonce:
            self.slots.thaw()  # the decision that it was frozen for is carried out
        if self.uplink.session:
            self.uplink.tell_inventory()

    def _session_opened(self) -> None:
        self.capture.forget_grants("the steward began anew")

    def _hello(self, sender: str, message: msg.OpenSession) -> None:
        if self.opening.open is not None:
            self.joining.answer(self.opening.open.record.nonce, answered=False)
        self.steward.yields_to(sender)
        self.uplink.on_hello(sender, message)

    def _void(self, message: msg.Void) -> None:
        self.capture.on_void(message)
        if message.snapshot is not None:
            self.levels.on_void(message.snapshot)

    def _held(self, sender: str, message: msg.Held) -> None:
        if message.session:
            self.steward.on_fact(sender, message)
        else:
            self.replication.on_peer_lost(sender, message)

    def _heard(self, sender: str, message: msg.Ack) -> None:
        self.uplink.on_heard(sender, message)
        if self.uplink.is_from_steward(sender, message.session):
            self.lifetime.on_heard(message)

    def _certificate(self, sender: str, message: msg.Certificate) -> None:
        if self.uplink.is_from_steward(sender, message.session):
            self.levels.on_certificate(message)
            if message.releases:
                self.replication.places_are_free()
            self.replication.act()
            self.encoding.act()
