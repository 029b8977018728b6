"""What a node has to write, from its held slots: sources of bytes that are verified before they are copied (P10)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ckptd.arena.objects import split_objects
from ckptd.core.errors import CkptdError
from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box, contains, disjoint, merge
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import BLOCK_BYTES, MAYBE, Layout
from ckptd.persist.names import header_name
from ckptd.persist.report import WrittenChunk
from ckptd.persist.strided import Bytes, Elements, elements, extent, window
from ckptd.persist.sums import SUM_BYTES, SlotDamage, block_count, digest


class SlotFacts(Protocol):
    """What of a slot's record the writer reads (arena.SlotRecord has more)."""

    @property
    def layout(self) -> Layout: ...
    @property
    def sums(self) -> bytes: ...
    @property
    def objects_bytes(self) -> int: ...
    @property
    def tier(self) -> int: ...


class Payload(Protocol):
    """A memoryview, or what reads like one: a frozen part lies in another memory (arena.payload)."""

    def __getitem__(self, where: slice, /) -> memoryview: ...


@dataclass(frozen=True)
class HeldPiece:
    """An order about one pinned slot. ``payload`` may be that of a lower tier; ``record.sums`` cover the blocks of it."""

    piece: WritePiece
    payload: Payload
    record: SlotFacts
    slot: int = -1  # the caller's own number for it, told back by SlotDamage


class Values(Protocol):
    """A box of a tensor that can be read part by part, as plain unsigned numbers of the element's size."""

    @property
    def box(self) -> Box: ...
    def values(self, inner: Box) -> Elements: ...


@dataclass
class Source:
    """One fragment of a held slot; its blocks are checked when they are first used."""

    rank: int
    fragment: Fragment
    data: Bytes
    sums: bytes  # of this fragment's blocks
    slot: int = -1
    _checked: set[int] = field(default_factory=set)

    def check(self, start: int, stop: int) -> None:
        """Raises SlotDamage when a block of the bytes [start, stop) is not what was captured."""
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if block not in self._checked:
                self._check_block(block)
                self._checked.add(block)

    @property
    def box(self) -> Box:
        return self.fragment.box

    def values(self, inner: Box) -> Elements:
        """Raises SlotDamage."""
        item = ITEMSIZE[self.fragment.dtype]
        self.check(*extent(self.box, inner, item))
        found: Elements = elements(self.data, self.box.sizes, item)[window(self.box, inner)]
        return found

    def _check_block(self, block: int) -> None:
        at = block * BLOCK_BYTES
        found = digest(self.data[at : at + BLOCK_BYTES].data)
        if found != self.sums[block * SUM_BYTES : (block + 1) * SUM_BYTES]:
            raise SlotDamage(
                self.slot,
                self.rank,
                self.fragment.key,
                f"memory damage in {self.fragment.key}, block {block}",
            )


@dataclass(frozen=True)
class OutChunk:
    """One box to write, made of one or more sources that tile it. ``rank``: of a value that is each rank's own."""

    key: str
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    role: str
    box: Box
    sources: tuple[Values, ...]

    @property
    def name(self) -> str:
        return header_name(self.key, self.rank)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize

    def row(self, at: int, block: int, nbytes: int | None = None, codec: int = 0) -> WrittenChunk:
        """As a report has it, with its bytes and its first sum there in a file. nbytes: other than of its values."""
        facts = self.key, self.name, self.rank, self.dtype, self.shape, self.role
        place = at, self.nbytes if nbytes is None else nbytes, block, codec
        return WrittenChunk(*facts, self.box.offsets, self.box.sizes, *place)


@dataclass(frozen=True)
class ObjectBlob:
    rank: int
    name: str
    data: bytes


