"""The restore phases of a simulated daemon: plan with the real planner, fetch, verify, load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.state_map.box import Box, intersect
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.pieces import Piece
from ckptd.core.state_map.recovery import (
    BY_PARITY,
    PARITY,
    Plan,
    Want,
    plan_recovery,
)
from ckptd.core.state_map.source_index import Held, SourceIndex
from tests.sim import parity
from tests.sim.broken import Broken
from tests.sim.state import Mem, cut

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.trainer import Proc
Loaded = tuple[str, int, bytes]  # (key, first element, bytes)


class Fetching:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.do: ins.PrepareRestore | None = None
        self.ready: dict[int, tuple[Loaded, ...]] = {}
        self._lent: list[Mem] = []  # FREE slots that bytes are fetched into

    def drop(self) -> None:
        """The daemon is gone, and what it knew."""
        self.do, self.ready, self._lent = None, {}, []

    def _proc(self, do: ins.PrepareRestore, rank: int) -> Proc | None:
        """Of this start: one that came after it has the same numbers."""
        proc = self.host.procs.get(rank)
        return proc if proc is not None and proc.run.attempt == do.record.nonce else None

    def _give_back(self) -> None:
        lent = self._lent
        self.drop()
        self.host.writes.close()
        for mem in lent:
            self.host.memory[mem.id] = mem
            self.host.feed(ev.SlotsReady(mem.rank, (mem.id,)))

    def _lend(self, rank: int) -> None:
        free = [
            mem for mem in self.host.memory.values() if mem.own and mem.rank == rank and mem.state == "free"
        ]
        if free:
            self._lent.append(free[0])
            del self.host.memory[free[0].id]
            self.host.feed(ev.SlotsGone(rank, (free[0].id,)))

    def prepare(self, do: ins.PrepareRestore) -> None:
        self._give_back()
        self.do = do
        if do.snapshot is None:
            for rank in do.ranks:
                proc = self._proc(do, rank)
                if proc is not None:
                    proc.opened(do.record.number, None, ())
            return
        for rank in do.ranks:
            delay = self.host.world.fetch_s * (0.5 + self.host.world.rng.random())
            self.host.world.clock.after(delay, self.host.at_leisure, self._begin, self.host.life, do, rank)

    def _begin(self, life: int, do: ins.PrepareRestore, rank: int) -> None:
        if life != self.host.life or self.do is not do:
            return
        if do.durable:
            self.host.writes.opens(do, partial(self.host.at_leisure, self._fetch, life, do, rank))
        else:
            self._fetch(life, do, rank)

    def _fetch(self, life: int, do: ins.PrepareRestore, rank: int) -> None:
        if life != self.host.life or self.do is not do or self._proc(do, rank) is None:
            return
        misfit = self.host.world.faults.misfit()
        if misfit in ("mismatch", "timeout"):
            self.host.feed(ev.RankFetched(rank, do.round, False, misfit, "the model does not fit"))
            return
        self._lend(rank)
        layouts = parity.layouts_of(self.host, do)
        lost = parity.Lost(self.host, do, layouts)
        plan = self._plan(do, rank, layouts, lost)
        if plan.uncovered or plan.mismatched:
            reason = f"uncovered {plan.uncovered} {plan.mismatched}"
            self.host.feed(ev.RankFetched(rank, do.round, False, self._code(do), reason))
            return
        loaded: list[Loaded] = []
        bad: list[str] = []
        for piece in plan.pieces:
            data, why = self._read(do, piece, lost)
            loaded.append((piece.key, piece.box.offsets[0], data))
            bad += [why] if why else []
        if bad:
            self.host.feed(ev.RankFetched(rank, do.round, False, self._code(do), "; ".join(bad)))
            return
        self.ready[rank] = tuple(loaded)
        self.host.world.oracle.fetched(do.round, {piece.source for piece in plan.pieces})
        self.host.feed(ev.RankFetched(rank, do.round, True))

    def _plan(self, do: ins.PrepareRestore, rank: int, layouts: dict[str, Layout], lost: parity.Lost) -> Plan:
        world = do.record.world
        assert do.snapshot is not None
        cuts = [(t, cut(t, rank, world)) for t in self.host.world.model.tensors(do.snapshot.step)]
        wants = [Want(at, t.key, "U8", (t.size,), box) for at, (t, box) in enumerate(cuts) if box is not None]
        sources = [
            Held(s.node, s.rank, s.tier, layouts[s.layout_id])
            for s in do.sources
            if s.layout_id in layouts and s.shard is None
        ]
        of_rank = {layout.rank: layout for layout in layouts.values()}
        sources += [
            Held(BY_PARITY, rank, 1, of_rank[rank])
            for rank in lost.rows
            if rank in of_rank
        ]
        committed = self.host.writes.stored(do)
        durable = BoxIndex.of({} if committed is None else {k: list(boxes) for k, boxes in committed.tensors.items()})
        return plan_recovery(wants, SourceIndex(sources), self.host.name, rank, durable, do.per_rank)

    def _read(self, do: ins.PrepareRestore, piece: Piece, lost: parity.Lost) -> tuple[bytes, str]:
        """The bytes of the piece's box, out of what is stored; or why they cannot be had."""
        found, why = self._stored(do, piece, lost)
        start = piece.box.offsets[0] - piece.stored.offsets[0]
        return found[start : start + piece.nbytes], why

    def _stored(self, do: ins.PrepareRestore, piece: Piece, lost: parity.Lost) -> tuple[bytes, str]:
        world = self.host.world
        assert do.snapshot is not None
        if piece.source == "durable":
            committed = self.host.writes.stored(do)
            if committed is None or world.store.refuses(writes=False):
                return b"", "storage is gone"
            if not world.store.holds(do.snapshot):
                raise Broken(f"P12 {do.snapshot} was deleted under the hands of {self.host.name}, which reads it")
            return _range(committed.tensors[piece.key], piece.stored), ""
        if piece.source == PARITY:
            world.oracle.count("a slice from parity")
            return lost.read(piece.rank, piece.fragment)
        peer = world.hosts[piece.node]
        if not self.host.reaches(piece.node):
            return b"", f"{piece.node} is unreachable"
        mem = peer.best(do.snapshot, piece.rank)
        if mem is None or mem.payload is None:
            return b"", f"{piece.node} holds nothing of rank {piece.rank}"
        if mem.lacks(piece.fragment):  # it took the place of a whole one that was damaged after it was decided
            world.oracle.count("a lesser copy than was planned with")
            return b"", f"{piece.node} holds less of rank {piece.rank}"
        if not mem.intact and not world.mutant("no verify"):
            peer.feed(ev.SlotDamaged(mem.id, "found at restore"))
            return b"", f"{piece.node}: rank {piece.rank} is damaged"
        return mem.piece(piece.fragment), ""

    def _code(self, do: ins.PrepareRestore) -> str:
        """What could not be reached may still be whole; else something is damaged, or gone."""
        return "damage" if all(self.host.reaches(source.node) for source in do.sources) else "unreachable"

    def load(self, do: ins.LoadNow) -> None:
        if self.do is None or self.do.round != do.round:
            return
        for rank in self.ready:
            self.host.world.clock.after(0.05, self.host.at_leisure, self._loaded, self.host.life, self.do, rank)

    def _loaded(self, life: int, do: ins.PrepareRestore, rank: int) -> None:
        proc = self._proc(do, rank)
        if life == self.host.life and self.do is do and proc is not None:
            if self.host.world.faults.misfit() == "load":
                self.host.feed(ev.RankLoaded(rank, do.round, False, "out of memory"))
                return
            proc.opened(do.record.number, do.snapshot, self.ready[rank])
            self.host.feed(ev.RankLoaded(rank, do.round))

    def finish(self, number: int) -> None:
        do = self.do
        if do is None:  # the daemon was restarted since its ranks have loaded
            for mine in self.host.procs.values():
                if self.host.record is not None and mine.run.attempt == self.host.record.nonce:
                    mine.may_train()
        elif do.round == number:
            for rank in do.ranks:
                proc = self._proc(do, rank)
                if proc is not None:
                    proc.may_train()
            self.host.world.store.went_on(do.record, read_here=self.host.writes.stored(do) is not None)
            self._give_back()

    def fail(self, do: ins.FailRestore) -> None:
        if self.do is not None and self.do.round == do.round:
            for rank in self.do.ranks:
                proc = self._proc(self.do, rank)
                if proc is not None and not proc.ready:
                    proc.failed(do.code, do.reason)
            self._give_back()


def _range(stored: Mapping[Box, bytes], wanted: Box) -> bytes:
    """Out of what was written of a tensor of one dimension."""
    found = bytearray(wanted.volume)
    for box, data in stored.items():
        part = intersect(box, wanted)
        if part is not None:
            start, at = part.offsets[0] - box.offsets[0], part.offsets[0] - wanted.offsets[0]
            found[at : at + part.volume] = data[start : start + part.volume]
    return bytes(found)
