"""Sums of what was received, made by several threads: on fast links hashing would else be a third of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import xxhash

from ckptd.arena.payload import Payload
from ckptd.arena.sums import HASH_THREADS, SPLIT_BYTES_MIN, SUM_BYTES, bad_blocks, blocks_of, hash_shares
from ckptd.core.layout import Layout


async def count_bad(
    work: Executor, payload: Payload, layout: Layout, sums: bytes, tier: int, *, live_only: bool = False
) -> int:
    """Blocks of a tier-``tier`` replica that do not match their sums. ``live_only``: the frozen part is not looked at."""
    spans = ((0, layout.live_bytes(tier)),) if live_only else layout.spans(tier)
    loop = asyncio.get_running_loop()
    found = await asyncio.gather(
        *(
            loop.run_in_executor(work, bad_blocks, payload, layout, sums, share, tier)
            for share in hash_shares(spans)
        )
    )
    return len({block for part in found for block in part})


def stored_units(
    layout: Layout, sums: bytes, tier: int, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, bytes | None]]:
    """How the receiver of these spans can check them: (length, stored sum) per whole block, (length, None) where a span
    covers blocks in part and needs a sum of its own."""
    starts = {at: index for index, (at, _) in enumerate(blocks_of(layout, tier))}
    blocks = blocks_of(layout, tier)
    units: list[tuple[int, bytes | None]] = []
    for at, length in spans:
        whole = _whole_blocks(starts, blocks, at, length)
        if whole is None:
            units.append((length, None))
        else:
            units += [(blocks[i][1], bytes(sums[i * SUM_BYTES : (i + 1) * SUM_BYTES])) for i in whole]
    return units


def _whole_blocks(
    starts: dict[int, int], blocks: Sequence[tuple[int, int]], at: int, length: int
) -> list[int] | None:
    found: list[int] = []
    while length > 0:
        index = starts.get(at)
        if index is None or blocks[index][1] > length:
            return None
        found.append(index)
        at, length = at + blocks[index][1], length - blocks[index][1]
    return found


async def first_wrong(work: Executor, data: memoryview, lengths: Sequence[int], sums: bytes) -> int | None:
    """Index of the first unit whose bytes do not match, None when all do."""
    if len(sums) != SUM_BYTES * len(lengths) or sum(lengths) != len(data):
        return 0
    parts = HASH_THREADS if len(data) >= SPLIT_BYTES_MIN else 1
    loop = asyncio.get_running_loop()
    found = await asyncio.gather(
        *(loop.run_in_executor(work, _wrong_of, data, lengths, sums, i, parts) for i in range(parts))
    )
    return min((index for index in found if index is not None), default=None)


def _wrong_of(data: memoryview, lengths: Sequence[int], sums: bytes, first: int, step: int) -> int | None:
    """Looks at every ``step``-th unit."""
    at = 0
    for index, length in enumerate(lengths):
        if index % step == first:
            expected = sums[index * SUM_BYTES : (index + 1) * SUM_BYTES]
            if xxhash.xxh3_128_digest(data[at : at + length]) != expected:
                return index
        at += length
    return None
