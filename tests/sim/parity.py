"""Parity in the simulated daemons: symbolic, but it takes what real parity takes, enough whole columns at the same time.

A part's content is the tokens of all its lane's members: what it was made of. What it *brings* is only what the lane's other
columns that are there and whole allow.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core.ids import SnapshotId
from ckptd.core.lanes import Lane, Part, decodable, joined_digests, part_layout
from ckptd.core.layout import Layout
from ckptd.core.machine.context import decode_layout
from ckptd.core.messages import HoldingFact, Source
from tests.sim.state import Mem, Token, digests_of

if TYPE_CHECKING:
    from tests.sim.host import Host

CARDS_BYTES = 64


class Columns:
    """What can be read of a lane now, from ``host``."""

    def __init__(self, host: Host, snapshot: SnapshotId, lane: Lane, sources: tuple[Source, ...]) -> None:
        self.host, self.lane = host, lane
        self.data: dict[int, Mem] = {}  # by position
        self.parts: dict[int, Mem] = {}
        self.damaged: list[tuple[Host, Mem]] = []
        places = lane.ranks()
        for source in sources:
            mem = self._mem(snapshot, source)
            if mem is None:
                continue
            if source.part is not None and source.part.lane == lane:
                self.parts.setdefault(source.part.position, mem)
            elif source.part is None and source.rank in places:
                self.data.setdefault(places[source.rank], mem)

    def _mem(self, snapshot: SnapshotId, source: Source) -> Mem | None:
        peer = self.host.world.hosts[source.node]
        if not self.host.reaches(source.node):
            return None
        mem = peer.best(snapshot, source.rank)
        if mem is None or mem.content is None or (mem.fact is not None and mem.fact.part != source.part):
            return None
        if not mem.intact and not self.host.world.mutant("no verify"):
            self.damaged.append((peer, mem))
            return None
        return mem

    def whole(self) -> bool:
        return decodable(self.lane, self.data, self.parts)

    def content(self, position: int) -> list[Token] | None:
        """The tier-1 tokens of this member, and its objects' last; None: cannot be had."""
        mem = self.data.get(position)
        if mem is not None and mem.content is not None and mem.layout is not None:
            tier = mem.layout.fragments
            return [t for f, t in zip(tier, mem.content, strict=False) if f.tier >= 1] + mem.content[-1:]
        if not self.whole():
            return None
        part = next(iter(self.parts.values()))
        return _of_member(part, position)


def _of_member(part: Mem, position: int) -> list[Token]:
    assert part.content is not None
    before = sum(part.lengths[:position])
    return part.content[before : before + part.lengths[position]]


def make(host: Host, do: ins.MakeParity) -> None:
    seconds = host.world.replicate_s * (0.5 + host.world.rng.random())
    first = _read(host, do)
    host.world.clock.after(seconds, _made, host, host.life, do, first)


def _read(host: Host, do: ins.MakeParity) -> dict[int, list[Token] | None]:
    columns = Columns(host, do.snapshot, do.part.lane, do.sources)
    for peer, mem in columns.damaged:
        peer.feed(ev.SlotDamaged(mem.id, "found while making parity"))
    return {
        at: columns.content(at)
        for at in range(len(do.part.lane.members))
        if do.part.lane.members[at].rank >= 0
    }


def _made(host: Host, life: int, do: ins.MakeParity, first: dict[int, list[Token] | None]) -> None:
    """Half of the columns were read at the beginning, half now."""
    if life != host.life:
        return
    if host.squeezed or "parity" in host.no_room_for:
        host.later(0.0, ev.ParityFailed(do.snapshot, do.part, do.data, "no memory: the budget is spent"))
        return
    now = _read(host, do)
    if any(found is None for found in (*first.values(), *now.values())) or first != now:
        host.later(0.0, ev.ParityFailed(do.snapshot, do.part, do.data, "a source is gone"))
    elif do.data:
        _take_data(host, do, now)
    else:
        _take_part(host, do, now)


def _member_layouts(host: Host, part: Part) -> dict[int, Layout]:
    known = {
        name: layout for other in host.world.hosts.values() for name, layout in other.known_layouts().items()
    }
    return {m.rank: known[m.layout_id] for m in part.lane.members if m.rank >= 0}


