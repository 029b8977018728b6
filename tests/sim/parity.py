"""Parity in the simulated daemons: rows of bytes that are read from wherever they are, and combined (field.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.messages import HoldingFact, Source
from ckptd.core.redundancy.parity_sets import (
    ParitySet,
    ParityShard,
    joined_digests,
    member_digests,
    shard_layout,
)
from ckptd.core.state_map.layout import Layout
from tests.sim import field
from tests.sim.state import OBJECTS_BYTES, Mem, fragments_of, piece

if TYPE_CHECKING:
    from tests.sim.host import Host

CARDS_BYTES = OBJECTS_BYTES
Rows = dict[int, bytes]  # by position
Digests = dict[int, tuple[tuple[str, bytes], ...]]  # by rank


class Columns:
    """What can be read of a parity set now, from ``host``."""

    def __init__(self, host: Host, snapshot: SnapshotId, parity_set: ParitySet, sources: tuple[Source, ...]) -> None:
        self.host, self.parity_set = host, parity_set
        self.data: Rows = {}
        self.shards: Rows = {}
        self.digests: Digests = {}  # as its seal or a part's card has them
        self.damaged: list[tuple[Host, Mem]] = []
        self._places = parity_set.ranks()
        for source in sources:
            mem = self._mem(snapshot, source)
            if mem is None or mem.payload is None or mem.fact is None:
                continue
            if source.shard is not None and source.shard.parity_set == parity_set:
                self.digests = member_digests(mem.fact.digests) | self.digests
                self.shards.setdefault(source.shard.position, mem.payload[CARDS_BYTES:])
            elif source.shard is None and source.rank in self._places:
                at = self._places[source.rank]
                self.digests[source.rank] = mem.fact.digests
                self.data.setdefault(at, mem.payload[: parity_set.members[at].nbytes])

    def _mem(self, snapshot: SnapshotId, source: Source) -> Mem | None:
        peer = self.host.world.hosts[source.node]
        if not self.host.reaches(source.node):
            return None
        mem = peer.best(snapshot, source.rank)
        if mem is None or mem.payload is None or (mem.fact is not None and mem.fact.shard != source.shard):
            return None
        if not mem.intact and not self.host.world.mutant("no verify"):
            self.damaged.append((peer, mem))
            return None
        return mem

    def rows(self) -> Rows | None:
        """Every member's; None: some cannot be had."""
        lengths = {at: self.parity_set.members[at].nbytes for at in self._places.values()}
        return field.decode(len(self.parity_set.members), self.parity_set.parity, lengths, self.data, self.shards)


def make(host: Host, do: ins.MakeParity) -> None:
    longest = max(member.nbytes for member in do.shard.parity_set.members)
    seconds = host.world.replicate_s * (0.5 + host.world.rng.random()) * host.world.load(longest)
    first = _read(host, do).rows()
    host.world.clock.after(seconds, _made, host, host.life, do, first)


def _read(host: Host, do: ins.MakeParity) -> Columns:
    columns = Columns(host, do.snapshot, do.shard.parity_set, do.sources)
    for peer, mem in columns.damaged:
        peer.feed(ev.SlotDamaged(mem.id, "found while making parity"))
    return columns


def _made(host: Host, life: int, do: ins.MakeParity, first: Rows | None) -> None:
    """Half of the columns were read at the beginning, half now."""
    if life != host.life:
        return
    if host.squeezed or "parity" in host.no_room_for:
        host.later(0.0, ev.ParityFailed(do.snapshot, do.shard, do.data, "no memory: the budget is spent"))
        return
    columns = _read(host, do)
    now = columns.rows()
    if now is None or first != now:
        host.later(0.0, ev.ParityFailed(do.snapshot, do.shard, do.data, "a source is gone"))
    elif do.data:
        _take_data(host, do, now, columns.digests)
    else:
        _take_part(host, do, now, columns.digests)


def _member_layouts(host: Host, shard: ParityShard) -> dict[int, Layout]:
    known = {
        name: layout for other in host.world.hosts.values() for name, layout in other.known_layouts().items()
    }
    return {m.rank: known[m.layout_id] for m in shard.parity_set.members if m.rank >= 0}


def _take_data(host: Host, do: ins.MakeParity, rows: Rows, digests: Digests) -> None:
    rank, row = do.shard.member.rank, rows[do.shard.position]
    layout = _member_layouts(host, do.shard)[rank]
    host.world.oracle.count("data made from parity")
    host.copies.take(HoldingFact(do.snapshot, rank, 1, layout.layout_id, digests.get(rank, ())), layout, row, row)


def _take_part(host: Host, do: ins.MakeParity, rows: Rows, digests: Digests) -> None:
    parity_set, layouts = do.shard.parity_set, _member_layouts(host, do.shard)
    layout = shard_layout(parity_set, CARDS_BYTES)
    mem = host.new_mem(parity_set.holding_rank, own=False)
    longest = max(member.nbytes for member in parity_set.members)
    joined = joined_digests(digests)
    fact = HoldingFact(do.snapshot, parity_set.holding_rank, 0, layout.layout_id, joined, False, do.shard)
    parity = field.encode(len(parity_set.members), parity_set.parity, rows, do.shard.position, longest)
    mem.payload = mem.sums = bytes(CARDS_BYTES) + parity
    mem.state, mem.fact, mem.layout, mem.layouts = "sealed", fact, layout, tuple(layouts.values())
    host.world.oracle.held(host, mem)
    host.world.oracle.count("parity made")
    host.feed(ev.ParityMade(do.snapshot, do.shard, mem.id, layout, joined, mem.layouts))


def layouts_of(host: Host, do: ins.PrepareRestore) -> dict[str, Layout]:
    """What a restore needs, as the holders tell it when they are asked."""
    named = {source.layout_id for source in do.sources}
    named |= {m.layout_id for source in do.sources if source.shard is not None for m in source.shard.parity_set.members}
    holders = {source.node for source in do.sources if host.reaches(source.node)}
    told = [host.world.hosts[node].known_layouts() for node in sorted(holders)]
    return {name: layout for known in told for name, layout in known.items() if name in named}


class Lost:
    """The rows that parity brings for a restore, as far as anybody can tell now."""

    def __init__(self, host: Host, do: ins.PrepareRestore, layouts: Mapping[str, Layout]) -> None:
        assert do.snapshot is not None
        self.rows: Rows = {}  # by rank
        self._layouts = {layout.rank: layout for layout in layouts.values()}
        for parity_set in dict.fromkeys(source.shard.parity_set for source in do.sources if source.shard is not None):
            rows = Columns(host, do.snapshot, parity_set, do.sources).rows()
            if rows is not None:
                self.rows.update((rank, rows[at]) for rank, at in parity_set.ranks().items())

    def read(self, rank: int, index: int) -> tuple[bytes, str]:
        """A fragment of a lost slot; or why it cannot be had."""
        row, layout = self.rows.get(rank), self._layouts.get(rank)
        if row is None or layout is None:
            return b"", f"parity cannot bring rank {rank}"
        return piece(row, fragments_of(layout)[index]), ""
