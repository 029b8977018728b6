"""If it failed now: the step that a restore would come back to, and about how long that would take (RPO and RTO).

What a failure costs is the training since the snapshot that it leaves, and the way back to it; GEMINI (SOSP '23, section 2) calls
the sum wasted time. Here are the first from what is held now, and the second from what was measured (core.pacing.rates).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.core.ids import SnapshotId
from ckptd.core.pacing.rates import Estimate, Rates
from ckptd.core.redundancy.parity_sets import ParitySet, tolerance
from ckptd.core.redundancy.protection import Classes
from ckptd.core.state_map.recovery import DURABLE, OWN, PARITY, PEER

PROCESS, NODE, DOMAIN, ALL = "process", "node", "domain", "all"
FAILURES = (PROCESS, NODE, DOMAIN, ALL)


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot that could be restored now. level: failure domains whose loss its memory survives, -1: memory lacks a part.

    critical_nodes, critical_domains: each of them alone takes a part of it along; None: not known here who holds what, the
    level is all there is. parity: some of its ranks are protected by parity.
    """

    snapshot: SnapshotId
    level: int
    durable: bool
    parity: bool = False
    critical_nodes: frozenset[str] | None = None
    critical_domains: frozenset[str] | None = None


@dataclass(frozen=True)
class Situation:
    """points: candidates for a restore. trained: the newest step that any rank called, -1: none. homes: node of each rank.
    domains: node -> failure domain, of the nodes that are up. rank_bytes: of one snapshot, as far as known; where it is not, as
    much as the largest."""

    points: Sequence[Point]
    trained: int
    homes: Sequence[str] = ()
    domains: Mapping[str, str] | None = None
    rank_bytes: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Outlook:
    """One class of failure. step: -1 when nothing is left, and training begins anew. victim: the node or domain whose loss costs
    most; "": they are alike. exact: false where it follows from levels alone, which may be too pessimistic. move_bytes: brought
    from elsewhere, by all ranks together."""

    failure: str
    step: int
    source: str
    lost_steps: int
    victim: str
    exact: bool
    move_bytes: int
    estimate: Estimate


def outlooks(now: Situation, rates: Rates) -> tuple[Outlook, ...]:
    """One for each of FAILURES."""
    return tuple(_outlook(failure, now, rates) for failure in FAILURES)


def _outlook(failure: str, now: Situation, rates: Rates) -> Outlook:
    victim, alike = _worst(failure, now)
    point = left(now.points, failure, victim)
    step = point.snapshot.step if point is not None else -1
    source = _source(failure, point, victim)
    slots = _slots(now)
    per_rank = max([*slots, rates.loaded_bytes])
    named = "" if alike else victim
    moving = _moving(failure, source, named, now)
    return Outlook(
        failure, step, source, max(0, now.trained - max(step, 0)), named, _is_exact(failure, point, now),
        sum(max(slots[rank], rates.loaded_bytes) for rank in moving),
        rates.estimate(per_rank, {OWN, source} if source in (PEER, PARITY) else {source}),
    )  # fmt: skip


# --- what is left --------------------------------------------------------------------------------------------------------
def survives(point: Point, failure: str, victim: str) -> bool:
    """Is it whole in memory after this?"""
    if failure == ALL or point.level < 0:
        return False
    if failure == PROCESS or point.level >= 1:
        return True
    critical = point.critical_nodes if failure == NODE else point.critical_domains
    return critical is not None and victim not in critical


def left(points: Iterable[Point], failure: str, victim: str) -> Point | None:
    """The newest one that could be restored afterwards; None: none."""
    found = [point for point in points if point.durable or survives(point, failure, victim)]
    return max(found, key=lambda point: point.snapshot, default=None)


def _worst(failure: str, now: Situation) -> tuple[str, bool]:
    """The victim whose loss throws training back furthest, or as far but with more to read from storage; are all alike?"""
    costs: dict[str, tuple[SnapshotId, bool]] = {}
    for victim in _victims(failure, now):
        point = left(now.points, failure, victim)
        costs[victim] = _order(point), point is not None and survives(point, failure, victim)
    worst = min(sorted(costs), key=lambda victim: costs[victim])
    return worst, len(set(costs.values())) == 1 and len(costs) > 1


def _order(point: Point | None) -> SnapshotId:
    return point.snapshot if point is not None else SnapshotId(-1, -1)


