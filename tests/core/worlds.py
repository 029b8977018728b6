"""Small worlds for the core's tests: shapes, boxes, ranks with layouts, and the bytes their slots would hold."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.messages import HoldingFact
from ckptd.core.state_map.agreement import TENSORS, object_name
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.cuts import Place
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout

quick = settings(max_examples=100, deadline=None)

DTYPES = ("U8", "BF16", "F32")


def node(name: str, domain: str | None = None) -> NodeInfo:
    return NodeInfo(name, f"tcp://{name}:1", f"{name}:2", domain or name)


def epoch(number: int, ranks: Sequence[str] = ("a",), ancestry: Sequence[SnapshotId] = ()) -> EpochRecord:
    members = tuple(node(name) for name in dict.fromkeys(ranks))
    return EpochRecord(number, f"n{number}", tuple(ranks), members, tuple(ancestry))


# --- boxes --------------------------------------------------------------------------------------------------------
def elements(box: Box) -> Iterator[tuple[int, ...]]:
    """Every index in the box, in C order."""
    spans = (range(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
    return itertools.product(*spans)


def cells(boxes: Sequence[Box]) -> set[tuple[int, ...]]:
    return {index for box in boxes for index in elements(box)}


def flat_index(shape: Sequence[int], index: Sequence[int]) -> int:
    at = 0
    for size, i in zip(shape, index, strict=True):
        at = at * size + i
    return at


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
solid_shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], empty: bool = True) -> Box:
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, max(size - (0 if empty else 1), 0)))
        offsets.append(start)
        sizes.append(draw(st.integers(0 if empty else 1, size - start)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], cuts: int = 5) -> list[Box]:
    """Disjoint boxes that cover the shape, by random guillotine cuts."""
    parts = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, cuts)) if shape else 0):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        low, high = list(box.sizes), list(box.sizes)
        low[dim], high[dim] = at, box.sizes[dim] - at
        shifted = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
        parts += [part for part in (Box(box.offsets, tuple(low)), Box(shifted, tuple(high))) if part.volume]
        if not parts:
            return []
    return [part for part in parts if part.volume]


# --- worlds -------------------------------------------------------------------------------------------------------
@dataclass
class World:
    """Ranks with layouts, and the value of every byte: ``salt`` of a fragment says whose value it is ("" : everyone's)."""

    size: int
    layouts: dict[int, Layout]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    per_rank: frozenset[str] = frozenset()
    objects: dict[int, dict[str, bytes]] = field(default_factory=dict)

    def salt(self, rank: int, key: str) -> str:
        return str(rank) if f"t:{key}" in self.per_rank else ""

    def content(self, rank: int, fragment: Fragment) -> bytes:
        item = ITEMSIZE[fragment.dtype]
        salt = self.salt(rank, fragment.key)
        return b"".join(value(fragment.key, salt, index, item) for index in elements(fragment.box))

    def payload(self, rank: int) -> bytes:
        layout = self.layouts[rank]
        data = bytearray(layout.payload_bytes)
        for fragment in layout.fragments:
            data[fragment.offset : fragment.offset + fragment.nbytes] = self.content(rank, fragment)
        return bytes(data)

    def digests(self, rank: int) -> tuple[tuple[str, bytes], ...]:
        layout = self.layouts[rank]
        values = [digest(self.content(rank, fragment)) for fragment in layout.fragments if fragment.sharing != UNIQUE]
        found = [(TENSORS, b"".join(values))] if values else []
        found += [
            (object_name(name), digest(blob)) for name, blob in sorted(self.objects.get(rank, {}).items())
        ]
        return tuple(found)

    def fact(self, snapshot: SnapshotId, rank: int, tier: int = 0) -> HoldingFact:
        return HoldingFact(snapshot, rank, tier, self.layouts[rank].layout_id, self.digests(rank))

    def by_id(self) -> dict[str, Layout]:
        return {layout.layout_id: layout for layout in self.layouts.values()}


def value(key: str, salt: str, index: tuple[int, ...], size: int) -> bytes:
    return hashlib.blake2b(f"{key}|{salt}|{index}".encode(), digest_size=size).digest()


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@st.composite
def cut_tensors(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[tuple[int, Box, tuple[Place, ...] | None]]:
    """(rank, box, places) of ranks that each have a part of the same cuts, as torch.chunk makes them, and mostly say so."""
    cuts: list[tuple[int, int]] = []
    while shape and len(cuts) < 3 and draw(st.booleans()):
        cuts.append((draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))))
    found = []
    order = draw(st.permutations(range(ranks)))
    for rank, at in zip(order, itertools.product(*(range(parts) for _, parts in cuts)), strict=False):
        runs = [list(range(size)) for size in shape]
        for (dim, parts), place in zip(cuts, at, strict=True):
            share = -(-len(runs[dim]) // parts)
            runs[dim] = runs[dim][place * share : (place + 1) * share]
        if all(runs):
            box = Box(tuple(run[0] for run in runs), tuple(map(len, runs)))
            places = tuple((dim, parts, place) for (dim, parts), place in zip(cuts, at, strict=True))
            found.append((rank, box, places if draw(st.integers(0, 5)) else None))
    return found


@st.composite
def worlds(draw: st.DrawFn, ranks: int = 4, tensors: int = 4) -> World:
    """1..ranks ranks; each tensor is sharded, copied by contract to some ranks, or plain on all (equal or each rank's)."""
    size = draw(st.integers(1, ranks))
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(size)}
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    per_rank: set[str] = set()
    for number in range(draw(st.integers(1, tensors))):
        key, dtype, shape = f"k{number}", draw(st.sampled_from(DTYPES)), draw(solid_shapes)
        known[key] = dtype, shape
        kind = draw(st.sampled_from(("shard", "cut", REPLICA, MAYBE, "own")))
        if kind == "cut":
            tier, frozen = draw(st.integers(1, 2)), draw(st.booleans())
            for rank, box, places in draw(cut_tensors(shape, size)):
                items[rank].append(LayoutItem(key, dtype, shape, box, "param", UNIQUE, tier, frozen, places))
            continue
        if kind == "shard":
            for box in draw(tilings(shape)):
                rank = draw(st.integers(0, size - 1))
                tier, frozen = draw(st.integers(1, 2)), draw(st.booleans())
                items[rank].append(LayoutItem(key, dtype, shape, box, "param", UNIQUE, tier, frozen))
            continue
        everyone = list(range(size))
        chosen = (
            draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
            if kind == REPLICA
            else everyone
        )
        sharing, tier = (
            (REPLICA, draw(st.integers(0, 1))) if kind == REPLICA else (MAYBE, draw(st.integers(1, 2)))
        )
        frozen = draw(st.booleans())
        for rank in chosen:
            items[rank].append(LayoutItem(key, dtype, shape, Box.whole(shape), "buffer", sharing, tier, frozen))
        if kind == "own" and size > 1:
            per_rank.add(f"t:{key}")
    layouts = {rank: build_layout(rank, size, items[rank], draw(st.sampled_from((0, 100)))) for rank in items}
    objects = {rank: {"rng": str(rank).encode(), "scheduler": b"s"} for rank in items}
    return World(size, layouts, known, frozenset(per_rank), objects)


def rows_of(shape: tuple[int, ...], parts: int) -> list[Box]:
    """Sharded along dimension 0 as FSDP2 does: ceil-sized pieces, the last ones may be empty (left out)."""
    step = -(-shape[0] // parts)
    result = []
    for part in range(parts):
        start, stop = min(part * step, shape[0]), min((part + 1) * step, shape[0])
        if stop > start:
            result.append(Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:])))
    return result


def fsdp(
    size: int, shape: tuple[int, ...] = (12, 4), keys: int = 2, tier: int = 1, dtype: str = "F32"
) -> World:
    """Every tensor cut in rows over all ranks."""
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(size)}
    for number in range(keys):
        for rank, box in enumerate(rows_of(shape, size)):
            items[rank].append(LayoutItem(f"k{number}", dtype, shape, box, "param", UNIQUE, tier))
    layouts = {rank: build_layout(rank, size, items[rank], 64) for rank in items}
    known = {f"k{number}": (dtype, shape) for number in range(keys)}
    return World(size, layouts, known, objects={rank: {"rng": str(rank).encode()} for rank in items})


def volume(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
