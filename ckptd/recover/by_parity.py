"""Slices of slots that are held nowhere any more, made from the parity of their parity sets (design D11; REFT, section 4).

What is wanted is made, in windows, straight into the memory where it belongs: a lost slot is never rebuilt as a whole for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import xxhash

from ckptd.arena.arena import SlotRecord
from ckptd.arena.sums import blocks_of
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.instructions import MakeParity
from ckptd.core.protocol.messages import Source
from ckptd.core.redundancy.linear import linear_offset
from ckptd.core.redundancy.parity_sets import ParitySet, ParityShard, decodable
from ckptd.core.state_map.box import runs
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import BLOCK_BYTES, Layout
from ckptd.core.state_map.pieces import Piece
from ckptd.core.state_map.record_size import SUM_BYTES
from ckptd.core.state_map.recovery import BY_PARITY
from ckptd.core.state_map.source_index import Held
from ckptd.protect.columns import Columns, Undecodable
from ckptd.protect.fetched import Away
from ckptd.protect.settle import in_thread
from ckptd.protect.windows import WINDOW_BYTES
from ckptd.recover.host import Host
from ckptd.recover.left_out import LeftOut


class ByParity:
    """``sources``: of the snapshot, its parity among them; layouts: by id, of the sources and of all members of their parity sets.
    What has no layout there cannot be used.
    ``left_out``: what is not asked any more, which what fails here is added to."""

    def __init__(
        self,
        host: Host,
        snapshot: SnapshotId,
        sources: Sequence[Source],
        layouts: Mapping[str, Layout],
        left_out: LeftOut,
    ) -> None:
        self._host, self._snapshot, self._sources, self._layouts = host, snapshot, tuple(sources), layouts
        shards = ((s.shard, layouts.get(s.layout_id)) for s in sources if s.shard is not None)
        self._parity_sets = {shard.parity_set: layout for shard, layout in shards if layout is not None}
        self._cards: dict[ParitySet, dict[int, SlotRecord]] = {}
        self._left_out = left_out

    def held(self, *, hopeful: bool = False) -> list[Held]:
        """What the parity sets that are whole enough can bring."""
        found = []
        for parity_set in self._parity_sets:
            if self._usable(parity_set, hopeful=hopeful):
                layouts = self._members(parity_set)
                found += [Held(BY_PARITY, rank, 1, layouts[rank]) for rank in parity_set.ranks() if rank in layouts]
        return found

    def _usable(self, parity_set: ParitySet, *, hopeful: bool = False) -> bool:
        if parity_set in self._left_out.parity_sets(hopeful=hopeful):
            return False
        places, lost = parity_set.ranks(), self._left_out.copies(hopeful=hopeful)
        usable = [source for source in self._sources if (source.node, source.rank) not in lost]
        data = {places[s.rank] for s in usable if s.shard is None and s.rank in places and s.tier <= 1}
        shards = (source.shard for source in usable if source.shard is not None)
        return decodable(parity_set, data, {shard.position for shard in shards if shard.parity_set == parity_set})

    def _members(self, parity_set: ParitySet) -> dict[int, Layout]:
        ids = {member.rank: member.layout_id for member in parity_set.members}
        return {rank: self._layouts[ids[rank]] for rank in parity_set.ranks() if ids[rank] in self._layouts}

    def _parity_set_of(self, rank: int) -> ParitySet | None:
        """None: another rank's fetch has found meanwhile that it cannot be had."""
        return next((found for found in self._parity_sets if rank in found.ranks() and self._usable(found)), None)

    # --- slices -------------------------------------------------------------------------------------------------
    async def fetch(self, rank: int, pieces: Iterable[Piece], into: memoryview) -> bool:
        """The pieces one after the other. False: it cannot be done from what there is; what failed is left out from now on."""
        parity_set = self._parity_set_of(rank)
        if parity_set is None:
            return False
        columns = self._columns(parity_set)
        layout, at = self._members(parity_set)[rank], 0
        fragments = layout.fragments[:]
        try:
            for piece in pieces:
                fragment = fragments[piece.fragment]
                room = into[at : at + piece.nbytes]
                if piece.box == fragment.box:
                    await self._whole(parity_set, columns, layout, fragment, room)
                else:
                    await self._partly(parity_set, columns, layout, fragment, piece, room)
                at += piece.nbytes
        except CkptdError as error:
            self._note(parity_set, columns, error)
            return False
        return True

    async def objects(self, rank: int) -> bytes | None:
        """The rank's objects region; None: it cannot be had."""
        parity_set = self._parity_set_of(rank)
        if parity_set is None:
            return None
        columns = self._columns(parity_set)
        layout = self._members(parity_set)[rank]
        region = bytearray(layout.objects_capacity)
        try:
            await columns.data(parity_set.ranks()[rank], 0, memoryview(region))
            await self._check(parity_set, layout, rank, 0, memoryview(region))
        except CkptdError as error:
            self._note(parity_set, columns, error)
            return None
        return bytes(region)

    async def _whole(
        self, parity_set: ParitySet, columns: Columns, layout: Layout, fragment: Fragment, room: memoryview
    ) -> None:
        start = linear_offset(layout, fragment.offset)
        await columns.data(parity_set.ranks()[layout.rank], start, room)
        await self._check(parity_set, layout, layout.rank, fragment.offset, room)

    async def _partly(
        self, parity_set: ParitySet, columns: Columns, layout: Layout, fragment: Fragment, piece: Piece, room: memoryview
    ) -> None:
        """A window at a time of the range that the piece lies in: whole blocks, so that they can be checked."""
        start, position = linear_offset(layout, fragment.offset), parity_set.ranks()[layout.rank]
        wanted = list(runs(fragment.box, piece.box, ITEMSIZE[fragment.dtype]))
        window, first, have = memoryview(bytearray(min(WINDOW_BYTES, fragment.nbytes))), 0, 0
        at = 0
        for offset, length in wanted:
            while length:
                if not first <= offset < first + have:
                    first = offset // BLOCK_BYTES * BLOCK_BYTES
                    have = min(len(window), fragment.nbytes - first)
                    await columns.data(position, start + first, window[:have])
                    await self._check(parity_set, layout, layout.rank, fragment.offset + first, window[:have])
                shard = min(length, first + have - offset)
                room[at : at + shard] = window[offset - first : offset - first + shard]
                at, offset, length = at + shard, offset + shard, length - shard

    async def _check(self, parity_set: ParitySet, layout: Layout, rank: int, offset: int, room: memoryview) -> None:
        """Against the sums of the lost slot's own seal, which lie beside the parity. Raises CkptdError."""
        if parity_set not in self._cards:
            order = MakeParity(self._snapshot, ParityShard(parity_set, 0), self._sources)
            self._cards[parity_set] = await self._host.set_cards(order)
        sums = self._cards[parity_set][rank].sums
        if not await in_thread(self._host.executor, _matches, layout, sums, offset, room):
            self._left_out.lost_sets.add(parity_set)
            raise CkptdError("what parity brought does not match its sums", where=f"rank {rank}")

    # --- columns ------------------------------------------------------------------------------------------------
    def _columns(self, parity_set: ParitySet) -> Columns:
        order = MakeParity(self._snapshot, ParityShard(parity_set, 0), self._sources)
        columns = self._host.set_columns(order, self._members(parity_set), self._parity_sets[parity_set])
        for node, rank in self._left_out.copies():
            columns.lose(node, rank)
        return columns

    def _note(self, parity_set: ParitySet, columns: Columns, error: CkptdError) -> None:
        """What failed is not tried again in this restore; when nothing did, the parity set itself cannot be used. Others work
        beside this one: what it lacked may be what one of them could not reach meanwhile."""
        for source, found in columns.failed:
            self._left_out.note(source.node, source.rank, found)
        if isinstance(error, Away) or (isinstance(error, Undecodable) and self._left_out.away and not columns.failed):
            self._left_out.away_sets[parity_set] = str(error)
        elif not columns.failed:
            self._left_out.lost_sets.add(parity_set)


def _matches(layout: Layout, sums: bytes, offset: int, room: memoryview) -> bool:
    """The blocks of a tier-1 replica that begin in this part of its payload."""
    blocks, digest = blocks_of(layout, 1), xxhash.xxh3_128_digest
    for index in range(bisect_left(blocks, (offset, 0)), len(blocks)):
        at, size = blocks[index][0] - offset, blocks[index][1]
        if at >= len(room):
            break
        if digest(room[at : at + size]) != sums[index * SUM_BYTES : (index + 1) * SUM_BYTES]:
            return False
    return True
