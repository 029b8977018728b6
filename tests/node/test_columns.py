"""Columns of a parity set, combined in windows: any lost position comes back byte for byte, whatever fails on the way (P9, P10)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.core.protocol.messages import Source
from ckptd.core.redundancy.linear import linear_bytes, payload_spans
from ckptd.core.redundancy.parity_groups import stripes_held
from ckptd.core.redundancy.parity_sets import NOBODY, Member, ParitySet, ParityShard, shard_layout
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_build import build_layout
from ckptd.protect import columns
from ckptd.protect.columns import Columns, Spans, Undecodable, spread
from ckptd.protect.fetched import Fetched
from ckptd.protect.windows import WINDOW_BYTES, WINDOWS_MAX, Windows
from tests.node.links import eventually

SIZES = (5 << 20, 300_000, 3, (9 << 20) + 77, 1 << 20, 200)  # of the members: uneven, some with several windows


class Group:
    """A parity set whose columns lie in this process: what the transport does is not looked at here
    (tests/cluster/test_parity.py)."""

    def __init__(self, size: int, parity: int, *, nobody: int = -1) -> None:
        rng = Random(size * 10 + parity)
        self.payloads: dict[int, bytearray] = {}
        self.layouts: dict[int, Layout] = {}
        members = []
        for at in range(size):
            if at == nobody:
                members.append(Member(NOBODY))
                continue
            shards = (SIZES[at], SIZES[(at + 1) % len(SIZES)] // 3 + 1)  # a gap between them, for alignment
            items = [(f"w{i}", "U8", (n,), Box((0,), (n,)), "param", "unique", 1) for i, n in enumerate(shards)]
            layout = self.layouts[at] = build_layout(at, size, items, 64, "p", ())
            self.payloads[at] = bytearray(rng.randbytes(layout.payload_bytes))  # the gaps are no zeros
            members.append(Member(at, linear_bytes(layout), layout.layout_id))
        self.parity_set = ParitySet(size, 0, parity, tuple(members))
        self.shard_layout = shard_layout(self.parity_set, 500)
        self.shards = {at: bytearray(self.shard_layout.payload_bytes) for at in range(size)}
        self.read_bytes = 0
        self.fails: Callable[[Source], bool] = lambda source: False

    def sources(self, data: set[int], shards: set[int]) -> list[Source]:
        found = [Source(f"n{at}", at, 0, "") for at in sorted(data) if at in self.layouts]
        rank = self.parity_set.holding_rank
        return found + [Source(f"n{at}", rank, 0, "", ParityShard(self.parity_set, at)) for at in sorted(shards)]

    async def read(self, source: Source, spans: Spans, into: memoryview) -> Fetched:
        await asyncio.sleep(0)
        if self.fails(source):
            return Fetched(False, "it fails")
        held = self.payloads[source.rank] if source.shard is None else self.shards[source.shard.position]
        joined = b"".join(bytes(held[at : at + length]) for at, length in spans)
        self.read_bytes += len(joined)
        into[:] = joined
        return Fetched(True)

    def columns(self, sources: list[Source], windows: Windows | None = None) -> Columns:
        return Columns(
            self.parity_set, sources, self.layouts, self.shard_layout,
            read=self.read, own_node="n0", windows=windows or Windows(), work=WORK,
        )  # fmt: skip

    async def encode(self) -> None:
        everyone = set(range(len(self.parity_set.members)))
        for at in everyone:
            columns = self.columns(self.sources(everyone, set()))
            for number, (stripe, row) in enumerate(stripes_held(len(everyone), self.parity_set.parity, at)):
                begin = self.shard_layout.objects_capacity + number * self.parity_set.chunk
                await columns.row(stripe, row, memoryview(self.shards[at])[begin : begin + self.parity_set.chunk])

    def row_of(self, at: int) -> bytes:
        """What parity protects of this member: zeros where nothing has sums."""
        layout = self.layouts[at]
        row = bytearray(linear_bytes(layout))
        for place, offset, length in payload_spans(layout, 0, len(row)):
            row[place : place + length] = self.payloads[at][offset : offset + length]
        return bytes(row)

    async def made(self, at: int, sources: list[Source]) -> bytes:
        into = bytearray(len(self.row_of(at)))
        await self.columns(sources).data(at, 0, memoryview(into))
        return bytes(into)


WORK = ThreadPoolExecutor(2)


def run(size: int, parity: int, check: Callable[[Group], object], *, nobody: int = -1) -> None:
    async def main() -> None:
        group = Group(size, parity, nobody=nobody)
        await group.encode()
        await check(group)  # type: ignore[misc]

    asyncio.run(main())


@pytest.mark.parametrize(("size", "parity"), [(2, 1), (3, 1), (6, 1), (3, 2), (6, 2)])
def test_whatever_positions_are_lost_come_back(size: int, parity: int) -> None:
    async def check(group: Group) -> None:
        for lost in list(combinations(range(size), parity))[:6]:
            left = set(range(size)) - set(lost)
            for at in lost:
                assert await group.made(at, group.sources(left, left)) == group.row_of(at)

    run(size, parity, check)


def test_a_position_without_a_rank_counts_as_zeros() -> None:
    async def check(group: Group) -> None:
        left = {1, 2, 3}
        assert await group.made(0, group.sources(left, left)) == group.row_of(0)

    run(4, 1, check, nobody=2)


def test_any_range_of_a_lost_slot_can_be_had_alone() -> None:
    async def check(group: Group) -> None:
        left, want = {0, 1, 2, 4}, group.row_of(3)
        rng = Random(5)
        for _ in range(8):
            start, stop = sorted((rng.randrange(len(want)), rng.randrange(len(want))))
            into = bytearray(stop - start)
            await group.columns(group.sources(left, left)).data(3, start, memoryview(into))
            assert bytes(into) == want[start:stop]

    run(5, 1, check)


def test_a_column_that_fails_in_mid_way_is_replaced_by_another() -> None:
    async def check(group: Group) -> None:
        left = {0, 1, 2, 4, 5}  # one is lost, one will be: two rows of parity bring both
        begun = 0

        def fails(source: Source) -> bool:
            nonlocal begun
            begun += 1
            return begun > 3 and source.node == "n2"

        group.fails = fails
        assert await group.made(3, group.sources(left, left)) == group.row_of(3)
        assert begun > 3

    run(6, 2, check)


def test_too_few_columns_are_said_with_the_reasons() -> None:
    async def check(group: Group) -> None:
        group.fails = lambda source: source.node == "n2"
        with pytest.raises(Undecodable, match="of 2 columns can be read") as caught:
            await group.made(1, group.sources({0, 2}, {0, 2}))
        assert "n2: it fails" in str(caught.value)

    run(3, 1, check)


def test_parity_is_made_anew_from_what_is_left() -> None:
    """A position that lost its parity too: the row is made of other columns than at first."""

    async def check(group: Group) -> None:
        left = {0, 1, 3, 4, 5}
        for number, (stripe, row) in enumerate(stripes_held(6, 2, 2)):
            begin = group.shard_layout.objects_capacity + number * group.parity_set.chunk
            into = bytearray(group.parity_set.chunk)
            await group.columns(group.sources(left, left)).row(stripe, row, memoryview(into))
            assert into == group.shards[2][begin : begin + group.parity_set.chunk]

    run(6, 2, check)


def test_scratch_stays_within_its_bound_however_much_is_made_at_once() -> None:
    async def check(group: Group) -> None:
        windows, most = Windows(), 0

        async def watched(source: Source, spans: Spans, into: memoryview) -> Fetched:
            nonlocal most
            most = max(most, windows.taken)
            assert len(into) <= WINDOW_BYTES
            return await Group.read(group, source, spans, into)

        group.read = watched  # type: ignore[method-assign]
        left = {0, 1, 2, 4, 5}
        size = len(group.row_of(3))
        rooms = [bytearray(size) for _ in range(12)]
        await asyncio.gather(
            *(group.columns(group.sources(left, left), windows).data(3, 0, memoryview(room)) for room in rooms)
        )
        assert all(bytes(room) == group.row_of(3) for room in rooms)
        assert 10 <= most <= WINDOWS_MAX
        assert windows.taken == 0

    run(6, 1, check)


def test_a_restore_that_is_called_off_ends_no_sooner_than_what_writes_into_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source fails while another window is combined, and the round is dropped: its slot went back and was written into."""
    begun, go, running = threading.Event(), threading.Event(), []
    combine = columns.kernel().combine

    def held(*arguments: Any) -> None:
        running.append(1)
        begun.set()
        assert go.wait(30)
        combine(*arguments)
        running.pop()

    async def check(group: Group) -> None:
        monkeypatch.setattr(columns, "kernel", lambda: SimpleNamespace(combine=held))
        group.fails = lambda source: begun.is_set()
        left = {0, 1, 2, 4}
        room = bytearray(len(group.row_of(3)))
        making = asyncio.ensure_future(group.columns(group.sources(left, left)).data(3, 0, memoryview(room)))
        await eventually(begun.is_set)
        for _ in range(2):
            making.cancel()
            for _ in range(20):  # turns of the event loop
                await asyncio.sleep(0)
        early = making.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert not early and not running

    run(5, 1, check)


