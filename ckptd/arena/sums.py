"""Integrity sums of a slot: xxh3_128 per block, made right after the seal and checked at every hop (design
D14, P10).

xxhash lets go of the GIL for large blocks (32 GB/s measured). A model has many tiny fragments, so the loops
over blocks do nothing but hash, and the block table of a layout is made once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from ckptd.arena.objects import split_objects
from ckptd.arena.payload import Payload
from ckptd.core.state_map.agreement import TENSORS, object_name
from ckptd.core.state_map.columns import Ints
from ckptd.core.state_map.layout import BLOCK_BYTES, UNIQUE, Layout
from ckptd.core.state_map.record_size import SUM_BYTES

HASH_THREADS = 2  # one alone would take a third of the time on fast links, and half of it from own memory
SPLIT_BYTES_MIN = 32 << 20  # below this a second thread costs more than it saves
TABLES_KEPT_MAX = 64  # layouts whose block tables are remembered

Blocks = tuple[tuple[int, int], ...]
_tables: OrderedDict[tuple[str, int], tuple[Blocks, Ints]] = OrderedDict()


def blocks_of(layout: Layout, tier: int = 0) -> Blocks:
    """(offset, length) of the blocks of a tier-``tier`` replica, ascending: a prefix of each part's, because fragments
    lie by descending tier."""
    return _table(layout, tier)[0]


def _table(layout: Layout, tier: int) -> tuple[Blocks, Ints]:
    """And the same in two columns."""
    key = (layout.layout_id, max(tier, 0))
    known = _tables.get(key)
    if known is None:
        ends = {at >= layout.frozen_at: at + length for at, length in layout.spans(tier)}
        found = tuple(
            (at, size) for at, size in layout.blocks() if at + size <= ends.get(at >= layout.frozen_at, -1)
        )
        known = _tables[key] = found, _columns(found)
        while len(_tables) > TABLES_KEPT_MAX:
            _tables.popitem(last=False)
    return known


def live_blocks(layout: Layout, tier: int = 0) -> Blocks:
    """Those of the live part: the first ones."""
    return tuple(block for block in blocks_of(layout, tier) if block[0] < layout.frozen_at)


def block_count(layout: Layout, tier: int = 0) -> int:
    """How many ``blocks_of`` has, without making that table: a forged layout may speak of a PiB."""
    held = layout.fragments.nbytes[layout.fragments.tier >= tier]
    return -(-layout.objects_capacity // BLOCK_BYTES) + int((-(-held // BLOCK_BYTES)).sum())


def block_sums(payload: Payload, layout: Layout, tier: int = 0) -> bytes:
    """One sum per block of the tier's prefix, in order. Raises ValueError when the payload is shorter than
    that."""
    _require_length(payload, layout, tier)
    return _sums_of(payload, blocks_of(layout, tier))


def live_sums(live: memoryview, layout: Layout) -> bytes:
    """The sums of the live part's blocks; the frozen part's come after them. Raises ValueError when it is too short."""
    if len(live) < layout.frozen_at:
        raise ValueError(f"live part of {len(live)} bytes, the layout needs {layout.frozen_at}")
    return _sums_of(live, live_blocks(layout))


def _sums_of(payload: Payload, blocks: Iterable[tuple[int, int]]) -> bytes:
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(payload[at : at + size]) for at, size in blocks])


def lower_tier(layout: Layout, sums: bytes, held: int, tier: int) -> bytes:
    """From the sums of a tier-``held`` replica those of a tier-``tier`` one, which has no more blocks."""
    kept = set(blocks_of(layout, tier))
    found = [i for i, block in enumerate(blocks_of(layout, held)) if block in kept]
    assert len(found) == len(kept), "a lower replica lacks blocks of a higher one"
    return b"".join([sums[i * SUM_BYTES : (i + 1) * SUM_BYTES] for i in found])


def bad_blocks(
    payload: Payload,
    layout: Layout,
    sums: bytes,
    spans: Iterable[tuple[int, int]] | None = None,
    tier: int = 0,
) -> list[int]:
    """Indexes of the blocks that do not match ``sums``. ``spans``: look only at blocks that these (offset,
    length) payload ranges touch. Raises ValueError when the sums are not of this layout and tier, and for spans that such a copy
    has not: no block would speak against them."""
    _require_length(payload, layout, tier)
    blocks = blocks_of(layout, tier)
    if len(sums) != SUM_BYTES * len(blocks):
        raise ValueError(f"{len(sums)} bytes of sums for {len(blocks)} blocks")
    digest = xxhash.xxh3_128_digest
    if spans is None:
        chosen: Sequence[int] = range(len(blocks))
    else:
        at, length = asked = _columns(list(spans))
        inside = np.zeros(len(at), bool)
        for start, n in layout.spans(tier):
            inside |= (at >= start) & (at <= start + n) & (length >= 0) & (length <= start + n - at)
        if not inside.all():
            raise ValueError(f"spans outside of a tier-{tier} copy")
        chosen = _touched(_table(layout, tier)[1], asked)
    return [
        i
        for i in chosen
        if digest(payload[blocks[i][0] : blocks[i][0] + blocks[i][1]])
        != sums[i * SUM_BYTES : (i + 1) * SUM_BYTES]
    ]


def hash_shares(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The same (offset, length) spans, dealt out to HASH_THREADS threads by bytes when there are enough of them."""
    total = sum(length for _, length in spans)
    if total < SPLIT_BYTES_MIN:
        return [list(spans)]
    shares: list[list[tuple[int, int]]] = [[] for _ in range(HASH_THREADS)]
    passed = 0
    for at, length in spans:
        while length > 0:
            share = min(passed * HASH_THREADS // total, HASH_THREADS - 1)
            end = -(-total * (share + 1) // HASH_THREADS)  # of this share, in bytes passed
            part = min(length, end - passed)
            shares[share].append((at, part))
            at, length, passed = at + part, length - part, passed + part
    return shares


def touched_blocks(blocks: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Indexes of the blocks that overlap any of the spans, ascending, each once."""
    return _touched(_columns(blocks), _columns(spans))


def _touched(blocks: Ints, spans: Ints) -> list[int]:
    (starts, sizes), (at, length) = blocks, spans
    some = length > 0
    begins, ends = np.zeros(len(starts) + 1, np.int64), np.zeros(len(starts) + 1, np.int64)
    np.add.at(begins, np.searchsorted(starts + sizes, at[some], "right"), 1)
    np.add.at(ends, np.searchsorted(starts, (at + length)[some], "left"), 1)
    found: list[int] = np.flatnonzero(np.cumsum(begins - ends)[:-1] > 0).tolist()
    return found


def _columns(pairs: Sequence[tuple[int, int]]) -> Ints:
    """Raises ValueError for what is no place in any memory."""
    try:
        columns: Ints = np.array(pairs, np.int64).reshape(-1, 2).T
    except OverflowError as error:
        raise ValueError(f"spans outside of any copy: {error}") from error
    return columns


def digests(
    layout: Layout, sums: bytes, payload: Payload, objects_bytes: int
) -> tuple[tuple[str, bytes], ...]:
    """What ranks compare (design D7): under TENSORS those of the fragments that may live elsewhere too, from their block sums, and
    ``o:name`` for each entry of the objects map. Raises ValueError when the objects region is no such map."""
    return (*_fragment_digests(layout, sums), *_object_digests(payload, layout, objects_bytes))


def _fragment_digests(layout: Layout, sums: bytes) -> list[tuple[str, bytes]]:
    count = -(-layout.fragments.nbytes // BLOCK_BYTES)
    end = -(-layout.objects_capacity // BLOCK_BYTES) + np.cumsum(count)
    shared = ~layout.fragments.shared_as(UNIQUE)
    digest = xxhash.xxh3_128_digest
    blocks = zip((end - count)[shared].tolist(), end[shared].tolist(), strict=True)
    made = b"".join(digest(sums[first * SUM_BYTES : last * SUM_BYTES]) for first, last in blocks)
    return [(TENSORS, made)] if made else []


def _object_digests(payload: Payload, layout: Layout, objects_bytes: int) -> list[tuple[str, bytes]]:
    if not 0 <= objects_bytes <= layout.objects_capacity:
        raise ValueError(f"objects of {objects_bytes} bytes in a region of {layout.objects_capacity}")
    if objects_bytes == 0:
        return []
    objects = split_objects(payload[:objects_bytes])
    return [(object_name(name), xxhash.xxh3_128_digest(value)) for name, value in objects.items()]


def _require_length(payload: Payload, layout: Layout, tier: int) -> None:
    needed = max((at + length for at, length in layout.spans(tier)), default=0)
    if len(payload) < needed:
        raise ValueError(f"payload of {len(payload)} bytes, the layout needs {needed}")
