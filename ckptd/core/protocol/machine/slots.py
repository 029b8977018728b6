"""The slots this daemon holds for one job: own ones of local ranks and replicas for others (design D1, D9).

FREE -> FILLING (given to a rank under a grant) -> SEALED -> FREE. A FILLING slot whose grant died is *doomed*: the rank
may be in the middle of its copy, so the slot is FREE only when the rank has answered. What is pinned (by a restore, a
write) stays until the pin falls, even when its release came meanwhile; so does what is read by somebody who is no rank, unless
its rank would have less than two slots to go on with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.instructions import FreeSlot, PersistSealed
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.messages import HoldingFact
from ckptd.core.redundancy.parity_sets import ParityShard
from ckptd.core.state_map.layout import Layout

FREE, FILLING, SEALED = "free", "filling", "sealed"
TO_GO_ON_WITH = 2  # own slots of a rank: one to capture into, while the other is protected
LEAVES_BYTES = 1 << 19  # of layouts in one part of an answer, where their tables are many: half of the largest message (P16)
VOIDS_KEPT_MAX = 512  # snapshots remembered as void, so that a copy under way is dropped when it arrives


@dataclass
class Slot:
    id: int
    rank: int
    own: bool
    state: str = FREE
    epoch: int = 0  # of the grant that it was given under last
    grant: int = 0  # of a FILLING slot
    doomed: bool = False
    void: str = ""  # why the grant of a doomed one is void
    fact: HoldingFact | None = None
    layout: Layout | None = None
    layouts: tuple[Layout, ...] = ()  # of a parity set's members, where it holds their parity
    released: bool = False  # goes as soon as no pin holds it
    damaged: bool = False  # not used any more

    def concerns(self, snapshot: SnapshotId) -> bool:
        """It holds a part of this, or is being filled with one."""
        if self.state == FILLING:
            return (self.epoch, self.grant) == (snapshot.epoch, snapshot.grant)
        return self.fact is not None and self.fact.snapshot == snapshot


class Slots:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.by_id: dict[int, Slot] = {}
        self.sealed: dict[SnapshotId, list[Slot]] = {}
        self.void: dict[SnapshotId, str] = {}
        self.spared: dict[SnapshotId, None] = {}  # given away for others' need of memory: not taken in again
        self._sealed_in, self._sealed_by = 0, set[int]()  # an epoch, and the ranks here that have sealed something in it
        self.short: dict[int, str] = {}  # rank -> why it has fewer own slots than it should
        self.frozen_for = ""  # the attempt that asked
        self.frozen_until = 0.0  # an inventory was answered: what it named stays for a while
        self._pins: dict[str, frozenset[SnapshotId]] = {}
        self._read: dict[str, frozenset[SnapshotId]] = {}

    # --- own slots ----------------------------------------------------------------------------------------------
    def add(self, rank: int, ids: Iterable[int]) -> None:
        for slot_id in ids:
            if slot_id not in self.by_id:
                self.by_id[slot_id] = Slot(slot_id, rank, own=True)

    def remove(self, ids: Iterable[int]) -> list[Slot]:
        """The shell retired them. Returns those that were not FREE: their grant or holding is gone."""
        gone = [self.by_id.pop(slot_id) for slot_id in ids if slot_id in self.by_id]
        for slot in gone:
            self._forget(slot)
        return [slot for slot in gone if slot.state != FREE]

    def first_free(self, rank: int) -> Slot | None:
        return next((s for s in self.by_id.values() if s.state == FREE and s.own and s.rank == rank), None)

    def newest_own_epoch(self) -> int:
        """The newest epoch in which a rank of ours has sealed something that is still here. 0: in none."""
        return max((snapshot.epoch for snapshot, held in self.sealed.items() if any(slot.own for slot in held)), default=0)

    def capacities(self) -> dict[int, int]:
        """rank -> slots a steward may grant: FREE, or FILLING under a grant that stands."""
        found: dict[int, int] = {}
        for slot in self.by_id.values():
            if slot.state != SEALED and slot.own and not (slot.state == FILLING and slot.doomed):
                found[slot.rank] = found.get(slot.rank, 0) + 1
        return found

    def filling(self, rank: int | None = None, grant: int | None = None) -> list[Slot]:
        return [
            slot
            for slot in self.by_id.values()
            if slot.state == FILLING and rank in (None, slot.rank) and grant in (None, slot.grant)
        ]

    # --- holdings -----------------------------------------------------------------------------------------------
    def hold(self, slot: Slot, fact: HoldingFact, layout: Layout, layouts: tuple[Layout, ...] = ()) -> None:
        slot.state, slot.fact, slot.layout, slot.released, slot.damaged = SEALED, fact, layout, False, False
        slot.layouts, slot.grant = layouts, 0
        for known in (layout, *layouts):
            self._ctx.tables.learn(known)
        self.by_id[slot.id] = slot
        self.sealed.setdefault(fact.snapshot, []).append(slot)
        if slot.own:
            self._note_sealed(fact)

    def _note_sealed(self, fact: HoldingFact) -> None:
        """A snapshot is complete only if every rank has sealed it: until those here have, none of this epoch ever was."""
        epoch = fact.snapshot.epoch
        if epoch <= self._ctx.sealed:
            return
        if epoch != self._sealed_in:
            self._sealed_in, self._sealed_by = epoch, set()
        self._sealed_by.add(fact.rank)
        if epoch < self._ctx.number or self._sealed_by >= set(self._ctx.local_ranks()):
            self._ctx.sealed = epoch
            self._ctx.emit(PersistSealed(epoch))

    def best(self, snapshot: SnapshotId, rank: int) -> Slot | None:
        """The holding of this rank with the most in it (the lowest tier)."""
        found = [s for s in self.sealed.get(snapshot, ()) if s.rank == rank and s.fact is not None and not s.damaged]
        return min(found, key=lambda slot: slot.fact.tier if slot.fact else 0, default=None)

    def holdings(self) -> Iterator[Slot]:
        for held in self.sealed.values():
            yield from held

    def shard(self, snapshot: SnapshotId, shard: ParityShard) -> Slot | None:
        """The slot that holds this shard of a parity set."""
        held = (s for s in self.sealed.get(snapshot, ()) if s.fact is not None and s.fact.shard == shard)
        return next((slot for slot in held if not slot.damaged), None)

    def layouts(self) -> dict[str, Layout]:
        """Of everything held, and of what the parity held here protects."""
        found = [
            layout
            for slot in self.holdings()
            for layout in (slot.layout, *slot.layouts)
            if layout is not None
        ]
        return {layout.layout_id: layout for layout in found}

    def leaves(self, tables: Collection[str] = ()) -> list[dict[str, bytes]]:
        """The same as bytes, for one who has these tables, in parts of at most LEAVES_BYTES, or one table. The last part has a leaf
        of each; with each table that is lacking comes the first of those that have it."""
        layouts, known = self.layouts(), set(tables)
        last = {name: layout.leaf for name, layout in layouts.items()}
        parts, room = [last], LEAVES_BYTES - sum(map(len, last.values()))
        for name, layout in layouts.items():
            if layout.fragments.table.digest not in known:
                known.add(layout.fragments.table.digest)
                if len(layout.encoded) > room:
                    parts.append({})
                    room = LEAVES_BYTES
                parts[-1][name] = layout.encoded
                room -= len(layout.encoded)
        return [*parts[1:], last]

    def facts(self) -> tuple[HoldingFact, ...]:
        return tuple(slot.fact for slot in self.holdings() if slot.fact is not None and not slot.released)

    def frozen_facts(self) -> tuple[HoldingFact, ...]:
        """For whoever decides about a restore: what was released since it froze us counts as well, whoever is asked twice
        must not say less the second time (P3)."""
        return tuple(
            slot.fact
            for slot in self.holdings()
            if slot.fact is not None and not slot.damaged and slot.fact.snapshot not in self.void
        )

    def free(self, slot: Slot) -> None:
        """Its content is gone, whatever it was."""
        self._forget(slot)
        slot.state, slot.grant, slot.doomed, slot.void, slot.released = FREE, 0, False, "", False
        slot.fact = slot.layout = None
        slot.layouts = ()
        if not slot.own:
            self.by_id.pop(slot.id, None)
        self._ctx.emit(FreeSlot(slot.id))

    def release(self, snapshot: SnapshotId) -> None:
        """Nothing needs this snapshot's memory any more; pinned slots follow when the pin falls."""
        for slot in list(self.sealed.get(snapshot, ())):
            slot.released = True
        self._free_released(snapshot)

    def keep(self, snapshot: SnapshotId) -> None:
        """The epoch before this one had it released while an inventory froze it; this one was opened on it."""
        for slot in self.sealed.get(snapshot, ()):
            slot.released = slot.damaged or snapshot in self.void

    def quarantine(self, slot: Slot) -> None:
        """Damaged. While somebody reads it, nobody else may write into it."""
        slot.damaged = True
        self.retire(slot)

    def retire(self, slot: Slot) -> None:
        """Not needed any more; it goes when no pin holds it."""
        slot.released = True
        if slot.fact is not None:
            self._free_released(slot.fact.snapshot)

    def pin(self, why: str, *snapshots: SnapshotId) -> None:
        self._pins[why] = frozenset(snapshots)

    def unpin(self, why: str) -> None:
        for snapshot in self._pins.pop(why, frozenset()):
            self._free_released(snapshot)

    def read(self, reader: str, snapshots: Collection[SnapshotId]) -> None:
        """These instead of those that he has read before."""
        before = self._read.pop(reader, frozenset())
        if snapshots:
            self._read[reader] = frozenset(snapshots)
        for snapshot in before.difference(snapshots):
            self._free_released(snapshot)

    def for_readers(self, slot: Slot) -> bool:
        """Nobody else needs it any more."""
        return slot.released and slot.fact is not None and not self.pinned(slot.fact.snapshot)

    def _is_read(self, slot: Slot, snapshot: SnapshotId) -> bool:
        if slot.damaged or snapshot in self.void or not any(snapshot in of for of in self._read.values()):
            return False
        left = (s for s in self.by_id.values() if s.own and s.rank == slot.rank and not s.released)
        return not slot.own or sum(1 for _ in left) >= TO_GO_ON_WITH

    def pinned(self, snapshot: SnapshotId) -> bool:
        return self._ctx.now < self.frozen_until or any(snapshot in pin for pin in self._pins.values())

    def on_tick(self) -> None:
        if 0 < self.frozen_until <= self._ctx.now:
            self.thaw()

    def thaw(self) -> None:
        self.frozen_until = 0.0
        for snapshot in list(self.sealed):
            self._free_released(snapshot)

    def mark_void(self, snapshot: SnapshotId, reason: str) -> None:
        self.void[snapshot] = reason
        while len(self.void) > VOIDS_KEPT_MAX:
            del self.void[min(self.void)]

    def mark_spared(self, snapshot: SnapshotId) -> None:
        self.spared[snapshot] = None
        while len(self.spared) > VOIDS_KEPT_MAX:
            del self.spared[min(self.spared)]

    def _free_released(self, snapshot: SnapshotId) -> None:
        if not self.pinned(snapshot):
            for slot in [slot for slot in self.sealed.get(snapshot, ()) if slot.released]:
                if not self._is_read(slot, snapshot):
                    self.free(slot)

    def _forget(self, slot: Slot) -> None:
        held = self.sealed.get(slot.fact.snapshot) if slot.fact is not None else None
        if slot.fact is not None and held is not None and slot in held:
            held.remove(slot)
            if not held:
                del self.sealed[slot.fact.snapshot]
