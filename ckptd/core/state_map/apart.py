"""What is cut into parts that have no element in common, and which part meets a wanted box: found from the cuts, not from the boxes
of thousands of ranks (P16)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.box import Box, intersect
from ckptd.core.state_map.columns import Flags, Ints
from ckptd.core.state_map.cuts import Cut, box_at, part
from ckptd.core.state_map.fragments import Fragments, Table


class Part(NamedTuple):
    """Of a tensor: where it stands in each cut, its box, and what a wanted box has of it."""

    place: tuple[int, ...]
    box: Box
    both: Box


def parts_of(shape: tuple[int, ...], cuts: Sequence[Cut], wanted: Box, places: Collection[tuple[int, ...]]) -> list[Part]:
    """Those that the wanted box meets, of the ones that somebody has: at these places. There may be far more that nobody has."""
    found: list[tuple[tuple[int, ...], Box]] = [((), Box.whole(shape))]
    for dim, count in cuts:
        met = 0
        for _, box in found:
            met += len(_meeting(box, dim, count, wanted))
        if met > len(places):
            found = [(place, box_at(shape, [(*one, at) for one, at in zip(cuts, place, strict=True)])) for place in places]
            break
        found = [((*place, at), part(box, dim, count, at)) for place, box in found for at in _meeting(box, dim, count, wanted)]
    parts = ((place, box, intersect(box, wanted)) for place, box in found if place in places)
    return [Part(place, box, both) for place, box, both in parts if both is not None]


def _meeting(box: Box, dim: int, count: int, wanted: Box) -> range:
    """Which parts of it, cut in so many along a dimension, the wanted box may meet."""
    size, low = box.sizes[dim], wanted.offsets[dim] - box.offsets[dim]
    share = max(1, -(-size // count))
    return range(max(0, low) // share, min(count, -(-min(size, low + wanted.sizes[dim]) // share)))


def cut_apart(tables: Mapping[Table, Sequence[Fragments]], numbers: Mapping[Table, Ints], looked_at: Flags) -> Flags:
    """Of which of these kinds each rank has another part of the same cuts: no box of theirs need be looked at."""
    apart, times = np.zeros(len(looked_at), bool), np.zeros(len(looked_at), np.int64)
    for number in numbers.values():
        np.add.at(times, number, 1)
    several: dict[int, list[tuple[Table, int]]] = {}
    for table, number in numbers.items():
        distinct = np.array([False, *(_distinct(((table, rule),), tables) for rule in range(1, len(table.rules) + 1))])
        apart[number[distinct[table.rule] & (times[number] == 1)]] = True
        which = looked_at[number] & (times[number] > 1)
        for at, rule in zip(number[which].tolist(), table.rule[which].tolist(), strict=True):
            several.setdefault(at, []).append((table, rule))
    known: dict[tuple[tuple[Table, int], ...], bool] = {}
    for at, found in several.items():
        of = tuple(found)
        if of not in known:
            known[of] = _distinct(of, tables)
        apart[at] = known[of]
    return apart


def _distinct(found: Sequence[tuple[Table, int]], tables: Mapping[Table, Sequence[Fragments]]) -> bool:
    """Are all boxes of these rules of the same cuts, and no two at the same place?"""
    if not all(rule for _, rule in found) or len({table.rules[rule - 1] for table, rule in found}) > 1:
        return False
    places = [of.places[rule - 1] for table, rule in found for of in tables[table]]
    return len(set(places)) == len(places)
