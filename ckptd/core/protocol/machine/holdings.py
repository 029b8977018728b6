"""What arrives in this daemon's memory, is found there after a restart, or is lost (design D9, P6, P7, P10)."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.events import HoldingFound, ParityMade, ReplicaArrived, SlotDamaged
from ckptd.core.protocol.instructions import FreeSlot
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.replicate import VOID, Replication
from ckptd.core.protocol.machine.slots import SEALED, Slot, Slots
from ckptd.core.protocol.machine.uplink import Uplink
from ckptd.core.protocol.messages import Held, HoldingFact

STALE = "stale epoch"


class Holdings:
    def __init__(self, ctx: Context, slots: Slots, uplink: Uplink, replication: Replication) -> None:
        self._ctx, self._slots, self._uplink, self._replication = ctx, slots, uplink, replication

    def refusal(self, snapshot: SnapshotId, rank: int) -> str:
        """Why a replica of this is not wanted here now; "": it is. A peer keeps peer_sets generations of a rank, and takes in
        one older than what it has beside them: those may be waiting for just this one to be protected, and their places are
        free only then (P14). There are never more than the rank's own slots, and those that stay for readers alone."""
        if self._unwanted(snapshot):
            return VOID
        if self._beyond_fork(snapshot):
            return STALE
        others = {
            slot.fact.snapshot
            for slot in self._slots.holdings()
            if slot.fact is not None and not slot.own and slot.rank == rank and slot.fact.snapshot < snapshot
            if not self._slots.for_readers(slot)
        }
        return "full" if len(others) >= self._ctx.policy.peer_sets else ""

    def _unwanted(self, snapshot: SnapshotId) -> bool:
        """Void; or let go when memory was short here: another node may take it."""
        return snapshot in self._slots.void or snapshot in self._slots.spared

    def on_arrived(self, event: ReplicaArrived) -> None:
        known = [s for s in self._slots.sealed.get(event.snapshot, ()) if s.rank == event.rank and not s.released]
        unwanted = self._unwanted(event.snapshot) or self._beyond_fork(event.snapshot)
        if unwanted or any(slot.own or (slot.fact is not None and slot.fact.tier <= event.tier) for slot in known):
            self._ctx.emit(FreeSlot(event.slot))
            return
        layout_id = event.layout.layout_id
        fact = HoldingFact(event.snapshot, event.rank, event.tier, layout_id, event.digests, event.keep)
        self._slots.hold(Slot(event.slot, event.rank, own=False), fact, event.layout)
        self._uplink.tell_held(fact)
        for slot in known:  # the fuller one takes its place
            self._slots.retire(slot)

    def on_made(self, event: ParityMade) -> None:
        """A shard of a parity set is held here from now on."""
        unwanted = self._unwanted(event.snapshot) or self._beyond_fork(event.snapshot)
        if unwanted or self._slots.best(event.snapshot, event.layout.rank) is not None:
            self._ctx.emit(FreeSlot(event.slot))
            return
        rank, layout = event.layout.rank, event.layout
        fact = HoldingFact(event.snapshot, rank, 0, layout.layout_id, event.digests, event.keep, event.shard)
        self._slots.hold(Slot(event.slot, rank, own=False), fact, layout, event.layouts)
        self._uplink.tell_held(fact)

    def on_found(self, event: HoldingFound) -> None:
        fact = HoldingFact(
            event.snapshot, event.rank, event.tier, event.layout.layout_id, event.digests, event.keep, event.shard
        )
        if event.snapshot.epoch <= self._ctx.tombstone.ordered:
            self._ctx.emit(FreeSlot(event.slot))
            return
        slot = Slot(event.slot, event.rank, own=event.own)
        self._slots.hold(slot, fact, event.layout, event.layouts)
        self._uplink.tell_held(fact)  # a trainer brings its memory to a daemon that lost its own, and that the steward has heard
        if event.own:
            self._replication.on_held(slot, found=True)

    def on_damaged(self, event: SlotDamaged) -> None:
        """P10: the copy is not used again; whoever keeps the books, and its owner, hear that it is gone."""
        slot = self._slots.by_id.get(event.slot)
        if slot is None or slot.state != SEALED or slot.fact is None or slot.damaged:
            return
        fact = slot.fact
        self._slots.quarantine(slot)
        self._uplink.tell_held(fact, lost=True)
        record = self._ctx.record
        owned = fact.shard is None and not slot.own
        if record is not None and fact.snapshot.epoch == record.number and owned:
            self._ctx.send(record.ranks[fact.rank], Held(record.number, fact, lost=True))

    def drop_beyond_fork(self) -> None:
        """The restore is done: what is no ancestor of it can never be asked for again. A proven or declared fresh start
        keeps the older lineage until it has a certificate of its own."""
        for snapshot in list(self._slots.sealed):
            if self._beyond_fork(snapshot):
                self._slots.release(snapshot)

    def _beyond_fork(self, snapshot: SnapshotId) -> bool:
        record = self._ctx.record
        if snapshot.epoch <= self._ctx.tombstone.ordered:
            return True
        if record is None or not self._ctx.done or snapshot.epoch >= record.number or not record.ancestry:
            return False
        return not record.is_candidate(snapshot)
