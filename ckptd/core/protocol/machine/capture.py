"""Grants on this node: a slot for each local rank, the outcome to the steward, the way back when one is void (D9)."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.events import NO_SLOT, NOT_HERE, RankMissed, RankProgress, SlotSealed, SlotsShort
from ckptd.core.protocol.instructions import FreeSlot, GiveSlot, TakeBack, TellLevel, TellWritten
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.ranks import Rank, Ranks
from ckptd.core.protocol.machine.slots import FILLING, FREE, SEALED, Slot, Slots
from ckptd.core.protocol.machine.uplink import Uplink
from ckptd.core.protocol.messages import Grant, HoldingFact, Void
from ckptd.core.protocol.written import Written

GRANTS_KEPT_MAX = 256  # settled grants remembered, so that a repeated one is not taken twice
LATE = "late"
TEXT_CHARS_MAX = 400  # of a reason, told to other nodes


class Capture:
    def __init__(self, ctx: Context, ranks: Ranks, slots: Slots, uplink: Uplink) -> None:
        self._ctx, self._ranks, self._slots, self._uplink = ctx, ranks, slots, uplink
        self._answered: dict[int, set[int]] = {}  # grant -> ranks that took or missed it, in this session

    # --- the steward's words ------------------------------------------------------------------------------------
    def on_grant(self, message: Grant) -> None:
        self._uplink.grant_seen = max(self._uplink.grant_seen, message.grant)
        if self._answered and message.grant <= max(self._answered) - GRANTS_KEPT_MAX:
            return
        answered = self._answered.setdefault(message.grant, set())
        for rank in self._ctx.local_ranks():
            if rank not in answered:
                answered.add(rank)
                self._give(rank, message)
        while len(self._answered) > GRANTS_KEPT_MAX:
            del self._answered[min(self._answered)]

    def _give(self, rank: int, message: Grant) -> None:
        here = self._ranks.alive(rank)
        slot = self._slots.first_free(rank)
        if here is None:
            self._uplink.tell_missed(message.grant, rank, NOT_HERE)
        elif here.step >= message.from_step and here.asks is None:  # A rank that waits knows which steps it has let go.
            self._uplink.tell_missed(message.grant, rank, LATE)
        elif slot is None:
            self._uplink.tell_missed(message.grant, rank, NO_SLOT)
        else:
            slot.state, slot.epoch, slot.grant, slot.doomed = FILLING, message.epoch, message.grant, False
            self._ctx.emit(GiveSlot(rank, slot.id, message.grant, message.from_step))

    def on_void(self, message: Void) -> None:
        """A void grant takes back what is not sealed yet, also when it has not come yet; a void snapshot goes for good."""
        if message.snapshot is not None:
            self._drop_snapshot(message.snapshot, message.reason)
        if not message.grant:
            return
        answered = self._answered.setdefault(message.grant, set())
        for rank in self._ctx.local_ranks():
            if rank not in answered:
                answered.add(rank)
                self._uplink.tell_missed(message.grant, rank, "void")
        if message.written:
            self._ctx.emit(TellWritten(message.grant, message.written))
        for slot in self._slots.filling(grant=message.grant):
            self._doom(slot, message.reason)

    def _doom(self, slot: Slot, reason: str) -> None:
        if slot.doomed:
            return
        slot.doomed, slot.void = True, reason
        self._ctx.emit(TakeBack(slot.rank, slot.grant, reason))
        self._tell_rank(slot.rank)

    def _drop_snapshot(self, snapshot: SnapshotId, reason: str) -> None:
        if snapshot not in self._slots.void:
            self._slots.mark_void(snapshot, reason)
            self._ctx.emit(TellLevel(snapshot, -1, 0, False, reason))
        for slot in list(self._slots.sealed.get(snapshot, ())):
            assert slot.fact is not None, "a sealed slot has its fact"
            if not slot.released:
                self._uplink.tell_held(slot.fact, lost=True)
        self._slots.release(snapshot)
        for rank in self._ctx.local_ranks():
            self._tell_rank(rank)

    # --- the ranks' answers -------------------------------------------------------------------------------------
    def on_progress(self, event: RankProgress) -> None:
        rank = self._ranks.alive(event.rank)
        if rank is not None:
            rank.step = max(rank.step, event.step)
            rank.asks = event.step if event.asks else None
            self._uplink.tell_rank(rank)

    def on_short(self, event: SlotsShort) -> None:
        self._slots.short[event.rank] = event.reason[:TEXT_CHARS_MAX]
        self._tell_rank(event.rank)

    def on_missed(self, event: RankMissed) -> None:
        filling = self._slots.filling(event.rank, event.grant)
        if event.step is not None:  # without this word the rank would wait for a level for ever
            epoch = filling[0].epoch if filling else self._ctx.number
            self._ctx.emit(TellLevel(SnapshotId(epoch, event.step, event.grant), -1, 0, False, event.reason))
        for slot in filling:
            self._settle_missed(slot, event.reason, event.written)

    def on_sealed(self, event: SlotSealed) -> Slot | None:
        """The slot, when it holds a snapshot now; None when nobody wants it."""
        slot = self._slots.by_id.get(event.slot)
        if slot is None or slot.state == SEALED:
            return None
        if slot.state == FREE:  # captured under a grant from before this daemon's restart
            self._ctx.emit(FreeSlot(slot.id))
            return None
        snapshot = SnapshotId(slot.epoch, event.step, event.grant)  # the rank may be of an epoch that is over
        if slot.doomed or slot.grant != event.grant or snapshot in self._slots.void:
            # The rank believes that it was captured: without this word it would wait for a level for ever.
            why = self._slots.void.get(snapshot) or slot.void or "its grant was void"
            self._ctx.emit(TellLevel(snapshot, -1, 0, False, why))
            self._settle_missed(slot, "void")
            return None
        layout = event.layout
        fact = HoldingFact(snapshot, event.rank, 0, layout.layout_id, event.digests, event.keep)
        self._slots.hold(slot, fact, layout)
        rank = self._ranks.alive(event.rank)
        if rank is not None and rank.asks is not None and rank.asks <= event.step:
            rank.asks = None
        self._tell_rank(event.rank)
        self._uplink.tell_sealed(fact, layout, event.came_at)
        return slot

    def on_rejoined(self, rank: int) -> None:
        """Its connection broke while it and this daemon lived on: what it was given there it takes no more; where it was told so
        already, its answer may be lost."""
        for slot in self._slots.filling(rank):
            slot.doomed = False
            self._doom(slot, slot.void or "the connection broke")

    def on_left(self, rank: int) -> None:
        """What it was filling is free: its mappings are gone."""
        for slot in self._slots.filling(rank):
            self._settle_missed(slot, "the rank is gone")

    def on_slots_gone(self, gone: list[Slot]) -> None:
        """The steward waits for the rank's answer to a grant also when it is void by now."""
        for slot in gone:
            if slot.state == FILLING and slot.grant in self._answered:
                self._uplink.tell_missed(slot.grant, slot.rank, "its slot was retired")
            elif slot.fact is not None:
                self._uplink.tell_held(slot.fact, lost=True)

    def _settle_missed(self, slot: Slot, reason: str, written: Written | None = None) -> None:
        grant, rank, known = slot.grant, slot.rank, slot.grant in self._answered
        self._slots.free(slot)
        self._tell_rank(rank)
        if known:
            self._uplink.tell_missed(grant, rank, reason, written)

    def _tell_rank(self, rank: int) -> None:
        here: Rank | None = self._ranks.here.get(rank)
        if here is not None:
            self._uplink.tell_rank(here)

    # --- an end to what was granted -----------------------------------------------------------------------------
    def forget_grants(self, reason: str) -> None:
        """Another session or epoch: nobody waits for the grants of the old one."""
        self._answered.clear()
        for slot in self._slots.by_id.values():
            if slot.state == FILLING and not slot.doomed:
                slot.doomed, slot.void = True, reason
                self._ctx.emit(TakeBack(slot.rank, slot.grant, reason))
