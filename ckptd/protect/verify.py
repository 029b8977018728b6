"""Sums of what is held: every block of a slot against its seal, and the sums that go along with slices of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

import xxhash

from ckptd.arena.arena import Slot, SlotRecord
from ckptd.arena.payload import Payload
from ckptd.arena.sums import bad_blocks, blocks_of, hash_shares
from ckptd.core.state_map.layout import BLOCK_BYTES, Layout
from ckptd.core.state_map.record_size import SUM_BYTES

Span = tuple[int, int]  # (offset, length)
COPIED_BYTES_MAX = 4 << 20  # at once: a millisecond, in which no other thread runs


async def count_bad(work: Executor, payload: Payload, layout: Layout, sums: bytes, tier: int) -> int:
    """Blocks of a tier-``tier`` replica that do not match their sums."""
    loop = asyncio.get_running_loop()
    found = await asyncio.gather(
        *(
            loop.run_in_executor(work, bad_blocks, payload, layout, sums, share, tier)
            for share in hash_shares(layout.spans(tier))
        )
    )
    return len({block for part in found for block in part})


def units(spans: Iterable[Span]) -> list[Span]:
    """What travels with a sum of its own: each span, cut every BLOCK_BYTES from its own start. Both ends of a fetch cut alike,
    so that the asker knows the units before the first byte; spans of whole blocks fall into just these blocks."""
    return [
        (at, min(BLOCK_BYTES, start + length - at))
        for start, length in spans
        for at in range(start, start + length, BLOCK_BYTES)
    ]


def stored_sums(layout: Layout, sums: bytes, tier: int, spans: Sequence[Span]) -> list[bytes | None]:
    """Per span the sums made at the seal of its units, None where some unit is not a whole block."""
    blocks = blocks_of(layout, tier)
    starts = {at: index for index, (at, _) in enumerate(blocks)}
    found: list[bytes | None] = []
    for span in spans:
        cut = tuple(units([span]))
        first = starts.get(span[0], len(blocks))
        whole = blocks[first : first + len(cut)] == cut
        found.append(sums[first * SUM_BYTES : (first + len(cut)) * SUM_BYTES] if whole else None)
    return found


def fresh_sums(payload: Payload, span: Span) -> bytes:
    """The sums of a span's units, made now."""
    return b"".join([xxhash.xxh3_128_digest(payload[at : at + length]) for at, length in units([span])])


def copy_verified(slot: Slot, record: SlotRecord, spans: Sequence[Span], into: memoryview) -> bool:
    """These spans of the payload in a row. False: a block that they touch does not match its sum, or the slot was freed."""
    payload = slot.payload
    if bad_blocks(payload, record.layout, record.sums, spans, record.tier):
        return False
    at = 0
    for offset, length in spans:
        for begin in range(0, length, COPIED_BYTES_MAX):
            count = min(COPIED_BYTES_MAX, length - begin)
            into[at : at + count] = payload[offset + begin : offset + begin + count]
            at += count
    return slot.record is record
