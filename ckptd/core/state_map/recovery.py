"""Where each wanted slice comes from: own memory, a peer's memory, parity, durable storage, per slice (design D11, P9)."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.core.state_map.box import Box, contains, intersect, merge, without
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import Layout

OWN, PEER, PARITY, DURABLE = "own", "peer", "parity", "durable"
BY_PARITY = "*parity"  # in place of a node: the rank's slot can be had from parity


@dataclass(frozen=True, slots=True)
class Want:
    """A slice a rank needs; ``index`` is the caller's own number for it."""

    index: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class Held:
    """A verified holding of ``rank``'s slot on ``node``, or what parity brings of it (BY_PARITY, tier 1). tier 0: all of it; t:
    objects and fragments of tier >= t."""

    node: str
    rank: int
    tier: int
    layout: Layout


class Copy(NamedTuple):
    """One fragment (index in the layout of ``rank``) as held by one node."""

    node: str
    rank: int
    fragment: int


@dataclass(frozen=True, slots=True)
class Piece:
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


class SourceIndex:
    """Memory sources by key and box. Build it once for all ranks of a node: it walks every fragment of every layout."""

    def __init__(self, sources: Sequence[Held]) -> None:
        self._keys: dict[str, _Key] = {}
        self._aliases: dict[str, str] = {}
        by_layout: dict[tuple[int, str], list[Held]] = {}
        for source in sources:
            by_layout.setdefault((source.rank, source.layout.layout_id), []).append(source)
        for (rank, _), held in sorted(by_layout.items()):
            layout = held[0].layout
            self._aliases.update(layout.aliases)
            tiers = [(source.tier, source.node) for source in sorted(held, key=lambda s: (s.tier, s.node))]
            for index, fragment in enumerate(layout.fragments):
                copies = [
                    Copy(node, rank, index) for tier, node in tiers if tier == 0 or fragment.tier >= tier
                ]
                if copies and fragment.nbytes:
                    entry = self._keys.setdefault(fragment.key, _Key())
                    entry.add(fragment.dtype, fragment.shape, fragment.box, copies)

    def canonical(self, key: str) -> str:
        """The key under which an alias is stored."""
        return key if key in self._keys else self._aliases.get(key, key)

    def get(self, key: str) -> _Key | None:
        return self._keys.get(key)


def plan_recovery(
    wants: Sequence[Want],
    sources: SourceIndex | Sequence[Held],
    own_node: str,
    rank: int,
    durable: Mapping[str, Sequence[Box]] | None = None,
    per_rank: Collection[str] = (),
    damaged: Collection[tuple[str, int] | tuple[str, int, int]] = (),
) -> Plan:
    """The plan of one rank, whose daemon is ``own_node``.

    durable: key (as wanted or canonical) -> boxes that can be read from the committed checkpoint; for a per-rank key those
    of this rank. None: no durable source. per_rank: "t:key" names; such a key comes only from fragments of ``rank``
    itself. damaged: what not to use, a slot (node, rank) or a fragment of it (node, rank, index). Copies of the same slice
    are used evenly, by each rank in another order.
    """
    index = sources if isinstance(sources, SourceIndex) else SourceIndex(sources)
    planner = _Planner(index, durable or {}, own_node, rank, frozenset(per_rank), frozenset(damaged))
    # The largest first, so that the even use of peers is even in bytes.
    for want in sorted(wants, key=lambda want: (-want.box.volume, want.index)):
        planner.plan(want)
    place = {want.index: at for at, want in enumerate(wants)}
    pieces = sorted(planner.pieces, key=lambda piece: (place[piece.want], piece.box.offsets))
    gaps = sorted(planner.uncovered, key=lambda gap: (place[gap[0]], gap[1].offsets))
    return Plan(tuple(pieces), tuple(gaps), tuple(sorted(set(planner.mismatched))))


@dataclass
class _Kind:
    """What is stored under one key with one dtype and shape: each distinct box with its copies."""

    boxes: dict[Box, list[Copy]] = field(default_factory=dict)
    _sorted: tuple[int, int, list[int], list[Box]] | None = None

    def overlapping(self, box: Box) -> list[Box]:
        """Boxes that may meet ``box``: sorted along the dimension with the most cuts, found by bisection."""
        if not box.sizes or len(self.boxes) < 3:
            return list(self.boxes)
        if self._sorted is None:
            self._sorted = self._sort(len(box.sizes))
        dim, longest, starts, ordered = self._sorted
        low = bisect_left(starts, box.offsets[dim] - longest + 1)
        high = bisect_left(starts, box.offsets[dim] + box.sizes[dim])
        return ordered[low:high]

    def _sort(self, dims: int) -> tuple[int, int, list[int], list[Box]]:
        dim = max(range(dims), key=lambda d: len({box.offsets[d] for box in self.boxes}))
        ordered = sorted(self.boxes, key=lambda box: (box.offsets[dim], box.offsets, box.sizes))
        return dim, max(box.sizes[dim] for box in ordered), [box.offsets[dim] for box in ordered], ordered