def chunks_of(pieces: Sequence[HeldPiece], per_rank: Collection[str]) -> list[OutChunk]:
    """The node's share as maximal boxes. Raises CkptdError for an order that the held slots cannot fill."""
    groups: dict[tuple[str, int | None], dict[Box, Source]] = {}
    for held in pieces:
        for source in _sources(held):
            own = source.fragment.sharing == MAYBE and f"t:{source.fragment.key}" in per_rank
            key = source.fragment.key, source.rank if own else None
            groups.setdefault(key, {}).setdefault(source.fragment.box, source)
    return [chunk for (_, rank), boxes in groups.items() for chunk in _joined(rank, boxes)]


def objects_of(pieces: Iterable[HeldPiece]) -> list[ObjectBlob]:
    """The non-tensor values of the ordered ranks. Raises SlotDamage when the region is not what was captured."""
    blobs: list[ObjectBlob] = []
    for held in pieces:
        if held.piece.objects and held.record.objects_bytes:
            blobs += _blobs(held)
    return blobs


def _joined(rank: int | None, boxes: dict[Box, Source]) -> list[OutChunk]:
    """Several fragments of one tensor as few boxes as possible; an empty tensor keeps one empty box."""
    solid = [box for box in boxes if box.volume]
    if not disjoint(solid):
        raise CkptdError("the ordered slices overlap", where=next(iter(boxes.values())).fragment.key)
    made = []
    for box in merge(solid):
        inside = [boxes[part] for part in solid if contains(box, part)]
        made.append(_chunk(rank, box, inside))
    if not solid:
        whole = [source for source in boxes.values() if 0 in source.fragment.shape]
        made += [_chunk(rank, Box.whole(source.fragment.shape), [source]) for source in whole[:1]]
    return made


def _chunk(rank: int | None, box: Box, sources: list[Source]) -> OutChunk:
    first = sources[0].fragment
    for source in sources:
        other = source.fragment
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CkptdError("slices of one tensor disagree about dtype or shape", where=first.key)
    return OutChunk(first.key, rank, first.dtype, first.shape, first.role, box, tuple(sources))


def _sources(held: HeldPiece) -> list[Source]:
    layout, piece = held.record.layout, held.piece
    if piece.layout_id != layout.layout_id:
        raise CkptdError(
            "the order names another layout than the slot has", where=f"slot of rank {piece.rank}"
        )
    fragments = layout.fragments[:]
    first = _first_blocks(layout, held.record.tier)
    return [_source(held, fragments[index], first[index]) for index in piece.numbers(len(fragments))]


def _source(held: HeldPiece, fragment: Fragment, block: int) -> Source:
    sums = held.record.sums[block * SUM_BYTES : (block + block_count(fragment.nbytes)) * SUM_BYTES]
    data: Bytes = np.asarray(held.payload[fragment.offset : fragment.offset + fragment.nbytes])
    if len(data) < fragment.nbytes or len(sums) < block_count(fragment.nbytes) * SUM_BYTES:
        raise CkptdError(f"the held slot ends before {fragment.key}", where=f"slot of rank {held.piece.rank}")
    return Source(held.piece.rank, fragment, data, sums, held.slot)


def _first_blocks(layout: Layout, tier: int) -> list[int]:
    """Index of each fragment's first block among those that a tier-``tier`` replica holds."""
    found, block = [], block_count(layout.objects_capacity)
    for fragment in layout.fragments:
        found.append(block)
        block += block_count(fragment.nbytes) if fragment.tier >= tier else 0
    return found


def _blobs(held: HeldPiece) -> list[ObjectBlob]:
    rank, record = held.piece.rank, held.record
    for block, at in enumerate(range(0, record.layout.objects_capacity, BLOCK_BYTES)):
        end = min(at + BLOCK_BYTES, record.layout.objects_capacity)
        if digest(held.payload[at:end]) != record.sums[block * SUM_BYTES : (block + 1) * SUM_BYTES]:
            raise SlotDamage(held.slot, rank, "", f"memory damage in the objects, block {block}")
    try:
        found = split_objects(held.payload[: record.objects_bytes])
    except ValueError as error:
        raise CkptdError(str(error), where=f"slot of rank {rank}") from error
    return [ObjectBlob(rank, name, blob) for name, blob in found.items()]
