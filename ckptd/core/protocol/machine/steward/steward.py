"""The steward of one job: speaks where rank 0 lives, or where the succession says (design D9, D11).

It states facts that it can rebuild from holdings at any time: it keeps nothing that a successor would miss.
"""

from __future__ import annotations

from itertools import islice

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.events import CommitDone, Computed, DurableRead, EpochClaimed
from ckptd.core.protocol.instructions import ClaimEpoch, ReadDurable
from ckptd.core.protocol.machine.context import Context, audience, place_in_order, succession
from ckptd.core.protocol.machine.joining import Joining
from ckptd.core.protocol.machine.lifetime import told_life
from ckptd.core.protocol.machine.ranks import DIED
from ckptd.core.protocol.machine.steward.certify import Certify
from ckptd.core.protocol.machine.steward.degradation import DegradationLevel
from ckptd.core.protocol.machine.steward.draining import Draining
from ckptd.core.protocol.machine.steward.flush import Flushing
from ckptd.core.protocol.machine.steward.grants import Grants
from ckptd.core.protocol.machine.steward.parity import Parities
from ckptd.core.protocol.machine.steward.restore import Restoring
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.machine.steward.waiting import waits
from ckptd.core.protocol.machine.uplink import REGISTER_S, Fact
from ckptd.core.protocol.messages import (
    FlushAsk,
    Held,
    Inventory,
    JoinReport,
    LayoutReply,
    Leaving,
    LevelAsk,
    Missed,
    RankState,
    Sealed,
    Shortage,
    Wrote,
)

RANKS_AT_ONCE_MAX = 256  # of a job whose books are looked through after every message
NOWHERE = "no memory holds any of it: a daemon was lost before it had sealed what it was given, or memory was lost since"
READ_AGAIN_S = 5.0  # storage that did not answer a steward that began
PAUSE_PER_RANK_S = 5e-5  # between two looks through the books of a larger one