def _victims(failure: str, now: Situation) -> Sequence[str]:
    """Also those outside the epoch that hold memory of an ancestor."""
    domains = now.domains or {}
    critical = {place for p in now.points for place in (_critical(p, failure) or ())}
    if failure == NODE:
        return sorted({*domains, *critical}) or ("",)
    if failure == DOMAIN:
        return sorted({*domains.values(), *critical}) or ("",)
    return ("",)


def _critical(point: Point, failure: str) -> frozenset[str] | None:
    if failure == NODE:
        return point.critical_nodes
    return point.critical_domains if failure == DOMAIN else None


def _is_exact(failure: str, found: Point | None, now: Situation) -> bool:
    """Levels alone say nothing of a newer snapshot whose level is 0: perhaps this node or that one could be lost."""
    newer = [point for point in now.points if point.level == 0 and point.snapshot > _order(found)]
    return failure in (PROCESS, ALL) or all(_critical(point, failure) is not None for point in newer)


# --- what it takes -------------------------------------------------------------------------------------------------------
def _source(failure: str, point: Point | None, victim: str) -> str:
    """The slowest place that something has to come from."""
    if point is None:
        return ""
    if not survives(point, failure, victim):
        return DURABLE
    if failure == PROCESS:
        return OWN
    return PARITY if point.parity else PEER


def _slots(now: Situation) -> list[int]:
    """Bytes of each rank's slot."""
    known = now.rank_bytes or {}
    largest = max(known.values(), default=0)
    return [known.get(rank, largest) for rank in range(len(now.homes))] or [largest]


def _moving(failure: str, source: str, victim: str, now: Situation) -> list[int]:
    """The ranks whose state comes from elsewhere: of a node or domain that may be any, those of the largest."""
    everyone = list(range(len(now.homes)))
    if source in (OWN, ""):
        return []
    if source == DURABLE:
        return everyone
    domains = now.domains or {}
    here: dict[str, list[int]] = {}
    for rank in everyone:
        home = now.homes[rank]
        here.setdefault(home if failure == NODE else domains.get(home, home), []).append(rank)
    return here.get(victim, []) if victim else max(here.values(), key=len, default=[])


# --- who may not be lost -------------------------------------------------------------------------------------------------
def critical(
    classes: Classes,
    holders: Mapping[int, Iterable[tuple[str, int]]],
    spared: Mapping[int, frozenset[str]] | None = None,
) -> frozenset[str]:
    """The places (nodes, or failure domains) each of which alone takes some slice along.

    holders: rank -> (place, tier), as protection.level takes them, and of a snapshot that is whole now. spared: ranks that
    parity can bring now, with the places whose loss ends that (fatal_places).
    """
    spares, found = spared or {}, set[str]()

    def places(rank: int, tier: int) -> set[str]:
        return {place for place, held in holders.get(rank, ()) if held <= tier}

    for rank, tier in classes.alone:
        found |= _single(places(rank, tier), [spares[rank]] if tier >= 1 and rank in spares else [])
    for copies in classes.shared:
        parity = [spares[rank] for rank, tier in copies if tier >= 1 and rank in spares]
        found |= _single(set().union(*(places(rank, tier) for rank, tier in copies)), parity)
    return frozenset(found)


def _single(places: set[str], parity: Sequence[frozenset[str]]) -> frozenset[str]:
    """The places without which a slice is lost, that ``places`` hold directly; any one of ``parity`` brings it, too."""
    if len(places) > 1:
        return frozenset()
    without = frozenset.intersection(*parity) if parity else None
    if not places:
        return without or frozenset()
    return frozenset(places) if without is None else without & places


def fatal_places(
    parity_set: ParitySet, data: Mapping[int, frozenset[str]], shards: Mapping[int, frozenset[str]]
) -> frozenset[str] | None:
    """The places each of which alone, when lost, leaves too little of this parity set; None: there is too little now."""
    left = tolerance(parity_set, data, shards)
    if left != 0:
        return frozenset() if left > 0 else None
    everywhere = frozenset().union(*data.values(), *shards.values())
    return frozenset(
        place for place in everywhere if tolerance(parity_set, _without(data, place), _without(shards, place)) < 0
    )


def _without(where: Mapping[int, frozenset[str]], place: str) -> dict[int, frozenset[str]]:
    return {at: found - {place} for at, found in where.items()}
