"""A position of a parity set on this node: its parity, or the slot of its member, which is lost or moves here (REFT, section
4; D8).

Whoever holds a position pulls what it needs, so a try that failed is merely done again. What is made of verified columns is summed
and sealed as any slot; a slot that parity brought back must match the sums of its first seal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from ckptd.arena.arena import Arena, Slot, SlotRecord
from ckptd.arena.frozen import content_of, frozen_record, leans
from ckptd.arena.sums import bad_blocks, block_count, block_sums
from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.protocol.instructions import MakeParity
from ckptd.core.protocol.messages import Source
from ckptd.core.redundancy.parity_groups import stripes_held
from ckptd.core.redundancy.parity_sets import joined_digests, shard_layout
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.record_size import SUM_BYTES, record_bytes
from ckptd.protect import cards as slot_cards
from ckptd.protect.cards import Cards
from ckptd.protect.columns import Columns, Read, Spans
from ckptd.protect.fetch import Fetcher
from ckptd.protect.fetched import Away, Fetched
from ckptd.protect.peer_slot import DAMAGE, allocate
from ckptd.protect.settle import in_thread
from ckptd.protect.windows import Windows


class ParityMaker:
    """``find_frozen(job, content)``, ``add_frozen(job, slot)``: frozen parts that are here."""

    def __init__(self, node: str, arena: Arena, fetcher: Fetcher, cards: Cards, work: Executor) -> None:
        self._node, self._arena, self._fetcher, self._cards, self._work = node, arena, fetcher, cards, work
        self.windows = Windows()
        self.windows_restoring = Windows()  # its own: a restore does not wait behind what is paced
        self.find_frozen: Callable[[str, str], Slot | None] = lambda job, content: None
        self.add_frozen: Callable[[str, Slot], None] = lambda job, slot: None

    # --- parity -------------------------------------------------------------------------------------------------
    async def shard(self, job: str, do: MakeParity) -> Slot:
        """Sealed. Raises CkptdError, NoMemory among them."""
        cards = await self._all_cards(job, do)
        blob = await in_thread(self._work, slot_cards.packed, cards)
        parity_set = do.shard.parity_set
        layout = shard_layout(parity_set, len(blob))
        digests = joined_digests({rank: sorted(card.digests) for rank, card in cards.items()})
        room = record_bytes(len(layout.encoded), SUM_BYTES * block_count(layout), digests)
        slot = await self._allocate(job, parity_set.holding_rank, layout.payload_bytes, room)
        try:
            slot.fill()
            into = slot.extent[: layout.payload_bytes]
            into[: layout.objects_capacity] = blob + bytes(layout.objects_capacity - len(blob))
            columns = self.columns(job, do, {rank: card.layout for rank, card in cards.items()}, layout)
            held = stripes_held(len(parity_set.members), parity_set.parity, do.shard.position)
            for number, (stripe, row) in enumerate(held):
                at = layout.objects_capacity + number * parity_set.chunk
                await columns.row(stripe, row, into[at : at + parity_set.chunk])
            sums = await in_thread(self._work, block_sums, into, layout)
            keep = any(card.keep for card in cards.values())
            record = SlotRecord(
                job, do.snapshot, parity_set.holding_rank, 0, layout, len(blob), sums, digests, keep, do.shard
            )
            await in_thread(self._work, _seal, slot, record)
        except BaseException:
            self._arena.release(slot)
            raise
        return slot

    # --- a slot that is lost ------------------------------------------------------------------------------------
    async def data(self, job: str, do: MakeParity) -> Slot:
        """A tier-1 replica of the position's member. Sealed. Raises CkptdError, NoMemory among them."""
        kept = await self.kept_cards(job, do)
        card, shards = kept[do.shard.member.rank], await self._shard_layout(job, do)
        columns = self.columns(job, do, {rank: found.layout for rank, found in kept.items()}, shards)
        layout, live = card.layout, card.layout.live_bytes(1)
        slot = await self._allocate(job, card.rank, live, record_bytes(len(layout.encoded), len(card.sums), card.digests))
        try:
            slot.fill()
            await columns.data(do.shard.position, 0, slot.extent[:live])
            if leans(card):
                slot.lean(await self._frozen(job, card, columns, do.shard.position, live))
            payload = slot.reads(layout)
            if await in_thread(self._work, bad_blocks, payload, layout, card.sums, None, 1):
                raise CkptdError(DAMAGE, where=f"rank {card.rank} of {do.snapshot}")
            await in_thread(self._work, _seal, slot, card)
        except BaseException:
            self._arena.release(slot)
            raise
        return slot

    async def _frozen(self, job: str, card: SlotRecord, columns: Columns, position: int, start: int) -> Slot:
        """The member's frozen part, which lies behind the live one in its row."""
        shard = frozen_record(card)
        found = self.find_frozen(job, content_of(shard))
        if found is not None:
            return found
        nbytes = sum(length for at, length in card.layout.spans(1) if at >= card.layout.frozen_at)
        slot = await self._allocate(job, card.rank, nbytes, record_bytes(len(shard.layout.encoded), len(shard.sums)))
        try:
            slot.fill()
            await columns.data(position, start, slot.extent[:nbytes])
            if await in_thread(self._work, bad_blocks, slot.extent, shard.layout, shard.sums, None, shard.tier):
                raise CkptdError(DAMAGE, where=f"frozen part of rank {card.rank}")
            await in_thread(self._work, slot.seal, shard)
        except BaseException:
            self._arena.release(slot)
            raise
        self.add_frozen(job, slot)
        return slot

    # --- cards --------------------------------------------------------------------------------------------------
    async def _all_cards(self, job: str, do: MakeParity) -> dict[int, SlotRecord]:
        """Of every member; of one whose slot is gone what the parity set's other shards keep."""
        found: dict[int, SlotRecord] = {}
        kept: dict[int, SlotRecord] = {}
        for rank, position in do.shard.parity_set.ranks().items():
            card = await self._card(job, do, rank)
            if card is None:
                kept = kept or await self.kept_cards(job, do)
                card = kept[rank]
            if card.layout.layout_id != do.shard.parity_set.members[position].layout_id:
                raise CkptdError(f"rank {rank} has another layout than its parity set says", where=str(do.snapshot))
            found[rank] = card
        return found

    async def _card(self, job: str, do: MakeParity, rank: int) -> SlotRecord | None:
        for source in do.sources:
            if source.shard is None and source.rank == rank:
                try:
                    return await self._cards.ask(job, source.node, do.snapshot, rank)
                except CkptdError:
                    continue  # another holder, or the cards beside the parity
        return None

    async def kept_cards(self, job: str, do: MakeParity) -> dict[int, SlotRecord]:
        """As the parity set's shards keep them. Raises CkptdError: none of them can be read; Away: one that was not reached
        may be."""
        why, away = "", False
        for source in do.sources:
            if source.shard is None or source.shard.parity_set != do.shard.parity_set:
                continue
            try:
                layout = await self._layout_of(job, do, source)
                blob = bytearray(layout.objects_capacity)
                found = await self._reader(job, do)(source, ((0, len(blob)),), memoryview(blob))
                if found.ok:
                    return await in_thread(self._work, slot_cards.unpacked, job, do.snapshot, blob)
                why, away = found.reason, away or found.away
            except (CkptdError, ValueError) as error:
                why, away = str(error), away or isinstance(error, Away)
        raise (Away if away else CkptdError)(f"no part of parity set {do.shard.parity_set.number} can be read", where=why)

    async def _shard_layout(self, job: str, do: MakeParity) -> Layout:
        for source in do.sources:
            if source.shard is not None and source.shard.parity_set == do.shard.parity_set:
                return await self._layout_of(job, do, source)
        raise CkptdError(f"no part of parity set {do.shard.parity_set.number} is held")

    async def _layout_of(self, job: str, do: MakeParity, source: Source) -> Layout:
        """Shards of one parity set differ in nothing but the length of their cards, which is the same on all of its nodes."""
        card = await self._cards.ask(job, source.node, do.snapshot, source.rank)
        return card.layout

    # --- reading ------------------------------------------------------------------------------------------------
    def columns(
        self, job: str, do: MakeParity, layouts: dict[int, Layout], shards: Layout, *, protects: bool = True
    ) -> Columns:
        """``protects``: paced, as nobody waits for it; else for a restore."""
        per_holder = do.shard.parity_set.chunk * do.shard.parity_set.parity
        read = self._reader(job, do, per_holder if protects else 0)
        windows = self.windows if protects else self.windows_restoring
        return Columns(
            do.shard.parity_set, do.sources, layouts, shards, read=read, own_node=self._node, windows=windows, work=self._work
        )

    def _reader(self, job: str, do: MakeParity, per_holder: int = 0) -> Read:
        """per_holder: bytes that each holder is asked for in all, as far as they are paced."""

        async def read(source: Source, spans: Spans, into: memoryview) -> Fetched:
            if source.node == self._node:
                return await self._fetcher.here(job, do.snapshot, source.rank, spans, into, "found while making parity")
            share = len(into) / per_holder if per_holder else 0.0
            what = job, source.node, do.snapshot, source.rank, spans
            return await self._fetcher.fetch(*what, into, protects=share)

        return read

    async def _allocate(self, job: str, rank: int, nbytes: int, record: int) -> Slot:
        return await in_thread(self._work, allocate, self._arena, job, rank, nbytes, record)


def _seal(slot: Slot, record: SlotRecord) -> None:
    failpoint("protect.parity.seal")
    slot.seal(record)