def _take_data(host: Host, do: ins.MakeParity, contents: dict[int, list[Token] | None]) -> None:
    layout = _member_layouts(host, do.part)[do.part.member.rank]
    content = contents[do.part.position]
    assert content is not None
    tokens = iter(content[:-1])
    filled = [next(tokens) if f.tier >= 1 else content[-1] for f in layout.fragments] + content[-1:]
    source = Mem(0, do.part.member.rank, False, layout=layout)
    host.world.oracle.count("data made from parity")
    host.copies.take(do.snapshot, do.part.member.rank, 1, source, filled, tuple(filled))


def _take_part(host: Host, do: ins.MakeParity, contents: dict[int, list[Token] | None]) -> None:
    lane, layouts = do.part.lane, _member_layouts(host, do.part)
    layout = part_layout(lane, CARDS_BYTES)
    mem = host.new_mem(lane.holding_rank, own=False)
    digests = {}
    for member, content in zip(
        lane.members, (contents.get(at) for at in range(len(lane.members))), strict=True
    ):
        if content is None:
            mem.lengths += (0,)
            continue
        mem.lengths += (len(content),)
        tokens = iter(content[:-1])
        filled = tuple(next(tokens) if f.tier >= 1 else content[-1] for f in layouts[member.rank].fragments)
        digests[member.rank] = digests_of(layouts[member.rank], (*filled, content[-1]))
        mem.content = [*(mem.content or []), *content]
    joined = joined_digests(digests)
    fact = HoldingFact(do.snapshot, lane.holding_rank, 0, layout.layout_id, joined, False, do.part)
    mem.state, mem.sums, mem.fact, mem.layout = "sealed", tuple(mem.content or ()), fact, layout
    mem.layouts = tuple(layouts.values())
    mem.since = host.world.clock.now
    host.world.oracle.count("parity made")
    host.feed(ev.ParityMade(do.snapshot, do.part, mem.id, layout, joined, mem.layouts))


def lost_ranks(host: Host, do: ins.PrepareRestore) -> dict[int, Columns]:
    """rank -> the columns that can bring it, as far as anybody can tell now"""
    assert do.snapshot is not None
    lanes = dict.fromkeys(source.part.lane for source in do.sources if source.part is not None)
    found = {}
    for lane in lanes:
        columns = Columns(host, do.snapshot, lane, do.sources)
        found.update({rank: columns for rank in lane.ranks() if columns.whole()})
    return found


def token(host: Host, do: ins.PrepareRestore, rank: int, fragment: int) -> tuple[Token, str]:
    columns = lost_ranks(host, do).get(rank)
    content = columns.content(columns.lane.ranks()[rank]) if columns is not None else None
    layout = next((decode_layout(d) for d in do.layouts.values() if decode_layout(d).rank == rank), None)
    if content is None or layout is None:
        return ("", 0), f"parity cannot bring rank {rank}"
    place = sum(1 for f in layout.fragments[:fragment] if f.tier >= 1)
    return content[place], ""


# --- the truth about it ---------------------------------------------------------------------------------------------
def spared(holders: dict[int, list[tuple[str, int]]], parts: list[tuple[str, Part]]) -> dict[int, int]:
    """rank -> how many domains may be lost so that parity still brings it: by trying every loss, stripe by stripe, column by
    column (the core has its own way)."""
    found: dict[int, int] = {}
    for lane in {part.lane for _, part in parts}:
        columns = [
            (f"data {at}", d)
            for rank, at in lane.ranks().items()
            for d, tier in holders.get(rank, ())
            if tier <= 1
        ]
        columns += [(f"parity {part.position}", d) for d, part in parts if part.lane == lane]
        domains = sorted({domain for _, domain in columns})
        for count in range(lane.parity + 1):
            lossy = combinations(domains, min(count, len(domains)))
            if not all(_all_there(lane, {name for name, d in columns if d not in lost}) for lost in lossy):
                break
            for rank in lane.ranks():
                found[rank] = max(count, found.get(rank, -1))
    return found


def _all_there(lane: Lane, columns: set[str]) -> bool:
    size = len(lane.members)
    for stripe in range(size):
        parity = [(stripe + row) % size for row in range(lane.parity)]
        data = [at for at in range(size) if at not in parity]
        have = [at for at in data if lane.members[at].rank < 0 or f"data {at}" in columns]
        if len(have) < len(data) and len(have) + sum(f"parity {at}" in columns for at in parity) < len(data):
            return False
    return True
