"""Where each wanted slice comes from: own memory, a peer's memory, parity, durable storage, per slice (design D11, P9)."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.apart import Part, cut_apart, parts_of
from ckptd.core.state_map.box import Box, contains, intersect, merge, without
from ckptd.core.state_map.box_index import BoxIndex, Meetings, columns_of
from ckptd.core.state_map.columns import Flags, Ints
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.fragments import Fragments, Kinds, Table
from ckptd.core.state_map.layout import Layout

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


_Kind = tuple[str, tuple[int, ...]]  # dtype and shape


class _Holders(NamedTuple):
    """Of one layout: the rank whose it is, (tier, node) of each holding, and the tiers of its fragments."""

    rank: int
    holdings: list[tuple[int, str]]
    tiers: list[int]


class Made(NamedTuple):
    """A row that is made for one who asks: its box, and which fragments of which holders it is."""

    box: Box
    held: list[tuple[int, int]]


# A row of the memory sources, what it has of a wanted box, and its own if it is that very one.
_Part = tuple["int | Made", Box, "Box | None"]


class SourceIndex:
    """Memory sources by key and box, in columns. Build it once for all ranks of a node: it holds every fragment of every layout.

    A *kind* is what is stored under one key with one dtype and shape: each distinct box of it is a row, with its copies. Of what
    each rank has another part of the same cuts there are no boxes: rows are made of those that somebody asks for.
    """

    def __init__(self, sources: Sequence[Held]) -> None:
        self._aliases: dict[str, str] = {}
        self._holders: list[_Holders] = []
        self._tiers: dict[Table, list[int]] = {}
        self._usable: dict[tuple[int, int], list[tuple[str, int]]] = {}
        by_layout: dict[tuple[int, str], list[Held]] = {}
        for source in sources:
            by_layout.setdefault((source.rank, source.layout.layout_id), []).append(source)
        dims = max((source.layout.fragments.table.dims_max for source in sources), default=0)
        kinds = Kinds()
        layouts = {which: held[0].layout.fragments for which, held in sorted(by_layout.items())}
        self._cut_kinds(kinds, list(layouts.values()))
        parts = [self._rows(which[0], held, dims, kinds) for which, held in sorted(by_layout.items())]
        nothing = np.empty((0, 3 + 2 * dims), np.int64)
        rows = np.concatenate([nothing, *parts])
        rows = rows[np.lexsort((rows[:, -2], *rows[:, -3::-1].T))]  # by kind, offsets and sizes, then by who holds them
        box = rows[:, :-2]
        first = np.flatnonzero(np.concatenate((np.ones(len(rows[:1]), bool), (box[1:] != box[:-1]).any(1))))
        self._copies_at, self._copies_end = first, np.append(first[1:], len(rows))
        self._copies = rows[:, -2:]
        box = box[first]
        self.boxes = BoxIndex.numbered(box[:, 0], len(kinds.number), box[:, 1 : 1 + dims], box[:, 1 + dims :])
        self._kinds: dict[str, dict[_Kind, int]] = {}
        some = np.diff(self.boxes.first) > 0  # is held
        for (key, dtype, shape), number in kinds.number.items():
            if some[number] or (0 not in shape and self._is_held(number)):
                self._kinds.setdefault(key, {})[dtype, shape] = number

    def _cut_kinds(self, kinds: Kinds, layouts: Sequence[Fragments]) -> None:
        """Which kinds are cut apart, by which tables' rules, and who stands where in them."""
        tables: dict[Table, list[Fragments]] = {}
        self._places: dict[tuple[Table, int], dict[tuple[int, ...], int]] = {}  # -> which of the holders
        for who, fragments in enumerate(layouts):
            tables.setdefault(fragments.table, []).append(fragments)
            for rule, place in enumerate(fragments.places, 1):
                self._places.setdefault((fragments.table, rule), {})[place] = who
        numbers = {table: kinds.of(found[0]) for table, found in tables.items()}
        self._apart = cut_apart(tables, numbers, np.ones(len(kinds.number), bool))
        self._cuts: dict[int, list[tuple[Table, int, int]]] = {}  # kind -> table, rule, fragment
        for table, number in numbers.items():
            for fragment in np.flatnonzero(self._apart[number]).tolist():
                self._cuts.setdefault(int(number[fragment]), []).append((table, int(table.rule[fragment]), fragment))
        self._known: dict[tuple[tuple[int, ...], tuple[tuple[Table, int], ...], Box], list[Part]] = {}

    def parts(self, want: Want, kind: int) -> list[_Part]:
        """What meets a wanted box of a kind that is cut apart, as rows made for it."""
        rules = self._cuts.get(kind, ())
        found: list[_Part] = []
        if not rules:
            return found
        cuts = rules[0][0].rules[rules[0][1] - 1]
        which = tuple((table, rule) for table, rule, _ in rules)
        known = want.shape, which, want.box
        if known not in self._known:
            places = set().union(*map(self._places.__getitem__, which))
            self._known[known] = parts_of(want.shape, cuts, want.box, places)
        for place, box, both in self._known[known]:
            there = ((self._places[table, rule].get(place), fragment) for table, rule, fragment in rules)
            held = [(who, fragment) for who, fragment in there if who is not None and self.usable(who, fragment)]
            if held:
                found.append((Made(box, held), both, box if box == want.box else None))
        return found

    def _is_held(self, kind: int) -> bool:
        """Of a kind that is cut apart."""
        rules = self._cuts.get(kind, ())
        return any(self.usable(who, of) for table, rule, of in rules for who in self._places[table, rule].values())

    def is_cut(self, kind: int) -> bool:
        return kind >= 0 and bool(self._apart[kind])

    def box(self, row: int | Made, dims: int) -> Box:
        return row.box if isinstance(row, Made) else self.boxes.box(row, dims)

    def _rows(self, rank: int, held: Sequence[Held], dims: int, kinds: Kinds) -> Ints:
        """Of each fragment that some holder has: kind, offsets, sizes, which of the holders, and its number in their layout."""
        layout = held[0].layout
        fragments = layout.fragments
        self._aliases.update(layout.aliases)
        tiers = sorted((source.tier, source.node) for source in held)
        if fragments.table not in self._tiers:
            self._tiers[fragments.table] = fragments.table.tier.tolist()
        self._holders.append(_Holders(rank, tiers, self._tiers[fragments.table]))
        number = kinds.of(fragments)
        if self._apart[number].all():
            return np.empty((0, 3 + 2 * dims), np.int64)
        some = (fragments.nbytes > 0) & ~self._apart[number]
        kept = np.flatnonzero(some & ((fragments.tier >= tiers[0][0]) | (tiers[0][0] == 0)))
        who = np.full(len(kept), len(self._holders) - 1)
        boxes = (column[kept] for column in fragments.boxes(dims))
        return np.column_stack((number[kept], *boxes, who, kept))

    def copies(self, row: int | Made) -> list[Copy]:
        """Of one of the rows."""
        return self.copies_of(self.held(row))

    def copies_of(self, held: Sequence[tuple[int, int]]) -> list[Copy]:
        return [Copy(node, rank, fragment) for who, fragment in held for node, rank in self.usable(who, fragment)]

    def holders_on(self, node: str) -> set[int]:
        """Of which layouts it holds something."""
        return {who for who, holders in enumerate(self._holders) if any(node == other for _, other in holders.holdings)}

    def held(self, row: int | Made) -> list[tuple[int, int]]:
        """Which fragments of which holders one of the rows is."""
        if isinstance(row, Made):
            return row.held
        rows: list[tuple[int, int]] = self._copies[self._copies_at[row] : self._copies_end[row]].tolist()
        return rows

    def usable(self, who: int, fragment: int) -> list[tuple[str, int]]:
        """(node, rank) of those who hold that fragment; one list for all fragments of a tier."""
        key = who, self.tier(who, fragment)
        if key not in self._usable:
            rank, holders, _ = self._holders[who]
            self._usable[key] = [(node, rank) for least, node in holders if least == 0 or key[1] >= least]
        return self._usable[key]

    def tier(self, who: int, fragment: int) -> int:
        return self._holders[who].tiers[fragment]

    def canonical(self, key: str) -> str:
        """The key under which an alias is stored."""
        return key if key in self._kinds else self._aliases.get(key, key)

    def kinds(self, key: str) -> dict[_Kind, int]:
        """Of a canonical key: the number of each among ``boxes``."""
        return self._kinds.get(key, {})


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
    planner = _Planner(index, wants, durable, own_node, rank, frozenset(per_rank))
    planner.plan()
    place = {want.index: at for at, want in enumerate(wants)}
    pieces = sorted(planner.pieces, key=lambda piece: (place[piece.want], piece.box.offsets))
    gaps = sorted(planner.uncovered, key=lambda gap: (place[gap[0]], gap[1].offsets))
    return Plan(tuple(pieces), tuple(gaps), tuple(sorted(set(planner.mismatched))))


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
    _own_holders: set[int] = field(default_factory=set)
    _known: dict[tuple[int, int], tuple[str, list[tuple[str, int]]]] = field(default_factory=dict)  # the nearest of a holder's tier

    def plan(self) -> None:
        """Nearly all is had from boxes in memory that have no element in common, or else from storage alone: that is found for all
        wants together. The others are covered one by one."""
        self._own_holders = self.index.holders_on(self.own_node)
        keys = [self.index.canonical(want.key) for want in self.wants]
        offsets, sizes = columns_of([want.box for want in self.wants])
        volumes = sizes.prod(1)
        kinds = np.array([*map(self._kind, self.wants, keys)], np.int64)
        shared = np.array([f"t:{key}" not in self.per_rank for key in keys], bool)
        met: list[list[_Part]] = [[] for _ in self.wants]
        found = np.zeros(len(keys), np.int64)
        for meetings in self.index.boxes.meetings(kinds, offsets, sizes):
            self._note(met, meetings, offsets, sizes)
            np.add.at(found, meetings.want, meetings.sizes.prod(1))
        apart = _apart(self.index.boxes, kinds)
        for at, (want, kind) in enumerate(zip(self.wants, kinds.tolist(), strict=True)):
            if self.index.is_cut(kind):
                met[at] = self.index.parts(want, kind)
                found[at], apart[at] = sum(both.volume for _, both, _ in met[at]), True
        whole = (shared & (found == volumes) & apart).tolist()
        stored = ((found == 0) & self._is_stored(keys, offsets, sizes, volumes)).tolist()
        # The largest first, so that the even use of peers is even in bytes.
        order = np.lexsort(([want.index for want in self.wants], -volumes))
        for at in order[: np.count_nonzero(volumes)].tolist():
            want, key = self.wants[at], keys[at]
            if whole[at]:
                for row, box, its in met[at]:
                    source, copies = self._nearest(row)
                    self._piece(want, key, box, source, copies, its or self.index.box(row, len(box.sizes)))
            elif stored[at]:
                self._piece(want, key, want.box, DURABLE, [Copy("", self.rank, -1)], want.box)
            else:
                self._cover(want, key, met[at])

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

    def _note(self, met: list[list[_Part]], meetings: Meetings, offsets: Ints, sizes: Ints) -> None:
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

    def _cover(self, want: Want, key: str, parts: Sequence[_Part]) -> None:
        """Box by box, those first that fill the want alone, then from the largest to the smallest."""
        dims, left = len(want.box.sizes), [want.box]
        found = [(self.index.box(row, dims), self.index.copies(row)) for row, *_ in parts]
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

    def _nearest(self, row: int | Made) -> tuple[str, Sequence[Copy]]:
        """Of its copies. Nearly all have one holder's fragment, and all such of a tier lie on the same nodes."""
        held = self.index.held(row)
        if len(held) > HOLDERS_LOOKED_AT_MAX:  # of a value that all ranks have; each rank looks at others
            first = self.rank * HOLDERS_LOOKED_AT_MAX % len(held)
            own = [one for one in held if one[0] in self._own_holders]
            few = own or [*held[first:], *held[:first]][:HOLDERS_LOOKED_AT_MAX]
            looked_at = self.index.copies_of(few)
            if any(self._source(copy) != PARITY for copy in looked_at):
                return self._best(looked_at)
        if len(held) > 1:
            return self._best(self.index.copies(row))
        (who, fragment), = held
        key = who, self.index.tier(who, fragment)
        known = self._known.get(key)
        if known is None:
            source, copies = self._best(self.index.copies(row))
            known = self._known[key] = source, [copy[:2] for copy in copies]
        return known[0], [Copy(node, rank, fragment) for node, rank in known[1]]

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
        self, want: Want, key: str, box: Box, source: str, copies: Sequence[Copy], stored: Box
    ) -> None:
        nbytes = box.volume * ITEMSIZE[want.dtype]
        copy = copies[0] if source != PEER else self._least_asked(key, copies)
        if source == PEER:
            self._asked[copy.node] = self._asked.get(copy.node, 0) + nbytes
        self.pieces.append(Piece(want.index, key, box, source, *copy, stored, nbytes))

    def _least_asked(self, key: str, copies: Sequence[Copy]) -> Copy:
        """The peer with the fewest bytes planned so far; among equals another one for each rank and key."""
        if len(copies) == 1:
            return copies[0]

        def burden(copy: Copy) -> tuple[int, int, Copy]:
            return self._asked.get(copy.node, 0), zlib.crc32(f"{self.rank}|{key}|{copy.node}".encode()), copy

        return min(copies, key=burden)


def _apart(boxes: BoxIndex, numbers: Ints) -> Flags:
    """Of each wanted box, whether those that it may meet have no element in common."""
    if not len(boxes.apart):
        return np.zeros(len(numbers), bool)
    apart: Flags = (numbers >= 0) & boxes.apart[np.maximum(numbers, 0)]
    return apart
