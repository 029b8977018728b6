"""Where each wanted slice comes from: own memory, a peer's memory, parity, durable storage, per slice (design D11, P9)."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.box import Box, contains, intersect, merge, without
from ckptd.core.state_map.box_index import BoxIndex, Meetings, columns_of
from ckptd.core.state_map.columns import Flags, Ints
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.source_index import Copy, CutKind, CutParts, Held, SourceIndex

OWN, PEER, PARITY, DURABLE = "own", "peer", "parity", "durable"
HOLDERS_LOOKED_AT_MAX = 16  # of one slice
BY_PARITY = "*parity"  # in place of a node: the rank's slot can be had from parity


@dataclass(frozen=True, slots=True)
class Want:
    """A slice a rank needs; ``index`` is the caller's own number for it."""

    index: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


class Piece(NamedTuple):
    """Fill ``box`` of the want from this copy. It lies inside ``stored``, the box that is contiguous at the source.

    durable: node is "", rank is the wanting one and fragment -1; the reader takes (key, box).
    """

    want: int
    key: str
    box: Box
    source: str  # OWN | PEER | PARITY | DURABLE
    node: str
    rank: int
    fragment: int
    stored: Box
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """pieces cover each want exactly once, in the order of the wants, except for ``uncovered``.

    uncovered: (want index, box) found nowhere. mismatched: why sources of the wanted name were refused (dtype, shape).
    """

    pieces: tuple[Piece, ...]
    uncovered: tuple[tuple[int, Box], ...] = ()
    mismatched: tuple[str, ...] = ()

    def bytes_by_source(self) -> dict[str, int]:
        total = {OWN: 0, PEER: 0, PARITY: 0, DURABLE: 0}
        for piece in self.pieces:
            total[piece.source] += piece.nbytes
        return total


def plan_recovery(
    wants: Sequence[Want],
    sources: SourceIndex | Sequence[Held],
    own_node: str,
    rank: int,
    durable: BoxIndex | None = None,
    per_rank: Collection[str] = (),
) -> Plan:
    """The plan of one rank, whose daemon is ``own_node``.

    durable: what can be read from the committed checkpoint, by key as wanted or canonical; of a per-rank key what is of this rank.
    None: no durable source. per_rank: "t:key" names; such a key comes only from fragments of ``rank`` itself. Copies of the same
    slice are used evenly, by each rank in another order.
    """
    index = sources if isinstance(sources, SourceIndex) else SourceIndex(sources)
    return _Planner(index, wants, durable, own_node, rank, frozenset(per_rank)).plan()


_Met = tuple[int, Box, "Box | None"]  # a row of the memory sources, what it has of a wanted box, and its own if it is that very one


class _Near(NamedTuple):
    """A part of a want that is had whole from one kind of source: from any of these (node, rank, which fragment)."""

    both: Box
    stored: Box
    volume: int
    source: str
    copies: Sequence[Copy]