class Steward:
    def __init__(self, ctx: Context, joining: Joining) -> None:
        self._ctx = ctx
        self.active = False
        self.sessions = Sessions(ctx, self._deliver, self._reset)
        self.table = SnapshotTable(ctx, self.sessions.live)
        self.grants = Grants(ctx, self.sessions, self.table)
        self.parities = Parities(ctx, self.sessions, self.table)
        self.degradation = DegradationLevel(ctx, self.sessions, self.table)
        self.parities.is_short = self.degradation.is_short
        self.sessions.life = self.life
        self.sessions.waits = self._waits
        self.certify = Certify(ctx, self.sessions, self.table, self.grants, self.parities)
        self.draining = Draining(ctx, self.sessions, self.table, self.parities, self.certify)
        self.flushing = Flushing(ctx, self.sessions, self.table, self.grants, self.certify, self.parities)
        self.restoring = Restoring(ctx, joining, self._restored)
        self._done = False  # of the epoch it speaks for
        self._told_done_at = -1e9
        self._acted_at = -1e9
        self._read_at: float | None = None  # when storage is to be asked again

    def life(self) -> str:
        """Of the job, by what is known of each rank; "": not yet. Who lived on a node that is lost is gone with it."""
        record = self._ctx.record
        if record is None or not self.sessions.settled():
            return ""
        known, lost = self.grants.ranks, {node for node in set(record.ranks) if self._ctx.lost(node)}
        gone = {rank: state.left for rank, state in known.items()}
        return told_life(
            [gone.get(rank) or DIED if node in lost else gone.get(rank) for rank, node in enumerate(record.ranks)]
        )

    def holds(self) -> bool | None:
        """Is there something that only this office looks after? Before all were heard, nobody knows. None: it is another node's."""
        if not self.active:
            return None
        return bool(self.table.states or self.flushing.flush is not None or not self.sessions.settled())

    @property
    def record(self) -> EpochRecord:
        assert self._ctx.record is not None, "a steward has an epoch"
        return self._ctx.record

    def _waits(self) -> str:
        return waits(self) if self._done else ""

    # --- in and out of office -----------------------------------------------------------------------------------
    def on_tick(self) -> None:
        self.restoring.on_tick()
        if not self.active and self._should_speak():
            self.start()
        if self.active:
            self.sessions.on_tick()
            self._tell_done()
            if self._read_at is not None and self._ctx.now >= self._read_at:
                self._read()
            self.table.ask_layouts(self._ctx.number)
            self.grants.on_tick()
            if self.degradation.on_tick():
                self.certify.repeat_now()
            self.certify.on_tick()
            self.draining.on_tick()
            self.flushing.on_tick()
            self._act()

    def _should_speak(self) -> bool:
        """First in the succession among those that are not lost."""
        record, me = self._ctx.record, self._ctx.me.node
        if record is None or self.restoring.busy or place_in_order(record, me) >= len(record.nodes):
            return False
        return all(map(self._ctx.lost, islice(succession(record), place_in_order(record, me))))

    def start(self) -> None:
        self.active = True
        self._done = self._ctx.done
        self.table.clear()
        self.grants.clear()
        self.flushing.clear()
        self.degradation.clear()
        self.certify.begin()
        self.draining.clear()
        self.sessions.stop()
        self.sessions.start()
        self.table.storage_read = not self._ctx.policy.durable
        if self._ctx.policy.durable:  # of what no memory holds any more, only storage may know
            self._read()

    def _read(self) -> None:
        self._read_at = None
        self._ctx.emit(ReadDurable(""))

    def stop(self) -> None:
        self.active = False
        self.sessions.stop()
        self.flushing.stop()

    def stood_still(self) -> None:
        """This process was stopped so long that a successor may speak by now: what the books say is no longer true."""
        self.restoring.stood_still()
        if self.active:
            self.start()

    def yields_to(self, sender: str) -> None:
        """Another one said hello. An earlier one is obeyed; a later one hears from us again."""
        record = self._ctx.record
        if not self.active or record is None or sender == self._ctx.me.node:
            return
        if place_in_order(record, sender) < place_in_order(record, self._ctx.me.node):
            self.stop()
        else:
            self.sessions.invite(sender)

    def leave_epoch(self) -> None:
        """A newer epoch opened."""
        self.stop()
        self._done = False

    # --- an epoch begins ----------------------------------------------------------------------------------------
    def on_report(self, sender: str, message: JoinReport) -> None:
        """Also asked by a daemon that came back in the middle and does not know how far its epoch is."""
        record = self._ctx.record
        if self._done and record is not None and record.nonce == message.attempt:
            self.restoring.say_done(record, sender)
        elif not (message.trains and self._ctx.trained_in(message.attempt)):
            self.restoring.on_report(sender, message)  # else there is nothing to open: inventories say that it runs

    def _restored(self, record: EpochRecord) -> None:
        """The restore is complete. After one that was called off, the next tick finds who looks after what memory holds."""
        if self._ctx.record != record:
            return
        self._done = True
        self._say_done()
        if not self.active:
            self.start()
            self._done = True

    def _tell_done(self) -> None:
        if self._done and self._ctx.now - self._told_done_at >= REGISTER_S:
            self._say_done()

    def _say_done(self) -> None:
        """To everyone who has not confirmed it with an inventory that says so."""
        self._told_done_at = self._ctx.now
        record = self._ctx.record
        assert record is not None, "a steward has an epoch"
        for node in audience(record):
            session = self.sessions.by_node.get(node)
            if (session is None or not session.done) and self._ctx.is_up(node):
                self.restoring.say_done(record, node)

    # --- facts --------------------------------------------------------------------------------------------------
    def on_fact(self, sender: str, fact: Fact) -> None:
        if self.active:
            self.sessions.on_fact(sender, fact)
            self._act()

    def on_register(self, sender: str) -> None:
        """It knows of no session with us, whatever we thought."""
        if self.active:
            self.sessions.invite(sender)
            self._act()

    def _deliver(self, sender: str, fact: Fact) -> None:
        if isinstance(fact, Inventory):
            self._on_inventory(sender, fact)
        elif isinstance(fact, RankState):
            self.grants.on_state(fact)
        elif isinstance(fact, Sealed):
            self.grants.on_sealed(sender, fact)
        elif isinstance(fact, Missed):
            self.grants.on_missed(fact)
        elif isinstance(fact, Held):
            self._on_held(sender, fact)
        elif isinstance(fact, Shortage):
            self.degradation.on_shortage(sender, fact)
        elif isinstance(fact, Leaving):
            self.draining.on_leaving(sender, fact)

    def _on_inventory(self, sender: str, message: Inventory) -> None:
        durable = [snapshot for snapshot, _, is_durable in message.certified if is_durable]
        self.table.mark_durable(durable)
        self.certify.heard_durable(sender, durable)
        for snapshot, level, _ in message.certified:
            self.table.heard[snapshot] = max(level, self.table.heard.get(snapshot, -1))
        if message.serial == 0:  # a later one may have crossed a release on its way
            for fact in message.holdings:
                self.table.weigh_anew(fact.snapshot)
        self.table.tell_anew(sender, message.holdings)
        if message.done and not self._done and self._ctx.record is not None:
            self._done = True
            self.restoring.already_done(self._ctx.record)
            self._say_done()
        self.table.all_dirty()
        self.certify.tell_all(sender, [snapshot for snapshot, level, _ in message.certified if level >= 0])
        self.degradation.tell(sender)

    def _on_held(self, sender: str, message: Held) -> None:
        if message.lost:
            self.table.remove(sender, message.fact)
        else:
            self.table.add(sender, message.fact)

    def on_layouts(self, message: LayoutReply) -> None:
        self.table.learn_layouts(message.layouts)
        self._act()

    def on_wrote(self, sender: str, message: Wrote) -> None:
        self.flushing.on_wrote(sender, message)
        self._act()

    def on_durable(self, event: DurableRead) -> None:
        self.restoring.on_durable(event)
        self.table.mark_durable(event.commits)
        if event.attempt:
            return
        if event.ok and not self.table.storage_read:
            self.table.storage_read = True
            self.table.all_dirty()
        if not event.ok:
            self._read_at = self._ctx.now + READ_AGAIN_S
        elif self.active and (event.newest is None or event.newest.number < self.record.number):
            # It opened while storage did not answer. A start on other nodes asks only those that storage names (P1).
            self._ctx.emit(ClaimEpoch(self.record.nonce, self.record))

    def on_claimed(self, event: EpochClaimed) -> None:
        """Of the epoch that is being opened, or of ours, which opened while storage was away, and which may be away again."""
        record = self._ctx.record
        ours = record is not None and (event.attempt, event.number) == (record.nonce, record.number)
        if self.active and ours and event.reason:
            self._read_at = self._ctx.now + READ_AGAIN_S
        self.restoring.on_claimed(event)

    def on_computed(self, event: Computed) -> None:
        self._ctx.on_computed(event)
        self._act()

    def on_committed(self, event: CommitDone) -> None:
        self.flushing.on_committed(event)
        self._act()

    def on_ask(self, sender: str, message: FlushAsk) -> None:
        if self.active:
            self.flushing.on_ask(message)
            self.certify.repeat_soon()

    def on_level_ask(self, sender: str, message: LevelAsk) -> None:
        """Who holds nothing of it does not hear by itself that it is void, or was released, and may have missed its level."""
        if not self.active:
            return
        state = self.table.states.get(message.snapshot)
        if state is not None and state.void:
            self.certify.say_void(sender, message.snapshot, state.void)
        elif state is not None:
            self.certify.tell(sender, state)
        elif message.snapshot.at in self.table.durable:
            self.certify.say_fallen(sender, message.snapshot)
        elif self.table.was_released(message.snapshot):
            self.certify.say_fallen(sender, message.snapshot, (message.snapshot,))
        elif self._is_nowhere(message.snapshot):
            self.certify.say_void(sender, message.snapshot, NOWHERE)

    def _is_nowhere(self, snapshot: SnapshotId) -> bool:
        """Of one that nobody in session holds: no grant that stands brings it. Storage may have it, where a level was told."""
        unread = self.table.remembers(snapshot) and not self.table.storage_read
        return not unread and self.sessions.members_live() and not self.grants.stands(snapshot.grant)

    def on_link(self, node: str) -> None:
        """A node came or went: whatever it holds counts anew."""
        if self.active and node in self.sessions.by_node:
            self.sessions.on_link(node)
            self.table.all_dirty()
            self._act()

    def _reset(self, node: str) -> None:
        self.table.forget_node(node)
        self.grants.on_reset(node)
        self.degradation.forget(node)

    def _act(self) -> None:
        """After every message; where that takes long because there are many ranks, again after a pause or with the next tick."""
        record, now = self._ctx.record, self._ctx.now
        ranks = record.world if record is not None else 0
        pause = ranks * PAUSE_PER_RANK_S if ranks > RANKS_AT_ONCE_MAX else 0.0
        if self.active and now - self._acted_at >= pause:
            self._acted_at = now
            self.certify.review()
            self.draining.act()
            if self._done and self._ctx.done and (self.certify.knows_all() or not self.sessions.settled()):
                self.grants.act()
