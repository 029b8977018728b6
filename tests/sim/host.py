"""A node: the daemon's process around a real JobMachine, the memory that outlives it, and its state directory."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.machine.machine import JobMachine
from tests.sim.fetch import Fetching
from tests.sim.state import DAMAGE, Mem
from tests.sim.writes import Writes

if TYPE_CHECKING:
    from tests.sim.trainer import Proc
    from tests.sim.world import World

TICK_S = 0.25
UNIX_S = 0.001  # between a rank and its daemon


class Host:
    def __init__(self, world: World, name: str, domain: str) -> None:
        self.world, self.name, self.domain = world, name, domain
        self.life = 0
        self.alive = self.paused = False
        self.memory: dict[int, Mem] = {}
        self.persisted: EpochRecord | None = None
        self.ran: EpochRecord | None = None  # persisted with it
        self.procs: dict[int, Proc] = {}  # attached rank processes
        self.machine: JobMachine
        self.fetching = Fetching(self)
        self.writes = Writes(self)
        self._slots = 0
        self._queue: deque[ev.Event] = deque()
        self._busy = False

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(self.name, f"tcp://{self.name}", self.name, self.domain, f"{self.name}#{self.life}")

    # --- life ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """The daemon's process begins; it adopts what memory there is."""
        self.life += 1
        self.alive, self.paused = True, False
        self.procs.clear()
        self._queue.clear()
        self.machine = self.world.make_machine(self)
        self.world.net.forget_views(self.name)
        self.feed(ev.Restarted(self.persisted, self.ran))
        for mem in list(self.memory.values()):
            self._adopt(mem)
        self.world.clock.after(TICK_S * self.world.rng.random(), self._tick, self.life)
        self.world.net.changed()

    def _adopt(self, mem: Mem) -> None:
        if mem.state == "sealed" and mem.fact is not None and mem.layout is not None:
            fact = mem.fact
            self.feed(
                ev.HoldingFound(mem.id, fact.snapshot, fact.rank, fact.tier, mem.own, mem.layout, fact.digests, fact.keep)
            )
        elif mem.own:
            mem.state, mem.content = "free", None
            self.feed(ev.SlotsReady(mem.rank, (mem.id,)))
        else:
            del self.memory[mem.id]

    def stop(self) -> None:
        """kill -9 on the daemon: memory stays."""
        self.alive = self.paused = False
        self.life += 1
        self.fetching.drop()
        for proc in list(self.procs.values()):
            proc.disconnected()
        self.procs.clear()
        self.world.net.changed()

    def lose_memory(self) -> None:
        self.world.oracle.lost(self)
        self.memory.clear()
        if self.world.rng.random() < 0.5:
            self.persisted = self.ran = None  # a new machine in its place

    def pause(self, paused: bool) -> None:
        if not self.alive or self.paused == paused:
            return
        self.paused = paused
        self.world.trouble()
        self.world.net.changed()
        if not paused:
            self._drain()

    def _tick(self, life: int) -> None:
        if life == self.life and self.alive:
            if not self.paused:
                self.feed(ev.Tick())
            self.world.clock.after(TICK_S, self._tick, life)

    # --- events in, instructions out ----------------------------------------------------------------------------
    def feed(self, event: ev.Event) -> None:
        if not self.alive:
            return
        self._queue.append(event)
        if not self._busy and not self.paused:
            self._drain()

    def feed_if(self, life: int, event: ev.Event) -> None:
        """An answer to what this process had begun."""
        if life == self.life:
            self.feed(event)

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._queue and self.alive and not self.paused:
                event = self._queue.popleft()
                self.world.trace(self.name, "<", event)
                for do in self.machine.handle(event, self.world.clock.now):
                    if not self.alive:
                        break
                    self.world.trace(self.name, ">", do)
                    self._do(do)
                self.world.after_event(self)
        finally:
            self._busy = False

    def _do(self, do: ins.Instruction) -> None:
        getattr(self, "_" + type(do).__name__)(do)

    def later(self, seconds: float, event: ev.Event) -> None:
        self.world.clock.after(seconds, self.feed_if, self.life, event)

    # --- instructions -------------------------------------------------------------------------------------------
    def _Send(self, do: ins.Send) -> None:  # noqa: N802
        self.world.oracle.sent(self, do)
        if do.to == self.name:
            self.later(0.0, ev.Received(self.name, do.message))
        else:
            self.world.net.send(self.name, do.to, do.message)

    def _Connect(self, do: ins.Connect) -> None:  # noqa: N802
        pass

    def _PersistEpoch(self, do: ins.PersistEpoch) -> None:  # noqa: N802
        self.world.oracle.persisted(self, do.record)
        self.persisted, self.ran = do.record, do.ran

    def _ReadDurable(self, do: ins.ReadDurable) -> None:  # noqa: N802
        self.world.clock.after(0.02 + 0.1 * self.world.rng.random(), self._durable_read, self.life, do.attempt)

    def _durable_read(self, life: int, attempt: str) -> None:
        store = self.world.store
        if store.up:
            answer = ev.DurableRead(attempt, True, store.newest(), tuple(sorted(store.commits)))
        else:
            answer = ev.DurableRead(attempt, False, reason="gone")
        self.feed_if(life, answer)

    def _ClaimEpoch(self, do: ins.ClaimEpoch) -> None:  # noqa: N802
        self.world.clock.after(0.02, self._claimed, self.life, do)

    def _claimed(self, life: int, do: ins.ClaimEpoch) -> None:
        up = self.world.store.up
        ok, taken = self.world.store.claim(do.record) if up else (True, 0)
        self.feed_if(life, ev.EpochClaimed(do.attempt, do.record.number, ok, taken, "" if up else "storage is gone"))

    def _PrepareRestore(self, do: ins.PrepareRestore) -> None:  # noqa: N802
        self.fetching.prepare(do)

    def _LoadNow(self, do: ins.LoadNow) -> None:  # noqa: N802
        self.fetching.load(do)

    def _FinishRestore(self, do: ins.FinishRestore) -> None:  # noqa: N802
        self.fetching.finish(do.round)

    def _FailJoin(self, do: ins.FailJoin) -> None:  # noqa: N802
        for proc in list(self.procs.values()):
            if proc.run.attempt == do.attempt and not proc.ready:
                proc.failed(do.code, do.reason)

    def _FailRestore(self, do: ins.FailRestore) -> None:  # noqa: N802
        self.fetching.fail(do)

    def _GiveSlot(self, do: ins.GiveSlot) -> None:  # noqa: N802
        mem, proc = self.memory.get(do.slot), self.procs.get(do.rank)
        if proc is None or mem is None:
            self.later(0.0, ev.RankMissed(do.rank, do.grant, ev.NOT_HERE))
            return
        assert mem.state == "free", f"slot {mem.id} was given while {mem.state}"
        mem.state, mem.grant = "filling", do.grant
        self.world.clock.after(UNIX_S, proc.granted, self.life, do)

    def _TakeBack(self, do: ins.TakeBack) -> None:  # noqa: N802
        proc = self.procs.get(do.rank)
        if proc is None:
            self.later(0.0, ev.RankMissed(do.rank, do.grant, ev.NOT_HERE))
        else:
            self.world.clock.after(UNIX_S, proc.taken_back, self.life, do.grant)

    def _Supersede(self, do: ins.Supersede) -> None:  # noqa: N802
        proc = self.procs.get(do.rank)
        if proc is not None:
            self.world.oracle.count("a stale epoch fenced")
            self.world.clock.after(UNIX_S, proc.superseded)

    def _TellLevel(self, do: ins.TellLevel) -> None:  # noqa: N802
        self.world.oracle.told(self, do)

    def _FreeSlot(self, do: ins.FreeSlot) -> None:  # noqa: N802
        mem = self.memory.get(do.slot)
        if mem is None:
            return
        sealed = mem.snapshot if mem.state == "sealed" else None
        if sealed is not None and not mem.intact:
            self.world.oracle.graves.append((self.world.clock.now, self, [replace(mem)]))
        mem.state, mem.grant, mem.content, mem.sums, mem.fact = "free", 0, None, (), None
        if not mem.own:
            del self.memory[mem.id]
        if sealed is not None:
            self.world.oracle.freed(self, sealed)

    def _WriteFiles(self, do: ins.WriteFiles) -> None:  # noqa: N802
        self.writes.write(do)

    def _CancelWrite(self, do: ins.CancelWrite) -> None:  # noqa: N802
        self.writes.cancel(do.attempt)

    def _Commit(self, do: ins.Commit) -> None:  # noqa: N802
        self.writes.commit(do)

    def _Alarm(self, do: ins.Alarm) -> None:  # noqa: N802
        self.world.oracle.count("alarm " + do.kind)

    # --- replicas -----------------------------------------------------------------------------------------------
    def _Replicate(self, do: ins.Replicate) -> None:  # noqa: N802
        self.world.clock.after(self.world.net.latency(), self._offer, self.life, do)

    def _offer(self, life: int, do: ins.Replicate) -> None:
        peer = self.world.hosts[do.to]
        mem = self.memory.get(do.slot)
        reason = ""
        if life != self.life:
            return
        if not peer.alive or peer.paused or not self.world.net.reaches(self.name, do.to):
            reason = "unreachable"
        elif mem is None or mem.snapshot != do.snapshot:
            reason = "slot is gone"
        else:
            reason = peer.machine.admits_replica(do.snapshot, do.rank)
        if reason:
            delay = 1.0 if reason == "unreachable" else 2 * self.world.net.latency()
            self.later(delay, self._sent(do, reason))
            return
        assert mem is not None and mem.content is not None and mem.layout is not None and mem.fact is not None
        first_half = list(mem.content)
        seconds = self.world.replicate_s * (0.5 + self.world.rng.random())
        self.world.clock.after(seconds, self._transferred, (life, peer.life), do, mem, mem.sums, first_half)

    @staticmethod
    def _sent(do: ins.Replicate, reason: str) -> ev.ReplicaSent:
        return ev.ReplicaSent(do.snapshot, do.rank, do.tier, do.to, not reason, reason)

    def _transferred(self, lives: tuple[int, int], do: ins.Replicate, mem: Mem, sums: Any, first: Any) -> None:
        """Half of the bytes were read at the beginning, half now: a slot that was reused meanwhile gives a mixture."""
        peer = self.world.hosts[do.to]
        if peer.life != lives[1] or not self.world.net.reaches(self.name, do.to) or self.life != lives[0]:
            self.world.clock.after(1.0, self.feed_if, lives[0], self._sent(do, "the connection broke"))
            return
        now = mem.content or [DAMAGE] * len(first)
        mixed = [a if i % 2 else b for i, (a, b) in enumerate(zip(first, [*now, *first[len(now) :]], strict=False))]
        if tuple(mixed) != sums and not self.world.mutant("no verify"):
            if mem.snapshot == do.snapshot and not mem.intact:
                self.feed(ev.SlotDamaged(mem.id, "found while sending"))
            self.later(0.0, self._sent(do, "damage"))
            return
        if mem.layout is None:
            return
        peer.take_replica(do.snapshot, do.rank, do.tier, mem, mixed, sums)
        self.later(self.world.net.latency(), self._sent(do, ""))

    def take_replica(self, snapshot: SnapshotId, rank: int, tier: int, source: Mem, content: Any, sums: Any) -> None:
        from ckptd.core.messages import HoldingFact
        from tests.sim.state import digests_of

        assert source.layout is not None
        layout = source.layout
        digests = digests_of(layout, sums)
        keep = source.fact.keep if source.fact is not None else False
        fact = HoldingFact(snapshot, rank, tier, layout.layout_id, digests, keep)
        mem = self.new_mem(rank, own=False)
        mem.state, mem.content, mem.sums, mem.fact, mem.layout = "sealed", list(content), tuple(sums), fact, layout
        self.world.oracle.held(self, mem)
        self.feed(ev.ReplicaArrived(snapshot, rank, tier, mem.id, layout, digests, keep))

    # --- own slots ----------------------------------------------------------------------------------------------
    def new_mem(self, rank: int, *, own: bool) -> Mem:
        self._slots += 1
        mem = self.memory[self._slots] = Mem(self._slots, rank, own)
        return mem

    def attach(self, proc: Proc, *, running: bool) -> None:
        """A rank's process is connected and says Join."""
        if not self.alive:
            return
        old = self.procs.get(proc.rank)
        if old is not None and old is not proc:
            old.alive = False  # the shell tells the machine that the rank before is gone
            self.feed(ev.RankLeft(old.rank, False))
        self.procs[proc.rank] = proc
        run = proc.run
        joined = ev.RankJoined(proc.rank, run.attempt, run.ranks, run.nodes, run.ask, running, trains=running)
        self.feed(joined)
        self.world.clock.after(0.05, self._size, self.life, proc)

    def _size(self, life: int, proc: Proc) -> None:
        if life != self.life or self.procs.get(proc.rank) is not proc:
            return
        have = sum(1 for mem in self.memory.values() if mem.own and mem.rank == proc.rank)
        new = [self.new_mem(proc.rank, own=True).id for _ in range(self.world.policy.own_slots - have)]
        if new:
            self.feed(ev.SlotsReady(proc.rank, tuple(new)))

    def best(self, snapshot: SnapshotId, rank: int) -> Mem | None:
        held = [m for m in self.memory.values() if m.state == "sealed" and m.snapshot == snapshot and m.rank == rank]
        return min(held, key=lambda m: m.fact.tier if m.fact else 0, default=None)
