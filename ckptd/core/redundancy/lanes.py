"""Lanes: which ranks' slots share parity, who holds which part of it, and what a lane survives (REFT, section 4; design D8).

A *lane* takes one rank from each node of a parity group, by position; nodes with fewer ranks have none in the later lanes. Each
position's data is the tier-1 prefix of its rank's slot, cut into as many chunks as there are stripes in which it has data; each
position also holds the parity of ``parity`` stripes (parity_groups has the rotation). A lane survives the loss of any
``parity`` positions: data and parity of a step belong together, and go together, by the certificate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from ckptd.core.ids import EpochRecord, parallel_groups
from ckptd.core.redundancy.parity_groups import chunk_bytes, parity_groups, parity_positions
from ckptd.core.redundancy.policies import GROUP_MAX, Parity, Redundancy
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import ALIGN_BYTES, Fragment, Layout

LANE_PLAN = "lane "  # begins the plan of a part's layout
NOBODY = -1  # a position without a rank: it only holds parity


@dataclass(frozen=True, slots=True)
class Member:
    """One position's data. nbytes: of ``linear_bytes`` of its layout."""

    rank: int
    nbytes: int = 0
    layout_id: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """number: of the lane among all of its snapshot, whose world it names. parity: rows per stripe."""

    world: int
    number: int
    parity: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        """Raises ValueError: it comes from other nodes, and memory (P13)."""
        if not (0 < self.parity < len(self.members) <= GROUP_MAX and self.world > 0 <= self.number):
            raise ValueError("not a lane")

    @property
    def chunk(self) -> int:
        """Bytes of one row, and of one chunk of data."""
        longest = max(member.nbytes for member in self.members)
        return chunk_bytes(longest, len(self.members), self.parity)

    @property
    def holding_rank(self) -> int:
        """Parity is held and asked for under a number of its own, beyond the ranks of the snapshot's world."""
        return self.world + self.number

    def ranks(self) -> dict[int, int]:
        """rank -> position"""
        return {member.rank: at for at, member in enumerate(self.members) if member.rank != NOBODY}


@dataclass(frozen=True, slots=True)
class Part:
    """What one position of a lane holds of its parity."""

    lane: Lane
    position: int

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 0 <= self.position < len(self.lane.members):
            raise ValueError("a position that the lane has not")

    @property
    def member(self) -> Member:
        """Whose slot lies at this position."""
        return self.lane.members[self.position]


@dataclass(frozen=True, slots=True)
class Seating:
    """A lane before there is a snapshot: nodes and ranks by position."""

    number: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]


@lru_cache(maxsize=64)
def seatings(record: EpochRecord, redundancy: Redundancy) -> tuple[Seating, ...]:
    """The lanes of this epoch; none where the policy has no parity. All daemons come to the same ones."""
    if not isinstance(redundancy, Parity):
        return ()
    here: dict[str, list[int]] = {}
    for rank, node in enumerate(record.ranks):
        here.setdefault(node, []).append(rank)
    working = [node for node in record.nodes if node.node in here]
    found: list[Seating] = []
    for group in parity_groups(working, redundancy, parallel_groups(working)):
        for depth in range(max(len(here[node]) for node in group)):
            ranks = tuple(here[node][depth] if depth < len(here[node]) else NOBODY for node in group)
            found.append(Seating(len(found), group, ranks))
    return tuple(found)


@lru_cache(maxsize=64)
def replicated_ranks(record: EpochRecord, redundancy: Redundancy) -> frozenset[int]:
    """Ranks that no lane takes: they are protected by copies. Under a policy of copies, all."""
    in_lanes = {rank for seating in seatings(record, redundancy) for rank in seating.ranks}
    return frozenset(range(record.world)) - in_lanes


