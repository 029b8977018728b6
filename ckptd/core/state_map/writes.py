"""Who writes what of a snapshot to durable storage: each logical slice once, evenly over its holders (design D12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Flags
from ckptd.core.state_map.layout import MAYBE, UNIQUE, Layout

OBJECTS = -1  # in place of a fragment's index
IN_ANY_COPY = 1 << 30  # a tier above each that there is


@dataclass(frozen=True, slots=True)
class _Slice:
    """Something to be written once. copies: (node, rank, fragment index or OBJECTS); the preferred ones come first."""

    nbytes: int
    copies: tuple[tuple[str, int, int], ...]
    tied: bool  # one rank's alone: stays with the slot's owner while that is no burden


class _Own(NamedTuple):
    """Fragments that are one rank's alone, of one tier: the same nodes hold all of them, the preferred ones first."""

    rank: int
    nodes: tuple[str, ...]
    fragments: list[int]
    nbytes: list[int]

    def slices(self) -> Iterator[_Slice]:
        for nbytes, fragment in zip(self.nbytes, self.fragments, strict=True):
            yield _Slice(nbytes, tuple((node, self.rank, fragment) for node in self.nodes), True)


def assign_writes(
    layouts: Mapping[int, Layout],
    holdings: Mapping[str, Sequence[tuple[int, int]]],
    per_rank: Collection[str] = (),
) -> dict[str, tuple[WritePiece, ...]]:
    """node -> what it writes; nodes with nothing to write are left out.

    layouts: of every rank; holdings: node -> (rank, tier) of each verified holding; per_rank: "t:key" of MAYBE tensors that
    differ between ranks, which each rank's holder writes. A rank's objects are written once per rank.
    ValueError: something is held nowhere (the snapshot is not complete).
    """
    slices, owned = _slices(layouts, _holders(holdings), frozenset(per_rank))
    load = dict.fromkeys(sorted(holdings), 0)
    total = sum(piece.nbytes for piece in slices) + sum(sum(own.nbytes) for own in owned)
    fair = -(-total // max(len(load), 1))
    chosen: dict[str, dict[int, list[int]]] = {}
    # What ranks have for themselves stays with their slots' owners where that is no burden for any: there may be millions of it.
    for own in owned:
        load[own.nodes[0]] += sum(own.nbytes)
    elsewhere = Counter(load)
    for piece in slices:
        if _nodes(piece) == 1:
            elsewhere[piece.copies[0][0]] += piece.nbytes
    if max(elsewhere.values(), default=0) <= fair:
        for own in owned:
            chosen.setdefault(own.nodes[0], {}).setdefault(own.rank, []).extend(own.fragments)
    else:
        load = dict.fromkeys(load, 0)
        slices += [one for own in owned for one in own.slices()]
    # What has one holder first, then the rest from the largest to the smallest.
    for piece in sorted(slices, key=lambda s: (_nodes(s) > 1, not s.tied, -s.nbytes, s.copies)):
        node, rank, fragment = _pick(piece, load, fair)
        load[node] += piece.nbytes
        chosen.setdefault(node, {}).setdefault(rank, []).append(fragment)
    return {
        node: tuple(_piece(layouts[rank], found) for rank, found in sorted(ranks.items()))
        for node, ranks in sorted(chosen.items())
    }


def _nodes(piece: _Slice) -> int:
    return len({node for node, _, _ in piece.copies})


def _pick(piece: _Slice, load: Mapping[str, int], fair: int) -> tuple[str, int, int]:
    """One rank's own slices stay together on its node up to a fair share: whole slots merge into larger boxes."""
    first = piece.copies[0]
    if piece.tied and load[first[0]] + piece.nbytes <= fair:
        return first
    return min(piece.copies, key=lambda copy: load[copy[0]])


def _holders(holdings: Mapping[str, Sequence[tuple[int, int]]]) -> dict[int, list[tuple[int, str]]]:
    """rank -> (tier, node), the fullest holding first, each node once."""
    best: dict[int, dict[str, int]] = {}
    for node, held in sorted(holdings.items()):
        for rank, tier in held:
            nodes = best.setdefault(rank, {})
            nodes[node] = min(tier, nodes.get(node, tier))
    return {rank: sorted((tier, node) for node, tier in nodes.items()) for rank, nodes in best.items()}


def _slices(
    layouts: Mapping[int, Layout], holders: Mapping[int, list[tuple[int, str]]], per_rank: frozenset[str]
) -> tuple[list[_Slice], list[_Own]]:
    result: list[_Slice] = []
    owned: list[_Own] = []
    shared: dict[tuple[str, Box], tuple[int, list[tuple[int, str, int, int]]]] = {}
    for rank, layout in sorted(layouts.items()):
        held = holders.get(rank, [])
        if not held:
            raise ValueError(f"rank {rank} is held nowhere")
        if layout.objects_capacity:
            everywhere = tuple((node, rank, OBJECTS) for _, node in held)
            result.append(_Slice(layout.objects_capacity, everywhere, True))
        own = _own(layout, per_rank)
        owned += _by_tier(layout, held, own)
        if own.all():
            continue
        for index, fragment in enumerate(layout.fragments):
            if not own[index]:
                copies = [(t, node, rank, index) for t, node in held if t <= fragment.tier or not fragment.nbytes]
                shared.setdefault((fragment.key, fragment.box), (fragment.nbytes, []))[1].extend(copies)
    result += [_slice(key, nbytes, copies, False) for (key, _), (nbytes, copies) in shared.items()]
    return result, owned


def _own(layout: Layout, per_rank: frozenset[str]) -> Flags:
    """Which of its fragments are the rank's alone in this snapshot."""
    own = layout.fragments.shared_as(UNIQUE)
    maybe = layout.fragments.shared_as(MAYBE)
    if maybe.any():
        own |= maybe & np.array([f"t:{key}" in per_rank for key in layout.fragments.table.keys], bool)
    return own


def _by_tier(layout: Layout, held: Sequence[tuple[int, str]], own: Flags) -> list[_Own]:
    """Raises ValueError naming what is held nowhere."""
    fragments, found = layout.fragments, []
    tiers = np.where(fragments.nbytes > 0, fragments.tier, IN_ANY_COPY)  # what has no bytes is in any copy
    for tier in np.unique(tiers[own]).tolist():
        which = np.flatnonzero(own & (tiers == tier))
        nodes = tuple(node for t, node in held if t <= tier)
        if not nodes:
            raise ValueError(f"{fragments.table.keys[which[0]]}: a slice is held nowhere")
        found.append(_Own(layout.rank, nodes, which.tolist(), fragments.nbytes[which].tolist()))
    return found


def _slice(key: str, nbytes: int, copies: list[tuple[int, str, int, int]], tied: bool) -> _Slice:
    if not copies:
        raise ValueError(f"{key}: a slice is held nowhere")
    return _Slice(nbytes, tuple(copy[1:] for copy in sorted(copies)), tied)


def _piece(layout: Layout, found: list[int]) -> WritePiece:
    fragments = tuple(sorted(index for index in found if index != OBJECTS))
    everything = len(fragments) == len(layout.fragments)
    return WritePiece(layout.rank, layout.layout_id, None if everything else fragments, OBJECTS in found)
