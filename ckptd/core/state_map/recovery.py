"""Where each wanted slice comes from: own memory, a peer's memory, parity, durable storage, per slice (design D11, P9)."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptd.core.state_map.box import Box, contains, intersect, merge, without
from ckptd.core.state_map.box_index import BoxIndex, columns_of
from ckptd.core.state_map.columns import Flags, Ints
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.pieces import Form, Origin, Pieces, volumes_of
from ckptd.core.state_map.source_index import Copy, CutKind, CutParts, Held, SourceIndex

OWN, PEER, PARITY, DURABLE = "own", "peer", "parity", "durable"
HOLDERS_LOOKED_AT_MAX = 16  # of one slice
BY_PARITY = "*parity"  # in place of a node: the rank's slot can be had from parity


@dataclass(frozen=True, slots=True)
class Want:
    """A slice a rank needs; ``index`` is the caller's own number for it. ``rank``: whose value, of what was each rank's own; None:
    that of the rank that wants it."""

    index: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """pieces cover each want exactly once, in the order of the wants, except for ``uncovered``.

    uncovered: (want index, box) found nowhere. mismatched: why sources of the wanted name were refused (dtype, shape).
    """

    pieces: Pieces
    uncovered: tuple[tuple[int, Box], ...] = ()
    mismatched: tuple[str, ...] = ()


def plan_recovery(
    wants: Sequence[Want],
    sources: SourceIndex | Sequence[Held],
    own_node: str,
    rank: int,
    durable: BoxIndex | None = None,
    per_rank: Collection[str] = (),
    stored_of: Mapping[int, BoxIndex] | None = None,
) -> Plan:
    """The plan of one rank, whose daemon is ``own_node``.

    durable: what can be read from the committed checkpoint, by key as wanted or canonical; of a per-rank key what is of this rank.
    None: no durable source. per_rank: "t:key" names; such a key comes only from fragments of ``rank`` itself, or of the one that a
    want names. stored_of: what can be read of these. Copies of the same slice are used evenly, by each rank in another order.
    """
    index = sources if isinstance(sources, SourceIndex) else SourceIndex(sources)
    return _Planner(index, wants, durable, own_node, rank, frozenset(per_rank), stored_of or {}).plan()


_Row = tuple[int, tuple[int, ...], int, int, int]  # of a piece: which of the wants, where in it, form, origin, fragment


@dataclass
class _Planner:
    index: SourceIndex
    wants: Sequence[Want]
    durable: BoxIndex | None
    own_node: str
    rank: int
    per_rank: frozenset[str]
    stored_of: Mapping[int, BoxIndex]
    mismatched: list[str] = field(default_factory=list)
    _rows: list[_Row] = field(default_factory=list)
    _runs: list[Ints] = field(default_factory=list)  # the same in columns, but where, of wants that are cut alike
    _gaps: dict[int, list[Box]] = field(default_factory=dict)
    _forms: dict[Form, int] = field(default_factory=dict)
    _origins: dict[Origin, int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)  # bytes planned from each peer
    _own_holders: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _known: dict[tuple[int, int], tuple[str, list[tuple[str, int]]]] = field(default_factory=dict)  # the nearest of a holder's tier

    def plan(self) -> Plan:
        """Nearly all is had from boxes in memory that have no element in common, or else from storage alone: that is found for all
        wants together, and for tensors that are cut alike it is decided once. The others are covered one by one."""
        self._own_holders = np.array(sorted(self.index.holders_on(self.own_node)), np.int64)
        keys = [self.index.canonical(want.key) for want in self.wants]
        offsets, sizes = columns_of([want.box for want in self.wants])
        volumes = sizes.prod(1)
        kinds = np.array([*map(self._kind, self.wants, keys)], np.int64)
        shared = np.array([f"t:{key}" not in self.per_rank for key in keys], bool)
        met: list[list[int]] = [[] for _ in self.wants]  # rows of the memory sources
        found = np.zeros(len(keys), np.int64)
        for meetings in self.index.boxes.meetings(kinds, offsets, sizes):
            for at, row in zip(meetings.want.tolist(), meetings.row.tolist(), strict=True):
                met[at].append(row)
            np.add.at(found, meetings.want, meetings.sizes.prod(1))
        apart = _apart(self.index.boxes, kinds)
        cut = self._cut(kinds.tolist())
        for at, one in enumerate(cut):
            if one is not None:
                found[at], apart[at] = one[1].volume, True
        whole = (shared & (found == volumes) & apart).tolist()
        stored = ((found == 0) & self._is_stored(keys, offsets, sizes, volumes)).tolist()
        # The largest first, so that the even use of peers is even in bytes.
        order = np.lexsort(([want.index for want in self.wants], -volumes))[: np.count_nonzero(volumes)].tolist()
        alike: dict[tuple[CutParts, int], list[int]] = {}
        for at in order:
            of = cut[at]
            if whole[at] and of is not None:
                alike.setdefault((of[1], ITEMSIZE[self.wants[at].dtype]), []).append(at)
        for at in order:
            want, key, of = self.wants[at], keys[at], cut[at]
            if whole[at] and of is not None:
                several = alike.pop((of[1], ITEMSIZE[want.dtype]), [])
                if several:
                    fragments = np.array([of[0].fragments for of in map(cut.__getitem__, several) if of is not None])
                    self._take_parts(several, key, of[1], fragments)
            elif whole[at]:
                for row in met[at]:
                    its = self.index.boxes.box(row, len(want.box.sizes))
                    both = intersect(want.box, its)
                    assert both is not None, "they meet"
                    self._piece(at, key, both, *self._nearest_of_row(row), its)
            elif stored[at]:
                self._piece(at, key, want.box, DURABLE, [Copy("", self.rank, -1)], want.box)
            else:
                self._cover(at, key, self._parts(want, met[at], of))
        gaps = ((self.wants[at].index, box) for at, found in sorted(self._gaps.items()) for box in found)
        return Plan(self._pieces(keys), tuple(gaps), tuple(sorted(set(self.mismatched))))

    def _pieces(self, keys: Sequence[str]) -> Pieces:
        """In the order of the wants."""
        single = np.array([(at, *numbers) for at, _, *numbers in sorted(self._rows)], np.int64).reshape(-1, 4)
        rows = np.concatenate([single.T, *self._runs], 1)
        at, form, origin, fragment = rows[:, np.argsort(rows[0], kind="stable")]
        items = np.array([ITEMSIZE[want.dtype] for want in self.wants], np.int64)
        want = np.array([want.index for want in self.wants], np.int64)
        names = {want.index: key for want, key in zip(self.wants, keys, strict=True)}
        nbytes = volumes_of(form.box for form in self._forms)[form] * items[at]
        return Pieces(want[at], form, origin, fragment, nbytes, [*self._forms], [*self._origins], names)

    def _cut(self, kinds: Sequence[int]) -> list[tuple[CutKind, CutParts] | None]:
        """Of each want whose kind is cut apart, what it meets."""
        found: list[tuple[CutKind, CutParts] | None] = []
        for want, kind in zip(self.wants, kinds, strict=True):
            cut = self.index.cut(kind)
            found.append((cut, self.index.parts(cut.way, want.shape, want.box)) if cut is not None else None)
        return found

    def _take_parts(self, several: Sequence[int], key: str, parts: CutParts, fragments: Ints) -> None:
        """Of tensors that are cut alike. ``fragments``: a row for each of them, the fragments that copies name by their number."""
        which, form, origin, fragment = rows = np.empty((4, len(several), len(parts.parts)), np.int64)
        which[:] = np.array(several, np.int64)[:, None]
        for at, (box, both, held) in enumerate(parts.parts):
            source, copies = self._nearest(held)
            form[:, at] = self._form(both, box)
            nbytes = both.volume * ITEMSIZE[self.wants[several[0]].dtype]
            for copy, some in self._shares(key, source, copies, nbytes, len(several)):
                origin[some, at] = self._origin(source, copy)
                fragment[some, at] = fragments[some, copy.fragment]
        self._runs.append(rows.reshape(4, -1))

    def _shares(
        self, key: str, source: str, copies: Sequence[Copy], nbytes: int, count: int
    ) -> list[tuple[Copy, slice]]:
        """Which copy gives which of so many pieces of that size. Of peers those with the fewest bytes planned so far give more,
        until all have as many; among equals each rank and key begins with another one."""
        if source != PEER:
            return [(copies[0], slice(count))]

        def other_for_each(copy: Copy) -> tuple[int, int, Copy]:
            return self._asked.get(copy.node, 0), zlib.crc32(f"{self.rank}|{key}|{copy.node}".encode()), copy

        if count == 1:
            least = min([self._asked.get(copy.node, 0) for copy in copies])
            copy = min([copy for copy in copies if self._asked.get(copy.node, 0) == least], key=other_for_each)
            self._asked[copy.node] = least + nbytes
            return [(copy, slice(1))]
        copies = list({copy.node: copy for copy in sorted(copies, key=other_for_each, reverse=True)}.values())[::-1]
        asked, most = [self._asked.get(copy.node, 0) for copy in copies], len(copies)
        while most > 1 and asked[most - 1] * most >= sum(asked[:most]) + nbytes * count:  # it has given more than all will have to
            most -= 1
        level = (sum(asked[:most]) + nbytes * count) // most
        counts = [(level - before) // nbytes for before in asked[:most]]
        for _ in range(count - sum(counts)):
            counts[min(range(most), key=lambda at: asked[at] + counts[at] * nbytes)] += 1
        found, begin = [], 0
        for copy, before, some in zip(copies, asked, counts, strict=False):
            found += [(copy, slice(begin, begin + some))] if some else []
            self._asked[copy.node], begin = before + nbytes * some, begin + some
        return found

    def _form(self, box: Box, stored: Box) -> int:
        return self._forms.setdefault(Form(box, stored), len(self._forms))

    def _origin(self, source: str, copy: Copy) -> int:
        return self._origins.setdefault(Origin(source, copy.node, copy.rank), len(self._origins))

    def _parts(self, want: Want, met: Sequence[int], of: tuple[CutKind, CutParts] | None) -> list[tuple[Box, list[Copy]]]:
        """What memory has that meets it."""
        dims = len(want.box.sizes)
        found = [(self.index.boxes.box(row, dims), self._copies(self.index.held(row))) for row in met]
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

    def _is_stored(self, keys: Sequence[str], offsets: Ints, sizes: Ints, volumes: Ints) -> Flags:
        """Of which wants storage has every element. Those that name a rank are few, and looked at one by one."""
        durable = self.durable
        if durable is None:
            return np.zeros(len(keys), bool)
        pairs = zip(self.wants, keys, strict=True)
        numbers = np.array([-1 if want.rank is not None else _number(durable, want, key) for want, key in pairs], np.int64)
        found = np.zeros(len(keys), np.int64)
        for meetings in durable.meetings(numbers, offsets, sizes):
            np.add.at(found, meetings.want, meetings.sizes.prod(1))
        stored: Flags = (found == volumes) & _apart(durable, numbers)
        return stored

    def _cover(self, at: int, key: str, found: list[tuple[Box, list[Copy]]]) -> None:
        """Box by box, those first that fill the want alone, then from the largest to the smallest."""
        want = self.wants[at]
        dims, left = len(want.box.sizes), [want.box]
        whose, durable = (self.rank, self.durable) if want.rank is None else (want.rank, self.stored_of.get(want.rank))
        if f"t:{key}" in self.per_rank:
            found = [(box, [copy for copy in copies if copy.rank == whose]) for box, copies in found]
        found.sort(key=lambda entry: (not contains(entry[0], want.box), -entry[0].volume, entry[0].offsets))
        for source in (OWN, PEER, PARITY):
            for box, copies in found:
                usable = [copy for copy in copies if self._source(copy) == source]
                if usable and left:
                    left = self._take(at, key, left, box, source, usable)
        if left and durable is not None:
            number = np.array([_number(durable, want, key)])
            for meetings in durable.meetings(number, *columns_of([want.box])):
                for row in meetings.row.tolist():
                    left = self._take(at, key, left, durable.box(row, dims), DURABLE, [Copy("", whose, -1)])
        self._gaps[at] = merge(left)

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
        self, at: int, key: str, left: list[Box], stored: Box, source: str, copies: Sequence[Copy]
    ) -> list[Box]:
        """Fill what ``stored`` has of ``left``; return what is still missing."""
        missing: list[Box] = []
        for box in left:
            part = intersect(box, stored)
            if part is None:
                missing.append(box)
                continue
            self._piece(at, key, part, source, copies, stored)
            missing += without(box, part)
        return missing

    def _piece(self, at: int, key: str, box: Box, source: str, copies: Sequence[Copy], stored: Box) -> None:
        nbytes = box.volume * ITEMSIZE[self.wants[at].dtype]
        (copy, _), = self._shares(key, source, copies, nbytes, 1)
        self._rows.append((at, box.offsets, self._form(box, stored), self._origin(source, copy), copy.fragment))


def _number(stored: BoxIndex, want: Want, key: str) -> int:
    """Among what is stored; -1: it is not."""
    for name in (key, want.key):
        found = stored.number(name, len(want.box.sizes))
        if found is not None:
            return found
    return -1


def _apart(boxes: BoxIndex, numbers: Ints) -> Flags:
    """Of each wanted box, whether those that it may meet have no element in common."""
    if not len(boxes.apart):
        return np.zeros(len(numbers), bool)
    apart: Flags = (numbers >= 0) & boxes.apart[np.maximum(numbers, 0)]
    return apart
