"""The columns of a parity set's stripes, read from wherever they are and combined (REFT, section 4; design D8).

Making parity and making what was lost are one thing: any ``data`` columns of a stripe bring any other one. It is done window by
window in bounded scratch, never in a second copy of the state; a window that fails is done again from other columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.messages import Source
from ckptd.core.redundancy.galois import recovery_row
from ckptd.core.redundancy.linear import payload_spans
from ckptd.core.redundancy.parity_groups import data_index, data_stripes, parity_positions, stripes_held
from ckptd.core.redundancy.parity_sets import NOBODY, ParitySet
from ckptd.core.state_map.layout import BLOCK_BYTES, Layout
from ckptd.protect.erasure import Buffer, kernel
from ckptd.protect.fetched import Fetched
from ckptd.protect.settle import all_done, in_thread
from ckptd.protect.windows import WINDOW_BYTES, Windows

WINDOWS_AT_ONCE = 2  # of one parity set: one is read while another is combined
assert WINDOW_BYTES % BLOCK_BYTES == 0, "windows of parity are whole blocks, which travel with the sums of their seal"

Spans = tuple[tuple[int, int], ...]
Read = Callable[[Source, Spans, memoryview], Awaitable[Fetched]]


class Undecodable(CkptdError):
    """Too many columns of a stripe cannot be had."""


@dataclass(frozen=True)
class _Column:
    """One column of one stripe: where it can be read; none of a column of zeros."""

    number: int
    source: Source | None


class Columns:
    """``read``: fill a buffer with spans of a source's payload, verified. ``own_node``: what lies there is preferred.

    layouts: of the parity set's members, by rank; part_layout: of its parts.
    """

    def __init__(
        self,
        parity_set: ParitySet,
        sources: Iterable[Source],
        layouts: Mapping[int, Layout],
        shard_layout: Layout,
        *,
        read: Read,
        own_node: str,
        windows: Windows,
        work: Executor,
    ) -> None:
        self.parity_set, self._layouts, self._shard_layout = parity_set, layouts, shard_layout
        self._read, self._own_node, self._windows, self._work = read, own_node, windows, work
        self._size, self._data = len(parity_set.members), len(parity_set.members) - parity_set.parity
        self._sources: dict[tuple[int, bool], list[Source]] = {}  # (position, its parity?) -> where
        places = parity_set.ranks()
        for source in sorted(sources, key=lambda source: (source.node != own_node, source.node)):
            if source.shard is not None and source.shard.parity_set == parity_set:
                self._sources.setdefault((source.shard.position, True), []).append(source)
            elif source.shard is None and source.rank in places and source.tier <= 1:
                self._sources.setdefault((places[source.rank], False), []).append(source)
        self.failed: list[tuple[Source, Fetched]] = []

    def lose(self, node: str, rank: int) -> None:
        """This holding is not used any more."""
        self._sources = {
            where: [s for s in found if (s.node, s.rank) != (node, rank)] for where, found in self._sources.items()
        }

    # --- what to make -------------------------------------------------------------------------------------------
    async def data(self, position: int, start: int, into: memoryview) -> None:
        """Bytes ``start`` onward of the member's row (core.redundancy.linear). Raises Undecodable."""
        chunk, done = self.parity_set.chunk, 0
        stripes = data_stripes(self._size, self.parity_set.parity, position)
        while done < len(into):
            index, offset = divmod(start + done, chunk)
            length = min(len(into) - done, chunk - offset)
            stripe = stripes[index]
            column = data_index(self._size, self.parity_set.parity, stripe, position)
            await self._make(stripe, column, offset, into[done : done + length])
            done += length

    async def row(self, stripe: int, row: int, into: memoryview) -> None:
        """A row of parity of this stripe. Raises Undecodable."""
        await self._make(stripe, self._data + row, 0, into)

    async def _make(self, stripe: int, column: int, offset: int, into: memoryview) -> None:
        gate = asyncio.Semaphore(WINDOWS_AT_ONCE)

        async def one(at: int) -> None:
            async with gate:
                await self._window(stripe, column, offset + at, into[at : at + WINDOW_BYTES])

        await all_done([one(at) for at in range(0, len(into), WINDOW_BYTES)])

    async def _window(self, stripe: int, column: int, offset: int, into: memoryview) -> None:
        factors: tuple[int, ...]
        while True:
            itself = self._column(stripe, column)
            if itself is not None and itself.source is not None:  # it moves (a drain): one read, nothing to solve
                chosen, factors = [itself], (1,)
            else:
                chosen = self._choose(stripe, column)
                factors = recovery_row(self._data, self.parity_set.parity, [c.number for c in chosen], column)
            terms = [(c, f) for c, f in zip(chosen, factors, strict=True) if f and c.source is not None]
            async with self._windows.take(len(terms)) as scratch:
                buffers = [room[: len(into)] for room in scratch]
                reads = [self._fill(stripe, c, offset, room) for (c, _), room in zip(terms, buffers, strict=True)]
                if all(await all_done(reads)):
                    weighted = [(room, f) for (_, f), room in zip(terms, buffers, strict=True)]
                    await self._in_work(into, weighted)
                    return

    async def _in_work(self, into: memoryview, terms: list[tuple[memoryview, int]]) -> None:
        weighted: list[tuple[Buffer, int]] = list(terms)
        await in_thread(self._work, kernel().combine, into, weighted)

    # --- which columns ------------------------------------------------------------------------------------------
    def _choose(self, stripe: int, column: int) -> list[_Column]:
        """As many as bring any other: zeros cost nothing, what lies here little, data less than parity."""
        there = [found for number in range(self._size) if (found := self._column(stripe, number)) and number != column]
        if len(there) < self._data:
            why = "; ".join(f"{source.node}: {found.reason}" for source, found in self.failed[-4:])
            raise Undecodable(
                f"parity set {self.parity_set.number}: {len(there)} of {self._data} columns can be read", where=why
            )
        there.sort(key=lambda c: (c.source is not None, c.source is not None and c.source.node != self._own_node, c.number))
        return there[: self._data]

    def _column(self, stripe: int, number: int) -> _Column | None:
        """None: it cannot be had."""
        parity = parity_positions(self._size, self.parity_set.parity, stripe)
        if number >= self._data:
            found = self._sources.get((parity[number - self._data], True))
            return _Column(number, found[0]) if found else None
        position = [at for at in range(self._size) if at not in parity][number]
        if self.parity_set.members[position].rank == NOBODY:
            return _Column(number, None)
        found = self._sources.get((position, False))
        return _Column(number, found[0]) if found else None

    # --- reading one --------------------------------------------------------------------------------------------
    async def _fill(self, stripe: int, column: _Column, offset: int, room: memoryview) -> bool:
        """False: the source is not used any more."""
        source = column.source
        assert source is not None, "zeros are not read"
        spans = self._spans(stripe, column.number, offset, len(room), source)
        packed = sum(length for _, _, length in spans)
        if packed:
            wanted = tuple((at, length) for _, at, length in spans)
            found = await self._read(source, wanted, room[:packed])
            if not found.ok:
                self.failed.append((source, found))
                self.lose(source.node, source.rank)
                return False
        spread(room, [(at, length) for at, _, length in spans])
        return True

    def _spans(self, stripe: int, number: int, offset: int, length: int, source: Source) -> list[tuple[int, int, int]]:
        parity = self.parity_set.parity
        if source.shard is not None:
            held = stripes_held(self._size, parity, source.shard.position).index((stripe, number - self._data))
            at = self._shard_layout.objects_capacity + held * self.parity_set.chunk + offset
            return [(0, at, length)]
        position = self.parity_set.ranks()[source.rank]
        start = data_stripes(self._size, parity, position).index(stripe) * self.parity_set.chunk + offset
        return payload_spans(self._layouts[source.rank], start, start + length)


def spread(room: memoryview, spans: list[tuple[int, int]]) -> None:
    """``room`` begins with the content of the spans in a row: move each to its place, with zeros between them."""
    packed, end = sum(length for _, length in spans), len(room)
    for at, length in reversed(spans):
        packed -= length
        if at != packed:
            room[at : at + length] = room[packed : packed + length]
        room[at + length : end] = bytes(end - at - length)
        end = at
    room[:end] = bytes(end)