def test_spans_move_to_their_places_with_zeros_between() -> None:
    rng = Random(3)
    for _ in range(300):
        cuts = sorted(rng.sample(range(60), 2 * rng.randint(0, 6)))
        spans = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        want, content = bytearray(60), bytes(rng.randrange(1, 255) for _ in range(sum(n for _, n in spans)))
        at = 0
        for start, length in spans:
            want[start : start + length] = content[at : at + length]
            at += length
        room = bytearray(content + bytes(rng.randrange(256) for _ in range(60 - len(content))))
        spread(memoryview(room), spans)
        assert room == want


def test_what_is_still_there_is_read_and_not_computed() -> None:
    """A drain: the leaving node is the best source of what it hands away, and any other way still works when it fails."""

    async def moved() -> None:
        group = Group(4, 1)
        await group.encode()
        group.read_bytes = 0
        everywhere = group.sources(set(range(4)), set(range(4)))
        assert await group.made(3, everywhere) == group.row_of(3)
        assert group.read_bytes <= len(group.row_of(3))
        row = bytearray(group.parity_set.chunk)
        await group.columns(everywhere).row(2, 0, memoryview(row))
        held = stripes_held(4, 1, 2).index((2, 0))
        begin = group.shard_layout.objects_capacity + held * group.parity_set.chunk
        assert row == group.shards[2][begin : begin + group.parity_set.chunk]
        group.fails = lambda source: source.shard is None and source.rank == 3
        assert await group.made(3, everywhere) == group.row_of(3)

    asyncio.run(moved())
