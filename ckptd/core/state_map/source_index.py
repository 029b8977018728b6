"""What memory holds of a snapshot, by key and box: made once for all ranks of a node (design D11, P16)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.apart import cut_apart, parts_of
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.columns import Ints
from ckptd.core.state_map.fragments import Fragments, Kinds, Table
from ckptd.core.state_map.layout import Layout


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


_Kind = tuple[str, tuple[int, ...]]  # dtype and shape


class _Holders(NamedTuple):
    """Of one layout: the rank whose it is, (tier, node) of each holding, and the tiers of its fragments."""

    rank: int
    holdings: list[tuple[int, str]]
    tiers: list[int]


class CutPart(NamedTuple):
    """A part of what is cut apart, and what a wanted box has of it. ``held``: whose fragment it is, of which tier, and which of
    ``CutKind.fragments``."""

    box: Box
    both: Box
    held: tuple[tuple[int, int, int], ...]


class CutParts:
    """All of them that a wanted box meets, in order; the same for all tensors of one shape that are cut alike."""

    def __init__(self, parts: Sequence[CutPart]) -> None:
        self.parts = sorted(parts, key=lambda part: part.both.offsets)
        self.volume = sum(part.both.volume for part in parts)


class Way(NamedTuple):
    """How a kind is cut apart: by which rules of which tables, and the tier of its fragments in the layouts of each."""

    rules: tuple[tuple[Table, int], ...]
    tiers: tuple[int, ...]


class CutKind(NamedTuple):
    """``way``: its number among the ways, which are few. ``fragments``: which it is in the layouts of each of its tables."""

    way: int
    fragments: tuple[int, ...]


class SourceIndex:
    """Memory sources by key and box, in columns. Build it once for all ranks of a node: it holds every fragment of every layout.

    A *kind* is what is stored under one key with one dtype and shape: each distinct box of it is a row, with its copies. Of what
    each rank has another part of the same cuts there are no boxes: rows are made of those that somebody asks for.
    """

    def __init__(self, sources: Sequence[Held], keys: Collection[str] | None = None) -> None:
        """keys: what will be asked for, as wanted and canonical; None: anything. Whoever has none of it is left out."""
        if keys is not None:
            found = {source.layout.fragments.table for source in sources}
            needed = {table for table in found if not table.names.isdisjoint(keys)}
            sources = [source for source in sources if source.layout.fragments.table in needed]
        self._aliases: dict[str, str] = {}
        self._holders: list[_Holders] = []
        self._tiers: dict[Table, list[int]] = {}
        self._usable: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._rules: dict[Table, list[int]] = {}  # of what is not cut apart
        self._loose_rows: dict[tuple[object, ...], Ints] = {}
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
        held_ways = list(map(self._is_held, self._ways))
        for (key, dtype, shape), number in kinds.number.items():
            cut = self._cuts.get(number)
            if some[number] or (cut is not None and held_ways[cut.way] and 0 not in shape):
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
        found: dict[int, list[tuple[tuple[Table, int], int, int]]] = {}
        for table, number in numbers.items():
            some = np.flatnonzero(self._apart[number])
            of_each = zip(number[some].tolist(), table.rule[some].tolist(), table.tier[some].tolist(), some.tolist(), strict=True)
            for kind, rule, tier, fragment in of_each:
                found.setdefault(kind, []).append(((table, rule), tier, fragment))
        ways: dict[Way, int] = {}
        self._cuts: dict[int, CutKind] = {}
        for kind, parts in found.items():
            rules, tiers, which = zip(*parts, strict=True)
            self._cuts[kind] = CutKind(ways.setdefault(Way(rules, tiers), len(ways)), which)
        self._ways = list(ways)
        self._known: dict[tuple[int, tuple[int, ...], Box], CutParts] = {}

    def cut(self, kind: int) -> CutKind | None:
        """None: it is not cut apart."""
        return self._cuts.get(kind)

    def parts(self, way: int, shape: tuple[int, ...], wanted: Box) -> CutParts:
        """What meets a wanted box of a kind of this shape that is cut apart in this way."""
        known = way, shape, wanted
        found = self._known.get(known)
        if found is None:
            found = self._known[known] = CutParts(self._parts(self._ways[way], shape, wanted))
        return found

    def _parts(self, way: Way, shape: tuple[int, ...], wanted: Box) -> list[CutPart]:
        places = set().union(*map(self._places.__getitem__, way.rules))
        (table, rule), *_ = way.rules
        found = []
        for place, box, both in parts_of(shape, table.rules[rule - 1], wanted, places):
            there = (self._places[which].get(place) for which in way.rules)
            held = [(who, tier, at) for at, (who, tier) in enumerate(zip(there, way.tiers, strict=True)) if who is not None]
            held = [one for one in held if self.usable(*one[:2])]
            if held:
                found.append(CutPart(box, both, tuple(held)))
        return found

    def _is_held(self, way: Way) -> bool:
        """Whether anybody has a part of what is cut in this way."""
        which = zip(way.rules, way.tiers, strict=True)
        return any(self.usable(who, tier) for rule, tier in which for who in self._places[rule].values())

    def _rows(self, rank: int, held: Sequence[Held], dims: int, kinds: Kinds) -> Ints:
        """Of each fragment that some holder has: kind, offsets, sizes, which of the holders, and its number in their layout."""
        layout = held[0].layout
        fragments = layout.fragments
        self._aliases.update(layout.aliases)
        tiers = sorted((source.tier, source.node) for source in held)
        if fragments.table not in self._tiers:
            self._tiers[fragments.table] = fragments.table.tier.tolist()
        self._holders.append(_Holders(rank, tiers, self._tiers[fragments.table]))
        rows = self._loose(fragments, tiers[0][0], dims, kinds.of(fragments))
        return np.column_stack((rows[:, :-1], np.full(len(rows), len(self._holders) - 1), rows[:, -1]))

    def _loose(self, fragments: Fragments, least: int, dims: int, number: Ints) -> Ints:
        """The same without the holder, of all that is not cut apart: once for all ranks that stand alike in it."""
        table, loose = fragments.table, ~self._apart[number]
        if table not in self._rules:
            self._rules[table] = np.unique(table.rule[loose]).tolist()
        known = least, fragments.standing(self._rules[table])
        if known not in self._loose_rows:
            some = loose & (fragments.nbytes > 0)
            kept = np.flatnonzero(some & ((fragments.tier >= least) | (least == 0)))
            boxes = (column[kept] for column in fragments.boxes(dims))
            self._loose_rows[known] = np.column_stack((number[kept], *boxes, kept))
        return self._loose_rows[known]

    def holders_on(self, node: str) -> set[int]:
        """Of which layouts it holds something."""
        return {who for who, holders in enumerate(self._holders) if any(node == other for _, other in holders.holdings)}

    def held(self, row: int) -> list[tuple[int, int, int]]:
        """Of one of the rows: whose fragment it is, of which tier, and which."""
        return self._with_tiers(self._copies[self._copies_at[row] : self._copies_end[row]])

    def some_held(self, row: int, first: int, most: int, own: Ints) -> list[tuple[int, int, int]]:
        """The same, where very many have it: those of ``own`` (whose fragments), or so many from the one of this number on."""
        rows = self._copies[self._copies_at[row] : self._copies_end[row]]
        owned = rows[np.isin(rows[:, 0], own)]
        return self._with_tiers(owned if len(owned) else np.roll(rows, -(first % len(rows)), 0)[:most])

    def count(self, row: int) -> int:
        """How many have it."""
        return int(self._copies_end[row] - self._copies_at[row])

    def _with_tiers(self, rows: Ints) -> list[tuple[int, int, int]]:
        return [(who, self._holders[who].tiers[fragment], fragment) for who, fragment in rows.tolist()]

    def usable(self, who: int, tier: int) -> list[tuple[str, int]]:
        """(node, rank) of those who hold fragments of that tier; one list for all of them."""
        if (who, tier) not in self._usable:
            rank, holders, _ = self._holders[who]
            self._usable[who, tier] = [(node, rank) for least, node in holders if least == 0 or tier >= least]
        return self._usable[who, tier]

    def canonical(self, key: str) -> str:
        """The key under which an alias is stored."""
        return key if key in self._kinds else self._aliases.get(key, key)

    def kinds(self, key: str) -> dict[_Kind, int]:
        """Of a canonical key: the number of each among ``boxes``."""
        return self._kinds.get(key, {})
