"""Parity sets: which ranks' slots share parity, who holds which part of it, and what a parity set survives (REFT, section 4;
design D8).

A *parity set* takes one rank from each node of a parity group, by position; nodes with fewer ranks have none in the later
parity sets. Each position's data is the tier-1 prefix of its rank's slot, cut into as many chunks as there are stripes in
which it has data; each position also holds the parity of ``parity`` stripes (parity_groups has the rotation). A parity set
survives the loss of any ``parity`` positions: data and parity of a step belong together, and go together, by the certificate.
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
from ckptd.core.state_map.fragments import Fragment, Fragments
from ckptd.core.state_map.layout import ALIGN_BYTES, Layout

PARITY_SET_PLAN = "parity set "  # begins the plan of a part's layout
NOBODY = -1  # a position without a rank: it only holds parity


@dataclass(frozen=True, slots=True)
class Member:
    """One position's data. nbytes: of ``linear_bytes`` of its layout."""

    rank: int
    nbytes: int = 0
    layout_id: str = ""


@dataclass(frozen=True, slots=True)
class ParitySet:
    """number: of the parity set among all of its snapshot, whose world it names. parity: rows per stripe."""

    world: int
    number: int
    parity: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        """Raises ValueError: it comes from other nodes, and memory (P13)."""
        if not (0 < self.parity < len(self.members) <= GROUP_MAX and self.world > 0 <= self.number):
            raise ValueError("not a parity set")

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
class ParityShard:
    """What one position of a parity set holds of its parity."""

    parity_set: ParitySet
    position: int

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 0 <= self.position < len(self.parity_set.members):
            raise ValueError("a position that the parity set has not")

    @property
    def member(self) -> Member:
        """Whose slot lies at this position."""
        return self.parity_set.members[self.position]


@dataclass(frozen=True, slots=True)
class Seating:
    """A parity set before there is a snapshot: nodes and ranks by position."""

    number: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]


@lru_cache(maxsize=64)
def seatings(record: EpochRecord, redundancy: Redundancy) -> tuple[Seating, ...]:
    """The parity sets of this epoch; none where the policy has no parity. All daemons come to the same ones."""
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
    """Ranks that no parity set takes: they are protected by copies. Under a policy of copies, all."""
    in_sets = {rank for seating in seatings(record, redundancy) for rank in seating.ranks}
    return frozenset(range(record.world)) - in_sets


def shard_layout(parity_set: ParitySet, cards_bytes: int) -> Layout:
    """The layout of each shard of this parity set: the members' cards in place of the objects, then the rows that the position
    holds."""
    capacity = -(-max(cards_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
    rows = Fragments(
        Fragment(f"parity/{row}", "U8", (parity_set.chunk,), Box((0,), (parity_set.chunk,)), capacity + row * parity_set.chunk,
                 parity_set.chunk, "extra", tier=0)
        for row in range(parity_set.parity)
    )  # fmt: skip
    rank, end = parity_set.holding_rank, capacity + parity_set.parity * parity_set.chunk
    return Layout(rank, rank + 1, rows, capacity, end, f"{PARITY_SET_PLAN}{parity_set.number}")


# --- what a parity set survives -----------------------------------------------------------------------------------------------
def tolerance(parity_set: ParitySet, data: Mapping[int, Collection[str]], shards: Mapping[int, Collection[str]]) -> int:
    """Any so many failure domains may be lost, and every member's data can still be had; -1: some cannot be had now.

    data, parts: position -> the domains that hold its data, its parity.
    """
    positions = [
        (frozenset(data.get(at, ())) if member.rank != NOBODY else None, frozenset(shards.get(at, ())))
        for at, member in enumerate(parity_set.members)
    ]
    gone = _gone_if_apart(positions)
    if gone is not None:
        return max(-1, parity_set.parity - gone)
    domains = sorted(frozenset().union(*(found for pair in positions for found in pair if found)))
    for count in range(parity_set.parity + 1):
        if any(
            _broken(positions, frozenset(lost), parity_set.parity)
            for lost in combinations(domains, min(count, len(domains)))
        ):
            return count - 1
    return parity_set.parity


_Position = tuple[
    frozenset[str] | None, frozenset[str]
]  # domains with the position's data (None: it has none), with its parity


def _gone_if_apart(positions: Sequence[_Position]) -> int | None:
    """The usual case: every position is there or gone as a whole, each in one domain of its own. How many are gone; None: it is
    not the usual case."""
    whole = [shards for data, shards in positions if data is None or data == shards]
    there = [shards for shards in whole if shards]
    if len(whole) < len(positions) or any(len(shards) > 1 for shards in there):
        return None
    return len(positions) - len(there) if len(frozenset().union(*there)) == len(there) else None


def _broken(positions: Sequence[_Position], lost: frozenset[str], parity: int) -> bool:
    """Is there a stripe that lacks data, and more of its columns than it has parity rows?"""
    count = len(positions)
    no_data = {at for at, (data, _) in enumerate(positions) if data is not None and data <= lost}
    no_parity = {at for at, (_, shards) in enumerate(positions) if shards <= lost}
    for stripe in range(count) if no_data else ():
        rows = set(parity_positions(count, parity, stripe))
        lacking = no_data - rows
        if lacking and len(lacking) + len(rows & no_parity) > parity:
            return True
    return False


def decodable(parity_set: ParitySet, data: Iterable[int], shards: Iterable[int]) -> bool:
    """Can the data of every position be had? data, parts: positions whose data and whose parity is there."""
    here = {at: {"here"} for at in data}
    return tolerance(parity_set, here, {at: {"here"} for at in shards}) >= 0


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
def packed_shard(shard: ParityShard) -> list[Any]:
    parity_set = shard.parity_set
    members = [[member.rank, member.nbytes, member.layout_id] for member in parity_set.members]
    return [shard.position, parity_set.world, parity_set.number, parity_set.parity, members]


def unpacked_shard(body: Any) -> ParityShard:
    """The inverse. Raises ValueError: it is none."""
    try:
        position, world, number, parity, rows = body
        members = tuple(Member(rank, nbytes, name) for rank, nbytes, name in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a shard of a parity set: {error}") from error
    numbers = (position, world, number, parity, *(n for m in members for n in (m.rank + 1, m.nbytes)))
    if not all(type(value) is int and value >= 0 for value in numbers) or not all(type(m.layout_id) is str for m in members):
        raise ValueError("not a shard of a parity set: a field of another type")
    if not (position < len(members) and 0 < parity < len(members) <= GROUP_MAX and world > 0):
        raise ValueError("not a shard of a parity set: it does not fit together")
    return ParityShard(ParitySet(world, number, parity, members), position)
