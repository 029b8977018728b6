"""The frozen parts of one job's slots on this node: each lies in memory once, for every snapshot that leans on it (design D6).

An own one is captured by its rank's trainer and sealed with the first snapshot that names it; from then on nobody writes into
it. A peer's comes with the first replica that needs it. Either goes when no slot leans on it any more, unless the rank that
captured it still may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ckptd.arena.arena import Slot, SlotRecord
from ckptd.arena.frozen import NO_SNAPSHOT, content_of, frozen_record
from ckptd.arena.sums import block_sums
from ckptd.core.state_map.layout import Layout
from ckptd.daemon.services import Services


class Frozen:
    """``in_use(slot)``: may a local rank name it in its next snapshot? ``on_retired(slot)``: it goes now."""

    def __init__(self, services: Services, job: str) -> None:
        self._services, self._job = services, job
        self.slots: dict[int, Slot] = {}
        self.in_use: Callable[[Slot], bool] = lambda slot: False
        self.on_retired: Callable[[Slot], None] = lambda slot: None
        self._contents: dict[int, str] = {}  # slot -> what is known to be in it
        self._sealing: dict[int, asyncio.Lock] = {}

    def find(self, content: str) -> Slot | None:
        return next((self.slots[at] for at, known in self._contents.items() if known == content), None)

    def part_of(self, record: SlotRecord) -> Slot | None:
        """The slot that holds this snapshot's frozen part; None: it is not here."""
        return self.find(content_of(frozen_record(record)))

    def add(self, slot: Slot) -> None:
        """One that a trainer is to capture into, or a sealed one that arrived or came back with the daemon's memory."""
        self.slots[slot.id] = slot
        if slot.record is not None:
            self._contents[slot.id] = content_of(slot.record)

    def kept_for(self, rank: int) -> Slot | None:
        """The newest frozen part that an earlier life of this rank captured; the next one may still have the same."""
        own = [s for s in self.slots.values() if s.id in self._contents and (s.tenant.kind, s.tenant.rank) == ("own", rank)]
        return max(own, key=lambda slot: slot.id, default=None)

    async def support(self, slot: Slot, rank: int, frozen_id: int, layout: Layout) -> bytes:
        """``slot`` leans on the one that the rank says it captured its frozen part into, and which is sealed now if it was not
        yet. The sums of the frozen part. Raises CkptdError, ValueError."""
        frozen = self.hold(slot, rank, frozen_id)
        async with self._sealing.setdefault(frozen.id, asyncio.Lock()):
            if frozen.record is None:
                await self._services.in_work(self._seal, frozen, layout)
                self.add(frozen)
        if frozen.record is None or frozen.record.layout.layout_id != layout.frozen.layout_id:
            raise ValueError("the slot holds another frozen part")
        if frozen.id not in self._contents:
            raise ValueError("its frozen part is damaged")
        return frozen.record.sums

    def hold(self, slot: Slot, rank: int, frozen_id: int) -> Slot:
        """``slot``, about to be sealed, leans on this one of the rank's: it stays. Raises ValueError."""
        frozen = self.slots.get(frozen_id)
        if frozen is None or (frozen.tenant.kind, frozen.tenant.rank) != ("own", rank):
            raise ValueError("the slot of its frozen part is not here")
        if slot.record is not None:  # what it holds leans on what it was captured with
            raise ValueError("the slot is sealed already")
        slot.lean(frozen)
        return frozen

    def _seal(self, slot: Slot, layout: Layout) -> None:
        sums = block_sums(slot.extent, layout.frozen)
        slot.seal(SlotRecord(self._job, NO_SNAPSHOT, layout.rank, 0, layout.frozen, 0, sums, ()))

    def distrust(self, slot: Slot) -> None:
        """Nothing leans on it anew: one of the snapshots that do was found damaged."""
        self._contents.pop(slot.id, None)

    def tidy(self) -> bool:
        """Let go of what nothing leans on. Was there any?"""
        unused = [slot for slot in self.slots.values() if not slot.leaning and not self.in_use(slot)]
        for slot in unused:
            self._let_go(slot)
        return bool(unused)

    def drop_all(self) -> None:
        for slot in list(self.slots.values()):
            self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        del self.slots[slot.id]
        self._sealing.pop(slot.id, None)
        self.distrust(slot)
        self.on_retired(slot)
        if slot.tenant.kind == "own":  # its trainer may still map it
            self._services.arena.retire(slot)
        else:
            self._services.arena.release(slot)
