"""How many losses a snapshot survives now: the fewest failure domains that hold any one slice, less one (D8, P2, P3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ckptd.core.state_map.fragments import Shared, Table, standing_alike
from ckptd.core.state_map.layout import REPLICA, Layout

CACHED_MAX = 32  # sets of layouts; a job has one or two alive
OBJECTS_TIER = 1 << 30  # every replica holds the objects, whatever its tier


@dataclass(frozen=True, slots=True)
class Classes:
    """The slices of a snapshot, reduced to what can differ in who holds it.

    complete: there is a layout of every rank of one world. alone: (rank, tier) of the slice fewest replicas of that rank
    hold, among those that no other rank has. shared: for each set of copies by contract, the (rank, tier) of each copy.
    """

    complete: bool
    alone: tuple[tuple[int, int], ...]
    shared: tuple[tuple[tuple[int, int], ...], ...]


def slice_classes(layouts: Mapping[int, Layout]) -> Classes:
    """layouts: of every rank. Remembered by layout id, so it costs nothing while layouts stay the same."""
    ranks = tuple(sorted(layouts))
    ids = tuple((rank, layouts[rank].layout_id) for rank in ranks)
    return _classes(_Keyed(ids, tuple(layouts[rank] for rank in ranks)))


def level(
    classes: Classes,
    holders: Mapping[int, Collection[tuple[str, int]]],
    spared: Mapping[int, int] | None = None,
) -> int:
    """The number of failure domains that may be lost now without losing any slice; -1: something is held nowhere.

    holders: rank -> (failure domain, tier) of each verified holding of that rank's slot. A tier-t holding has the objects
    and the fragments of tier >= t; tier 0 is all of it. spared: rank -> how many domains may be lost before parity cannot
    bring its tier-1 prefix any more (parity sets.tolerance); whoever has both is counted by the better one.
    """
    if not classes.complete:
        return -1
    everywhere = {domain for found in holders.values() for domain, _ in found}
    by_parity = {rank: count + 1 for rank, count in (spared or {}).items()}
    fewest = max(len(everywhere), *by_parity.values()) if by_parity else len(everywhere)
    for rank, tier in classes.alone:
        domains = {domain for domain, held in holders.get(rank, ()) if held <= tier}
        fewest = min(fewest, max(len(domains), by_parity.get(rank, 0) if tier >= 1 else 0))
    for copies in classes.shared:
        domains = {domain for rank, tier in copies for domain, held in holders.get(rank, ()) if held <= tier}
        parity = max((by_parity.get(rank, 0) for rank, tier in copies if tier >= 1), default=0)
        fewest = min(fewest, max(len(domains), parity))
    return fewest - 1


@dataclass(frozen=True, slots=True)
class _Keyed:
    """Layouts that compare and hash by their ids."""

    ids: tuple[tuple[int, str], ...]
    layouts: tuple[Layout, ...] = field(compare=False)


@lru_cache(maxsize=CACHED_MAX)
def _classes(keyed: _Keyed) -> Classes:
    alone: dict[int, int] = {}
    known: dict[tuple[Table, Shared], int] = {}
    for (rank, _), layout in zip(keyed.ids, keyed.layouts, strict=True):
        fragments = layout.fragments
        if fragments.alike not in known:
            own = (fragments.nbytes > 0) & ~fragments.shared_as(REPLICA)
            known[fragments.alike] = int(fragments.tier[own].min(initial=OBJECTS_TIER))
        alone[rank] = known[fragments.alike]
    copies: dict[tuple[str, object], dict[int, int]] = {}  # of each slice: which ranks, all that stand alike as one, and its tier
    of_ranks = {rank: layout.fragments for (rank, _), layout in zip(keyed.ids, keyed.layouts, strict=True)}
    groups = standing_alike(of_ranks, lambda fragments: fragments.shared_as(REPLICA))
    for number, group in enumerate(groups):
        for _, fragment in group.rows:
            if fragment.nbytes:
                copies.setdefault((fragment.key, fragment.box), {})[number] = fragment.tier
    shared = [
        tuple(sorted((rank, tier) for number, tier in where for rank in groups[number].ranks))
        for where in {tuple(where.items()) for where in copies.values()}
    ]
    # Whoever holds the rank's rarest slice holds this one as well: it cannot be the minimum.
    needed = sorted({where for where in shared if all(tier < alone[rank] for rank, tier in where)})
    worlds = {layout.world for layout in keyed.layouts}
    complete = len(worlds) == 1 and sorted(alone) == list(range(max(worlds)))
    return Classes(complete, tuple(sorted(alone.items())), tuple(needed))
