"""Who writes what of a snapshot to durable storage: each logical slice once, evenly over its holders (design D12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Flags, Ints
from ckptd.core.state_map.fragments import Alike, Shared, Table, standing_alike
from ckptd.core.state_map.layout import MAYBE, UNIQUE, Layout

OBJECTS = -1  # in place of a fragment's index
IN_ANY_COPY = 1 << 30  # a tier above each that there is
SHARED_RANKS_MAX = 16  # of those that have a slice, one of which writes it: of each slice other ones

_Copies = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Something to be written once. copies: (node, rank, fragment index or OBJECTS); the preferred ones come first."""

    nbytes: int
    copies: _Copies
    tied: bool  # one rank's alone: stays with the slot's owner while that is no burden


class _Own(NamedTuple):
    """Fragments that are one rank's alone, of one tier: the same nodes hold all of them, the preferred ones first."""

    rank: int
    nodes: tuple[str, ...]
    fragments: Ints
    nbytes: Ints
    total: int


class _Alone(NamedTuple):
    """What ranks that are alike have for themselves, and what others may have too. by_tier: tier, which fragments, their bytes, and
    all of those together."""

    others: Flags
    all: bool
    by_tier: list[tuple[int, Ints, Ints, int]]


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
    total = sum(piece.nbytes for piece in slices) + sum(own.total for own in owned)
    fair = -(-total // max(len(load), 1))
    chosen: _Chosen = {}
    # What ranks have for themselves stays with their slots' owners where that is no burden for any: there may be millions of it.
    for own in owned:
        load[own.nodes[0]] += own.total
    elsewhere = Counter(load)
    for piece in slices:
        if _nodes(piece) == 1:
            elsewhere[piece.copies[0][0]] += piece.nbytes
    stays = max(elsewhere.values(), default=0) <= fair
    if stays:
        for own in owned:
            chosen.setdefault(own.nodes[0], {}).setdefault(own.rank, []).append(own.fragments)
    else:
        load = dict.fromkeys(load, 0)
    # What has one holder first, then what is shared out in runs, then the rest from the largest to the smallest.
    slices.sort(key=lambda s: (_nodes(s) > 1, not s.tied, -s.nbytes, s.copies))
    single = next((at for at, piece in enumerate(slices) if _nodes(piece) > 1), len(slices))
    _write(slices[:single], load, fair, chosen)
    if not stays:
        _share_out(owned, load, fair, chosen)
    _write(slices[single:], load, fair, chosen)
    return {
        node: tuple(_piece(layouts[rank], found) for rank, found in sorted(ranks.items()))
        for node, ranks in sorted(chosen.items())
    }


_Chosen = dict[str, dict[int, list[Ints]]]  # node -> rank -> fragments


def _write(slices: Sequence[_Slice], load: dict[str, int], fair: int, chosen: _Chosen) -> None:
    for piece in slices:
        node, rank, fragment = _pick(piece, load, fair)
        load[node] += piece.nbytes
        chosen.setdefault(node, {}).setdefault(rank, []).append(np.array([fragment]))


def _share_out(owned: Sequence[_Own], load: dict[str, int], fair: int, chosen: _Chosen) -> None:
    """In one run of a rank's fragments for each of its holders, as long as a fair share has room for, or as makes them even: there
    may be millions of fragments. Those with the fewest holders first."""
    for own in sorted(owned, key=lambda own: (len(own.nodes), -own.total, own.rank)):
        ends = np.cumsum(own.nbytes)
        at = taken = 0
        nodes = [own.nodes[0], *sorted(own.nodes[1:], key=lambda node: (load[node], node))]
        most = max(fair, _even([load[node] for node in nodes], own.total))
        for node in nodes:
            fits = int(np.searchsorted(ends, taken + max(0, most - load[node]), "right"))
            end = len(ends) if node == nodes[-1] else max(at, fits)
            if end > at:
                load[node] += int(ends[end - 1]) - taken
                chosen.setdefault(node, {}).setdefault(own.rank, []).append(own.fragments[at:end])
                at, taken = end, int(ends[end - 1])


def _even(loads: Sequence[int], more: int) -> int:
    """What all have that are not above it anyway, when so much more is shared out among them."""
    ordered = sorted(loads)
    levels = ((sum(ordered[:count]) + more) // count for count in range(1, len(ordered) + 1))
    return min(levels)


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
    alone: dict[tuple[Table, Shared], _Alone] = {}
    for rank, layout in sorted(layouts.items()):
        held = holders.get(rank, [])
        if not held:
            raise ValueError(f"rank {rank} is held nowhere")
        if layout.objects_capacity:
            everywhere = tuple((node, rank, OBJECTS) for _, node in held)
            result.append(_Slice(layout.objects_capacity, everywhere, True))
        alike = layout.fragments.alike
        if alike not in alone:
            alone[alike] = _own(layout, per_rank)
        owned += _by_tier(layout, held, alone[alike])
    groups = standing_alike(
        {rank: layout.fragments for rank, layout in layouts.items()}, lambda fragments: alone[fragments.alike].others
    )
    return result + _shared(groups, holders), owned


def _shared(groups: Sequence[Alike], holders: Mapping[int, list[tuple[int, str]]]) -> list[_Slice]:
    """What several ranks may have, once."""
    found: dict[tuple[str, Box], tuple[int, list[tuple[int, int, int]]]] = {}  # bytes; group, which of its fragments, tier
    for number, group in enumerate(groups):
        for index, fragment in group.rows:
            found.setdefault((fragment.key, fragment.box), (fragment.nbytes, []))[1].append((number, index, fragment.tier))
    everyone: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # the ranks of these groups, and of which group each is
    result = []
    for number, ((key, _), (nbytes, has)) in enumerate(found.items()):
        which = tuple(group for group, _, _ in has)
        if which not in everyone:
            everyone[which] = sorted((rank, at) for at, group in enumerate(which) for rank in groups[group].ranks)
        ranks = everyone[which]
        first = number * SHARED_RANKS_MAX % len(ranks)
        few = ranks[first : first + SHARED_RANKS_MAX]
        few += ranks[: min(first, SHARED_RANKS_MAX - len(few))]
        copies = _copies(few, has, nbytes, holders) or _copies(ranks, has, nbytes, holders)
        if not copies:
            raise ValueError(f"{key}: a slice is held nowhere")
        result.append(_Slice(nbytes, copies, False))
    return result


def _copies(
    ranks: Iterable[tuple[int, int]], has: Sequence[tuple[int, int, int]], nbytes: int, holders: Mapping[int, list[tuple[int, str]]]
) -> _Copies:
    """ranks: and which of ``has`` is theirs. What has no bytes is in any copy."""
    found = [(t, node, rank, has[at][1]) for rank, at in ranks for t, node in holders[rank] if t <= has[at][2] or not nbytes]
    return tuple(copy[1:] for copy in sorted(found))


def _own(layout: Layout, per_rank: frozenset[str]) -> _Alone:
    """Which of its fragments are the rank's alone in this snapshot."""
    fragments = layout.fragments
    own = fragments.shared_as(UNIQUE)
    maybe = fragments.shared_as(MAYBE)
    if maybe.any():
        own |= maybe & np.array([f"t:{key}" in per_rank for key in fragments.table.keys], bool)
    tiers = np.where(fragments.nbytes > 0, fragments.tier, IN_ANY_COPY)  # what has no bytes is in any copy
    by_tier = []
    for tier in np.unique(tiers[own]).tolist():
        which = np.flatnonzero(own & (tiers == tier))
        nbytes = fragments.nbytes[which]
        by_tier.append((tier, which, nbytes, int(nbytes.sum())))
    return _Alone(~own, bool(own.all()), by_tier)


def _by_tier(layout: Layout, held: Sequence[tuple[int, str]], own: _Alone) -> list[_Own]:
    """Raises ValueError naming what is held nowhere."""
    found = []
    for tier, which, nbytes, total in own.by_tier:
        nodes = tuple(node for t, node in held if t <= tier)
        if not nodes:
            raise ValueError(f"{layout.fragments.table.keys[which[0]]}: a slice is held nowhere")
        found.append(_Own(layout.rank, nodes, which, nbytes, total))
    return found


def _piece(layout: Layout, found: Sequence[Ints]) -> WritePiece:
    parts = np.concatenate(found)
    objects = bool((parts == OBJECTS).any())
    if len(parts) - objects == len(layout.fragments):
        return WritePiece(layout.rank, layout.layout_id, None, objects)
    return WritePiece(layout.rank, layout.layout_id, _runs(np.sort(parts[parts != OBJECTS], kind="stable")), objects)


def _runs(numbers: Ints) -> tuple[tuple[int, int], ...]:
    if not len(numbers):
        return ()
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    first, last = numbers[np.append(0, breaks + 1)], numbers[np.append(breaks, len(numbers) - 1)]
    return tuple(zip(first.tolist(), (last + 1).tolist(), strict=True))