@dataclass
class _Planner:
    index: SourceIndex
    wants: Sequence[Want]
    durable: BoxIndex | None
    own_node: str
    rank: int
    per_rank: frozenset[str]
    pieces: list[Piece] = field(default_factory=list)
    uncovered: list[tuple[int, Box]] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    _asked: dict[str, int] = field(default_factory=dict)  # bytes planned from each peer
    _own_holders: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _known: dict[tuple[int, int], tuple[str, list[tuple[str, int]]]] = field(default_factory=dict)  # the nearest of a holder's tier
    _near: dict[CutParts, list[_Near]] = field(default_factory=dict)

    def plan(self) -> Plan:
        """Nearly all is had from boxes in memory that have no element in common, or else from storage alone: that is found for all
        wants together. The others are covered one by one."""
        self._own_holders = np.array(sorted(self.index.holders_on(self.own_node)), np.int64)
        keys = [self.index.canonical(want.key) for want in self.wants]
        offsets, sizes = columns_of([want.box for want in self.wants])
        volumes = sizes.prod(1)
        kinds = np.array([*map(self._kind, self.wants, keys)], np.int64)
        shared = np.array([f"t:{key}" not in self.per_rank for key in keys], bool)
        met: list[list[_Met]] = [[] for _ in self.wants]
        found = np.zeros(len(keys), np.int64)
        for meetings in self.index.boxes.meetings(kinds, offsets, sizes):
            self._note(met, meetings, offsets, sizes)
            np.add.at(found, meetings.want, meetings.sizes.prod(1))
        apart = _apart(self.index.boxes, kinds)
        cut = self._cut(kinds.tolist())
        for at, one in enumerate(cut):
            if one is not None:
                found[at], apart[at] = one[1].volume, True
        whole = (shared & (found == volumes) & apart).tolist()
        stored = ((found == 0) & self._is_stored(keys, offsets, sizes, volumes)).tolist()
        of_wants: list[Sequence[Piece]] = [()] * len(keys)
        gaps: list[Sequence[tuple[int, Box]]] = [()] * len(keys)
        # The largest first, so that the even use of peers is even in bytes.
        order = np.lexsort(([want.index for want in self.wants], -volumes))
        for at in order[: np.count_nonzero(volumes)].tolist():
            want, key, of = self.wants[at], keys[at], cut[at]
            self.pieces, self.uncovered = [], []
            if whole[at] and of is not None:
                self._take_parts(want, key, *of)
            elif whole[at]:
                for row, box, its in met[at]:
                    source, copies = self._nearest_of_row(row)
                    self._piece(want, key, box, source, copies, its or self.index.boxes.box(row, len(box.sizes)))
            elif stored[at]:
                self._piece(want, key, want.box, DURABLE, [Copy("", self.rank, -1)], want.box)
            else:
                self._cover(want, key, self._parts(want, met[at], of))
            if len(self.pieces) > 1:
                self.pieces.sort(key=lambda piece: piece.box.offsets)
            of_wants[at], gaps[at] = self.pieces, sorted(self.uncovered, key=lambda gap: gap[1].offsets)
        together = chain.from_iterable
        return Plan(tuple(together(of_wants)), tuple(together(gaps)), tuple(sorted(set(self.mismatched))))

    def _cut(self, kinds: Sequence[int]) -> list[tuple[CutKind, CutParts] | None]:
        """Of each want whose kind is cut apart, what it meets."""
        found: list[tuple[CutKind, CutParts] | None] = []
        for want, kind in zip(self.wants, kinds, strict=True):
            cut = self.index.cut(kind)
            found.append((cut, self.index.parts(cut, want.shape, want.box)) if cut is not None else None)
        return found

    def _take_parts(self, want: Want, key: str, cut: CutKind, parts: CutParts) -> None:
        """Where they are nearest is found once for all tensors that are cut alike."""
        near = self._near.get(parts)
        if near is None:
            near = self._near[parts] = [
                _Near(both, box, both.volume, *self._nearest(held)) for box, both, held in parts.parts
            ]
        for both, stored, volume, source, copies in near:
            self._piece(want, key, both, source, copies, stored, volume, cut.fragments)

    def _parts(self, want: Want, met: Sequence[_Met], of: tuple[CutKind, CutParts] | None) -> list[tuple[Box, list[Copy]]]:
        """What memory has that meets it."""
        dims = len(want.box.sizes)
        found = [(self.index.boxes.box(row, dims), self._copies(self.index.held(row))) for row, *_ in met]
        if of is not None:
            cut, parts = of
            for box, _, held in parts.parts:
                found.append((box, self._copies([(who, tier, cut.fragments[at]) for who, tier, at in held])))
        return found

    def _copies(self, held: Sequence[tuple[int, int, int]]) -> list[Copy]:
        return [Copy(node, rank, which) for who, tier, which in held for node, rank in self.index.usable(who, tier)]

    def _kind(self, want: Want, key: str) -> int:
        """-1: there is none of that key, or only of another dtype or shape."""
        kinds = self.index.kinds(key)
        found = kinds.get((want.dtype, want.shape), -1)
        if kinds and found < 0 and want.box.volume:
            stored = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
            self.mismatched.append(
                f"{want.key}: wanted {want.dtype}{list(want.shape)}, the snapshot has {stored}"
            )
        return found

    def _note(self, met: list[list[_Met]], meetings: Meetings, offsets: Ints, sizes: Ints) -> None:
        """``offsets``, ``sizes``: of the wants. Most are had as they are wanted: then no other box is made."""
        want, row, *_ = meetings
        alone = (meetings.sizes[:, : sizes.shape[1]] == sizes[want]).all(1).tolist()  # it has all of it
        same = self.index.boxes.equal(row, offsets[want], sizes[want]).tolist()
        columns = (column.tolist() for column in meetings)
        for at, row_, offset, size, all_of_it, equal in zip(*columns, alone, same, strict=True):
            box = self.wants[at].box
            dims = len(box.sizes)
            both = box if all_of_it else Box(tuple(offset[:dims]), tuple(size[:dims]))
            met[at].append((row_, both, box if equal else None))

    def _is_stored(self, keys: Sequence[str], offsets: Ints, sizes: Ints, volumes: Ints) -> Flags:
        """Of which wants storage has every element."""
        if self.durable is None:
            return np.zeros(len(keys), bool)
        numbers = np.array([*map(self._number, self.wants, keys)], np.int64)
        found = np.zeros(len(keys), np.int64)
        for meetings in self.durable.meetings(numbers, offsets, sizes):
            np.add.at(found, meetings.want, meetings.sizes.prod(1))
        stored: Flags = (found == volumes) & _apart(self.durable, numbers)
        return stored

    def _number(self, want: Want, key: str) -> int:
        """Among what is stored."""
        assert self.durable is not None
        for name in (key, want.key):
            found = self.durable.number(name, len(want.box.sizes))
            if found is not None:
                return found
        return -1

    def _cover(self, want: Want, key: str, found: list[tuple[Box, list[Copy]]]) -> None:
        """Box by box, those first that fill the want alone, then from the largest to the smallest."""
        dims, left = len(want.box.sizes), [want.box]
        if f"t:{key}" in self.per_rank:
            found = [(box, [copy for copy in copies if copy.rank == self.rank]) for box, copies in found]
        found.sort(key=lambda entry: (not contains(entry[0], want.box), -entry[0].volume, entry[0].offsets))
        for source in (OWN, PEER, PARITY):
            for box, copies in found:
                usable = [copy for copy in copies if self._source(copy) == source]
                if usable and left:
                    left = self._take(want, key, left, box, source, usable)
        if left and self.durable is not None:
            number = np.array([self._number(want, key)])
            for meetings in self.durable.meetings(number, *columns_of([want.box])):
                for row in meetings.row.tolist():
                    box = self.durable.box(row, dims)
                    left = self._take(want, key, left, box, DURABLE, [Copy("", self.rank, -1)])
        self.uncovered += [(want.index, box) for box in merge(left)]

    def _nearest_of_row(self, row: int) -> tuple[str, Sequence[Copy]]:
        if self.index.count(row) > HOLDERS_LOOKED_AT_MAX:  # of a value that all ranks have; each rank looks at others
            first = self.rank * HOLDERS_LOOKED_AT_MAX
            looked_at = self._copies(self.index.some_held(row, first, HOLDERS_LOOKED_AT_MAX, self._own_holders))
            if any(self._source(copy) != PARITY for copy in looked_at):
                return self._best(looked_at)
        return self._nearest(self.index.held(row))

    def _nearest(self, held: Sequence[tuple[int, int, int]]) -> tuple[str, Sequence[Copy]]:
        """Of copies. Nearly all have one holder's fragment, and all such of a tier lie on the same nodes."""
        if len(held) > 1:
            return self._best(self._copies(held))
        (who, tier, which), = held
        known = self._known.get((who, tier))
        if known is None:
            source, copies = self._best(self._copies(held))
            known = self._known[who, tier] = source, [copy[:2] for copy in copies]
        return known[0], [Copy(node, rank, which) for node, rank in known[1]]

    def _best(self, copies: Sequence[Copy]) -> tuple[str, Sequence[Copy]]:
        """The nearest of them."""
        if len(copies) == 1:
            return self._source(copies[0]), copies
        by_source: dict[str, list[Copy]] = {}
        for copy in copies:
            by_source.setdefault(self._source(copy), []).append(copy)
        source = next(source for source in (OWN, PEER, PARITY) if source in by_source)
        return source, by_source[source]

    def _source(self, copy: Copy) -> str:
        return OWN if copy.node == self.own_node else PARITY if copy.node == BY_PARITY else PEER

    def _take(
        self, want: Want, key: str, left: list[Box], stored: Box, source: str, copies: Sequence[Copy]
    ) -> list[Box]:
        """Fill what ``stored`` has of ``left``; return what is still missing."""
        missing: list[Box] = []
        for box in left:
            part = intersect(box, stored)
            if part is None:
                missing.append(box)
                continue
            self._piece(want, key, part, source, copies, stored)
            missing += without(box, part)
        return missing

    def _piece(
        self, want: Want, key: str, box: Box, source: str, copies: Sequence[Copy], stored: Box, volume: int | None = None,
        fragments: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """fragments: those that the copies name by their number in there."""
        nbytes = (box.volume if volume is None else volume) * ITEMSIZE[want.dtype]
        node, rank, fragment = copies[0] if source != PEER else self._least_asked(key, copies)
        if source == PEER:
            self._asked[node] = self._asked.get(node, 0) + nbytes
        number = fragments[fragment] if fragments else fragment
        self.pieces.append(Piece(want.index, key, box, source, node, rank, number, stored, nbytes))

    def _least_asked(self, key: str, copies: Sequence[Copy]) -> Copy:
        """The peer with the fewest bytes planned so far; among equals another one for each rank and key."""
        if len(copies) == 1:
            return copies[0]
        asked = [self._asked.get(copy.node, 0) for copy in copies]
        least = min(asked)
        if asked.count(least) == 1:
            return copies[asked.index(least)]

        def other_for_each(copy: Copy) -> tuple[int, Copy]:
            return zlib.crc32(f"{self.rank}|{key}|{copy.node}".encode()), copy

        return min((copy for copy, nbytes in zip(copies, asked, strict=True) if nbytes == least), key=other_for_each)


def _apart(boxes: BoxIndex, numbers: Ints) -> Flags:
    """Of each wanted box, whether those that it may meet have no element in common."""
    if not len(boxes.apart):
        return np.zeros(len(numbers), bool)
    apart: Flags = (numbers >= 0) & boxes.apart[np.maximum(numbers, 0)]
    return apart