@dataclass
class _Key:
    kinds: dict[tuple[str, tuple[int, ...]], _Kind] = field(default_factory=dict)

    def add(self, dtype: str, shape: tuple[int, ...], box: Box, copies: list[Copy]) -> None:
        self.kinds.setdefault((dtype, shape), _Kind()).boxes.setdefault(box, []).extend(copies)


@dataclass
class _Planner:
    index: SourceIndex
    durable: Mapping[str, Sequence[Box]]
    own_node: str
    rank: int
    per_rank: frozenset[str]
    damaged: frozenset[tuple[str, int] | tuple[str, int, int]]
    pieces: list[Piece] = field(default_factory=list)
    uncovered: list[tuple[int, Box]] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    _asked: dict[str, int] = field(default_factory=dict)  # bytes planned from each peer

    def plan(self, want: Want) -> None:
        if want.box.volume == 0:
            return
        key = self.index.canonical(want.key)
        found = self._copies(key, want)
        left = [want.box]
        for source in (OWN, PEER, PARITY):
            for box, copies in found:
                usable = [copy for copy in copies if self._kind(copy) == source]
                if usable and left:
                    left = self._take(want, key, left, box, source, usable)
        for box in self.durable.get(key) or self.durable.get(want.key, ()):
            if not left:
                return
            left = self._take(want, key, left, box, DURABLE, [Copy("", self.rank, -1)])
        self.uncovered += [(want.index, box) for box in merge(left)]

    def _copies(self, key: str, want: Want) -> list[tuple[Box, list[Copy]]]:
        """Usable copies by box: those that fill the want alone first, else from the largest to the smallest."""
        entry = self.index.get(key)
        if entry is None:
            return []
        kind = entry.kinds.get((want.dtype, tuple(want.shape)))
        if kind is None:
            stored = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(entry.kinds))
            self.mismatched.append(
                f"{want.key}: wanted {want.dtype}{list(want.shape)}, the snapshot has {stored}"
            )
            return []
        own_only = f"t:{key}" in self.per_rank
        result = []
        for box in kind.overlapping(want.box):
            if intersect(box, want.box) is None:
                continue
            copies = [copy for copy in kind.boxes[box] if self._usable(copy, own_only)]
            if copies:
                result.append((box, copies))
        result.sort(key=lambda entry: (not contains(entry[0], want.box), -entry[0].volume, entry[0].offsets))
        return result

    def _kind(self, copy: Copy) -> str:
        return OWN if copy.node == self.own_node else PARITY if copy.node == BY_PARITY else PEER

    def _usable(self, copy: Copy, own_only: bool) -> bool:
        if own_only and copy.rank != self.rank:
            return False
        return not self.damaged or (copy not in self.damaged and copy[:2] not in self.damaged)

    def _take(
        self, want: Want, key: str, left: list[Box], stored: Box, source: str, copies: list[Copy]
    ) -> list[Box]:
        """Fill what ``stored`` has of ``left``; return what is still missing."""
        missing: list[Box] = []
        for box in left:
            part = intersect(box, stored) if len(box.sizes) == len(stored.sizes) else None
            if part is None:
                missing.append(box)
                continue
            nbytes = part.volume * ITEMSIZE[want.dtype]
            copy = copies[0] if source != PEER else self._least_asked(key, copies)
            if source == PEER:
                self._asked[copy.node] = self._asked.get(copy.node, 0) + nbytes
            self.pieces.append(Piece(want.index, key, part, source, *copy, stored, nbytes))
            missing += without(box, part)
        return missing

    def _least_asked(self, key: str, copies: list[Copy]) -> Copy:
        """The peer with the fewest bytes planned so far; among equals another one for each rank and key."""
        if len(copies) == 1:
            return copies[0]

        def burden(copy: Copy) -> tuple[int, int, Copy]:
            return self._asked.get(copy.node, 0), zlib.crc32(f"{self.rank}|{key}|{copy.node}".encode()), copy

        return min(copies, key=burden)