def part_layout(lane: Lane, cards_bytes: int) -> Layout:
    """The layout of each part of this lane: the members' cards in place of the objects, then the rows that the position holds."""
    capacity = -(-max(cards_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
    rows = tuple(
        Fragment(f"parity/{row}", "U8", (lane.chunk,), Box((0,), (lane.chunk,)), capacity + row * lane.chunk,
                 lane.chunk, "extra", tier=0)
        for row in range(lane.parity)
    )  # fmt: skip
    rank = lane.holding_rank
    return Layout(rank, rank + 1, rows, capacity, capacity + lane.parity * lane.chunk, f"{LANE_PLAN}{lane.number}")


# --- what a lane survives -----------------------------------------------------------------------------------------------
def tolerance(lane: Lane, data: Mapping[int, Collection[str]], parts: Mapping[int, Collection[str]]) -> int:
    """Any so many failure domains may be lost, and every member's data can still be had; -1: some cannot be had now.

    data, parts: position -> the domains that hold its data, its parity.
    """
    positions = [
        (frozenset(data.get(at, ())) if member.rank != NOBODY else None, frozenset(parts.get(at, ())))
        for at, member in enumerate(lane.members)
    ]
    gone = _gone_if_apart(positions)
    if gone is not None:
        return max(-1, lane.parity - gone)
    domains = sorted(frozenset().union(*(found for pair in positions for found in pair if found)))
    for count in range(lane.parity + 1):
        if any(
            _broken(positions, frozenset(lost), lane.parity)
            for lost in combinations(domains, min(count, len(domains)))
        ):
            return count - 1
    return lane.parity


_Position = tuple[
    frozenset[str] | None, frozenset[str]
]  # domains with the position's data (None: it has none), with its parity


def _gone_if_apart(positions: Sequence[_Position]) -> int | None:
    """The usual case: every position is there or gone as a whole, each in one domain of its own. How many are gone; None: it is
    not the usual case."""
    whole = [parts for data, parts in positions if data is None or data == parts]
    there = [parts for parts in whole if parts]
    if len(whole) < len(positions) or any(len(parts) > 1 for parts in there):
        return None
    return len(positions) - len(there) if len(frozenset().union(*there)) == len(there) else None


def _broken(positions: Sequence[_Position], lost: frozenset[str], parity: int) -> bool:
    """Is there a stripe that lacks data, and more of its columns than it has parity rows?"""
    count = len(positions)
    no_data = {at for at, (data, _) in enumerate(positions) if data is not None and data <= lost}
    no_parity = {at for at, (_, parts) in enumerate(positions) if parts <= lost}
    for stripe in range(count) if no_data else ():
        rows = set(parity_positions(count, parity, stripe))
        lacking = no_data - rows
        if lacking and len(lacking) + len(rows & no_parity) > parity:
            return True
    return False


def decodable(lane: Lane, data: Iterable[int], parts: Iterable[int]) -> bool:
    """Can the data of every position be had? data, parts: positions whose data and whose parity is there."""
    here = {at: {"here"} for at in data}
    return tolerance(lane, here, {at: {"here"} for at in parts}) >= 0


# --- digests of members ---------------------------------------------------------------------------------------------------
def joined_digests(digests: Mapping[int, Iterable[tuple[str, bytes]]]) -> tuple[tuple[str, bytes], ...]:
    """Of several ranks as one list: each name behind "RANK|"."""
    return tuple(
        (f"{rank}|{name}", value) for rank, found in sorted(digests.items()) for name, value in found
    )


def member_digests(digests: Iterable[tuple[str, bytes]]) -> dict[int, tuple[tuple[str, bytes], ...]]:
    """The inverse; names without a rank are left out."""
    found: dict[int, list[tuple[str, bytes]]] = {}
    for name, value in digests:
        rank, mark, rest = name.partition("|")
        if mark and rank.isdecimal():
            found.setdefault(int(rank), []).append((rest, value))
    return {rank: tuple(pairs) for rank, pairs in found.items()}


# --- as plain lists ----------------------------------------------------------------------------------------------------
def packed_part(part: Part) -> list[Any]:
    lane = part.lane
    members = [[member.rank, member.nbytes, member.layout_id] for member in lane.members]
    return [part.position, lane.world, lane.number, lane.parity, members]


def unpacked_part(body: Any) -> Part:
    """The inverse. Raises ValueError: it is none."""
    try:
        position, world, number, parity, rows = body
        members = tuple(Member(rank, nbytes, name) for rank, nbytes, name in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a part of a lane: {error}") from error
    numbers = (position, world, number, parity, *(n for m in members for n in (m.rank + 1, m.nbytes)))
    if not all(type(value) is int and value >= 0 for value in numbers) or not all(type(m.layout_id) is str for m in members):
        raise ValueError("not a part of a lane: a field of another type")
    if not (position < len(members) and 0 < parity < len(members) <= GROUP_MAX and world > 0):
        raise ValueError("not a part of a lane: it does not fit together")
    return Part(Lane(world, number, parity, members), position)
