"""A node: one job's share of the daemon's process around a real JobMachine, and the memory that outlives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.life import NO_TOMBSTONE
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.state_map.layout import Layout
from tests.sim import forgetting, parity
from tests.sim.copies import Copies
from tests.sim.disk import RETRY_S, StateFile, Written
from tests.sim.fetch import Fetching
from tests.sim.state import Mem
from tests.sim.writes import Writes

if TYPE_CHECKING:
    from tests.sim.trainer import Proc
    from tests.sim.traps import Trap
    from tests.sim.world import World

TICK_S = 0.25
SIZING_S = 0.05  # until memory that a rank asked for is there
UNIX_S = 0.001  # between a rank and its daemon
DRIFT = 0.01  # a clock runs so much too fast or too slow at most, two apart by up to twice that; they have begun anywhere
BOOTED_S = 1e5


class Host:
    def __init__(self, world: World, name: str, domain: str) -> None:
        self.world, self.name, self.domain = world, name, domain
        self.life = 0
        self.alive = self.paused = self.unseen = False
        self.memory: dict[int, Mem] = {}
        self.state = StateFile()
        self.record: EpochRecord | None = None  # the newest epoch, as the process knows it
        self.ran: EpochRecord | None = None
        self.over = ("", 0.0)  # the job's life, as it is written down, and since when
        self.tombstone = NO_TOMBSTONE
        self.buried = False  # there is no machine for the job: nobody has had a reason to make one
        self.procs: dict[int, Proc] = {}  # attached rank processes
        self.arriving: list[Proc] = []  # connected ones whose Join nobody has read yet
        self.standing: dict[int, Proc] = {}  # those whose end the machine has not heard of
        self.machine: JobMachine
        self.fetching = Fetching(self)
        self.writes = Writes(self)
        self.copies = Copies(self)
        self.trap: Trap | None = None  # what happens between two instructions
        self.squeezed = False  # no memory for what is new
        self.no_room_for: frozenset[str] = frozenset()  # "copies", "parity": as a budget may leave it
        self.saw_at = 0.0  # when what is being done now was known to be so: earlier than now in a process that was stopped
        self._slots = 0
        self._room: dict[int, int] = {}  # rank -> bytes that it asked for
        self._queue: deque[ev.Event | partial[None]] = deque()
        self._soon: deque[ev.Event] = deque()  # what came of the instructions: nothing from outside is handled before it
        self._batch: deque[ins.Instruction] = deque()
        self._busy = self._waking = self._acting = False
        self._free_at = 0.0  # from then on the event loop can take the next event
        self._held: tuple[ev.Event, float] | None = None  # with the time that was read for it before the process was stopped
        self._booted, self._rate = world.clock_of(name)

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(self.name, f"tcp://{self.name}", self.name, self.domain, f"{self.name}#{self.life}")

    def clock(self) -> float:
        """This node's own, monotonic."""
        return self._booted + self._rate * self.world.clock.now

    # --- life ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """The daemon's process begins; it adopts what memory there is."""
        self.life += 1
        self.alive, self.paused, self.trap, self._held = True, False, None, None
        self.procs.clear()
        self.arriving.clear()
        self.standing.clear()
        self._forget()
        known = self.state.visible
        self.record, self.ran, self.sealed = known.record, known.ran, known.sealed
        self.over = known.life, known.since
        self.tombstone = known.tombstone
        self.buried = known.record is None and known.tombstone != NO_TOMBSTONE
        self.machine = self.world.make_machine(self)
        self.world.net.forget_views(self.name)
        age = self.world.clock.now - known.since if known.life else 0.0
        self.feed(ev.Restarted(known.record, known.ran, known.life, age, known.tombstone, known.sealed))
        for mem in list(self.memory.values()):
            self.adopt(mem)
        self.world.clock.after(TICK_S * self.world.rng.random(), self._tick, self.life)
        self.world.net.changed()

    def adopt(self, mem: Mem) -> None:
        if mem.state == "sealed" and mem.fact is not None and mem.layout is not None:
            fact, of = mem.fact, (mem.layout, mem.fact.digests, mem.fact.keep, mem.fact.shard, mem.layouts)
            self.feed(ev.HoldingFound(mem.id, fact.snapshot, fact.rank, fact.tier, mem.own, *of))
        elif mem.own:
            mem.state, mem.payload = "free", None
            self.feed(ev.SlotsReady(mem.rank, (mem.id,)))
        else:
            del self.memory[mem.id]

    def stop(self) -> None:
        """kill -9 on the daemon: memory stays."""
        self.alive = self.paused = self.squeezed = False
        self.life += 1
        self.trap = self._held = None
        self._forget()
        self.fetching.drop()
        for proc in (*self.procs.values(), *self.arriving):
            proc.disconnected()
        self.procs.clear()
        self.arriving.clear()
        self.world.net.changed()

    def forget_queued(self) -> None:
        self._queue.clear()
        self._soon.clear()
        self._batch.clear()
        self._room.clear()

    def _forget(self) -> None:
        """What only the process knew."""
        self.forget_queued()
        self._waking, self._free_at = False, 0.0

    def lose_memory(self) -> None:
        self.world.oracle.lost(self)
        self.memory.clear()

    def holds_beyond(self, record: EpochRecord) -> bool:
        """Something that this epoch, once it is restored, has no use for."""
        known = [mem.snapshot for mem in self.memory.values() if mem.state == "sealed" and mem.snapshot is not None]
        return bool(record.ancestry) and not all(map(record.is_candidate, known))

    def sealed_of(self, snapshots: tuple[SnapshotId, ...]) -> list[Mem]:
        return [mem for mem in self.memory.values() if mem.state == "sealed" and mem.snapshot in snapshots]

    def pause(self, paused: bool, *, unseen: bool = False) -> None:
        """SIGSTOP, SIGCONT. It goes on with what it was doing. unseen: it is back before the heartbeats of any link fail."""
        if not self.alive or self.paused == paused:
            return
        self.paused, self.unseen = paused, paused and unseen
        self.world.trouble()
        self.world.net.changed()
        if not paused and not self._busy:
            self._drain()

    def _tick(self, life: int) -> None:
        if life == self.life and self.alive:
            if not self.paused:
                self.feed(ev.Tick())
                forgetting.spare(self)
            self.world.clock.after(TICK_S, self._tick, life)

    # --- events in, instructions out ----------------------------------------------------------------------------
    def feed(self, event: ev.Event) -> None:
        if not self.alive:
            return
        (self._soon if self._acting else self._queue).append(event)
        if not self._busy and not self.paused:
            self._drain()

    def feed_if(self, life: int, event: ev.Event) -> None:
        """An answer to what this process had begun."""
        if life == self.life:
            self.feed(event)

    def reaches(self, name: str) -> bool:
        """Does bulk get through to that daemon now? To our own it does."""
        peer = self.world.hosts[name]
        return peer.alive and not peer.paused and (peer is self or self.world.net.reaches(self.name, name))

    def _drain(self) -> None:
        self._busy = True
        try:
            while self.alive and not self.paused and (self._batch or self._held or self._soon or self._queue):
                if self._batch:
                    self._next(self._batch.popleft())
                elif self.world.clock.now < self._free_at:
                    self._wake_up()
                    return
                elif self._held is not None:
                    (event, now), self._held = self._held, None
                    self._handle(event, now)
                else:
                    self.saw_at = self.world.clock.now
                    self._turn((self._soon or self._queue).popleft())
        finally:
            self._busy = False

    def at_leisure(self, call: Callable[..., None], *args: Any) -> None:
        """In the daemon's event loop, when it has time; what comes of it is handled before anything else is."""
        if self.alive:
            self._queue.append(partial(call, *args))
            if not self._busy and not self.paused:
                self._drain()

    def _turn(self, what: ev.Event | partial[None]) -> None:
        if isinstance(what, partial):
            self._act(what)
        else:
            self._take(what)

    def _act(self, call: Callable[[], None]) -> None:
        self._acting = True
        try:
            call()
        finally:
            self._acting = False

    def _wake_up(self) -> None:
        """The event loop is at work on what it has handled last."""
        if not self._waking:
            self._waking = True
            self.world.clock.after(self._free_at - self.world.clock.now, self._woken, self.life)

    def _woken(self, life: int) -> None:
        if life == self.life:
            self._waking = False
            if not self._busy and not self.paused:
                self._drain()

    def _take(self, event: ev.Event) -> None:
        if not forgetting.wakes(self, event):
            return
        now = self.clock()
        if self.trap is not None and self.trap.stops_at(event):
            self._held = event, now  # the time is read, the process is stopped, and later goes on with it
        else:
            self._handle(event, now)

    def _handle(self, event: ev.Event, now: float) -> None:
        self.world.trace(self.name, "<", event)
        watch = self.world.watch
        if watch is not None:
            watch.before(self, event)
        self._overheard(event)
        done = self.world.handled(self, event, now)
        if watch is not None:
            watch.after(self, event, done)
        self._batch.extend(done)
        self._free_at = self.world.clock.now + self.world.handler_time(event)
        self.world.after_event(self)

    def _overheard(self, event: ev.Event) -> None:
        self.world.oracle.taken_in(self, event)
        if isinstance(event, ev.Received):
            self.world.oracle.heard(self, event.sender, event.message)
        elif isinstance(event, ev.DurableRead):
            commits = event.commits if event.ok else None
            self.world.oracle.decisions.read(self.name, self.life, event.attempt, event.turn, event.newest, commits)

    def _next(self, do: ins.Instruction) -> None:
        if self.trap is not None and self.trap.springs(do):
            return
        self.world.trace(self.name, ">", do)
        self._act(partial(getattr(self, "_" + type(do).__name__), do))

    def put_back(self, do: ins.Instruction) -> None:
        """Stopped just before this one."""
        self._batch.appendleft(do)

    def later(self, seconds: float, event: ev.Event) -> None:
        self.world.clock.after(seconds, self.feed_if, self.life, event)

    # --- instructions -------------------------------------------------------------------------------------------
    def _Send(self, do: ins.Send) -> None:  # noqa: N802
        self.world.oracle.sent(self, do.message, do.to)
        if do.to == self.name:
            self.later(self.world.net.to_itself(self.name), ev.Received(self.name, do.message))
        else:
            self.world.net.send(self.name, do.to, do.message)

    def _Connect(self, do: ins.Connect) -> None:  # noqa: N802
        pass

    def _Compute(self, do: ins.Compute) -> None:  # noqa: N802
        self.world.clock.after(self.world.faults.compute_s(), self._computed, self.life, self.machine, do)

    def _computed(self, life: int, machine: JobMachine, do: ins.Compute) -> None:
        if machine is self.machine:
            self.feed_if(life, ev.Computed(do.number, do.call()))

    def _PersistEpoch(self, do: ins.PersistEpoch) -> None:  # noqa: N802
        self.world.oracle.persisted(self, do.record)
        self.record, self.ran = do.record, do.ran
        self.write_epoch(self.life)

    def _PersistSealed(self, do: ins.PersistSealed) -> None:  # noqa: N802
        self.sealed = do.epoch
        self.write_epoch(self.life)

    def _PersistLife(self, do: ins.PersistLife) -> None:  # noqa: N802
        self.over = do.state, self.world.clock.now - do.age_s
        self.write_epoch(self.life)

    def _TellWritten(self, do: ins.TellWritten) -> None:  # noqa: N802
        assert do.written, "a void that names nothing"

    def _Bury(self, do: ins.Bury) -> None:  # noqa: N802
        forgetting.bury(self, do)

    def write_epoch(self, life: int) -> None:
        """A state directory that does not work stops nobody; it is tried again."""
        if life == self.life and not self.state.write(Written(self.record, self.ran, self.sealed, *self.over, self.tombstone)):
            self.world.oracle.count("an epoch that could not be written down")
            self.world.clock.after(RETRY_S, self.write_epoch, life)

    def _ReadDurable(self, do: ins.ReadDurable) -> None:  # noqa: N802
        self.world.oracle.decisions.reads(self.name, self.life, do.attempt, do.turn)
        self.writes.read(do)

    def _ClaimEpoch(self, do: ins.ClaimEpoch) -> None:  # noqa: N802
        self.world.oracle.claims(self, do.record)
        self.writes.claim(do)
        self.world.faults.moments.on_claim(self, do.record)

    def _PrepareRestore(self, do: ins.PrepareRestore) -> None:  # noqa: N802
        self.fetching.prepare(do)

    def _LoadNow(self, do: ins.LoadNow) -> None:  # noqa: N802
        self.fetching.load(do)

    def _FinishRestore(self, do: ins.FinishRestore) -> None:  # noqa: N802
        self.fetching.finish(do.round)

    def _FailJoin(self, do: ins.FailJoin) -> None:  # noqa: N802
        for proc in list(self.procs.values()):
            if proc.run.attempt == do.attempt:  # one that trains is told that nothing protects it any more: its run begins anew
                proc.failed(do.code, do.reason)

    def _FailRestore(self, do: ins.FailRestore) -> None:  # noqa: N802
        self.fetching.fail(do)

    def _GiveSlot(self, do: ins.GiveSlot) -> None:  # noqa: N802
        mem, proc = self.memory.get(do.slot), self.procs.get(do.rank)
        reason = ev.NOT_HERE if proc is None else ev.NO_SLOT if mem is None else self.world.faults.slot_in_use()
        if proc is None or mem is None or reason:
            self.later(0.0, ev.RankMissed(do.rank, do.grant, reason or ev.NO_SLOT))
            return
        assert mem.state == "free", f"slot {mem.id} was given while {mem.state}"
        mem.state, mem.grant, mem.line = "filling", do.grant, proc.line
        self.world.clock.after(UNIX_S, proc.granted, self.life, do)

    def _TakeBack(self, do: ins.TakeBack) -> None:  # noqa: N802
        proc = self.procs.get(do.rank)
        given = [mem for mem in self.memory.values() if (mem.state, mem.rank, mem.grant) == ("filling", do.rank, do.grant)]
        if proc is None or any(mem.line != proc.line for mem in given):  # another connection was given it
            self.later(0.0, ev.RankMissed(do.rank, do.grant, ev.NOT_HERE))
        else:
            self.world.clock.after(UNIX_S, proc.taken_back, self.life, do.grant)

    def _Supersede(self, do: ins.Supersede) -> None:  # noqa: N802
        proc = self.procs.get(do.rank)
        if proc is not None:
            self.world.oracle.count("a stale epoch fenced")
            self.world.clock.after(UNIX_S, proc.superseded)

    def _TellLevel(self, do: ins.TellLevel) -> None:  # noqa: N802
        self.world.oracle.told(self, do.snapshot, do.level, do.void)
        for proc in self.procs.values():
            proc.told(do.snapshot, do.void)

    def _FreeSlot(self, do: ins.FreeSlot) -> None:  # noqa: N802
        mem = self.memory.get(do.slot)
        if mem is None:
            return
        sealed = mem.snapshot if mem.state == "sealed" else None
        if sealed is not None:
            self.world.oracle.gives_up(self, mem, replace(mem))
        mem.state, mem.grant, mem.payload, mem.sums, mem.fact = "free", 0, None, b"", None
        if not mem.own:
            del self.memory[mem.id]
        elif mem.capacity < self._room.get(mem.rank, 0) and mem.rank in self.procs:
            self.world.clock.after(0.0, self.at_leisure, self._size, self.life, self.procs[mem.rank])
        if sealed is not None:
            self.world.oracle.freed(sealed)

    def _WriteFiles(self, do: ins.WriteFiles) -> None:  # noqa: N802
        self.writes.write(do)

    def _CancelWrite(self, do: ins.CancelWrite) -> None:  # noqa: N802
        self.writes.cancel(do.attempt)

    def _Commit(self, do: ins.Commit) -> None:  # noqa: N802
        self.writes.commit(do)

    def _Alarm(self, do: ins.Alarm) -> None:  # noqa: N802
        self.world.oracle.count("alarm " + do.kind)

    def _Replicate(self, do: ins.Replicate) -> None:  # noqa: N802
        self.copies.send(do)

    def _MakeParity(self, do: ins.MakeParity) -> None:  # noqa: N802
        parity.make(self, do)

    def known_layouts(self) -> dict[str, Layout]:
        found = (layout for mem in self.memory.values() for layout in (mem.layout, *mem.layouts))
        return {layout.layout_id: layout for layout in found if layout is not None}

    # --- own slots ----------------------------------------------------------------------------------------------
    def new_mem(self, rank: int, *, own: bool, room: int = 0) -> Mem:
        self._slots += 1
        mem = self.memory[self._slots] = Mem(self._slots, rank, own, capacity=room)
        return mem

    def attach(self, proc: Proc, *, running: bool) -> None:
        """A rank's process is connected and says Join."""
        self.arriving.append(proc)
        self.at_leisure(self._attach, proc, running)

    def read_again(self) -> None:
        """What was queued is forgotten, but not who stands at the door."""
        for proc in self.arriving:
            self.at_leisure(self._attach, proc, proc.ready)

    def _attach(self, proc: Proc, running: bool) -> None:
        self.arriving.remove(proc)
        if not proc.alive:
            return
        old = self.standing.get(proc.rank)
        if old is not None and old is not proc:
            old.alive = False  # the shell tells the machine that the rank before is gone
            self.feed(ev.RankLeft(old.rank, False))
        self.procs[proc.rank] = self.standing[proc.rank] = proc
        run = proc.run
        proc.gives_back()
        ranks, ask = run.joining(proc.rank)
        ask = None if running else ask  # as the client says it: nobody who trains is restored
        self.feed(ev.RankJoined(proc.rank, run.attempt, ranks, run.nodes, ask, running, trains=running, grant=proc.newest))
        if self.machine.ctx.done and self.record is not None and self.record.nonce == run.attempt:
            proc.may_train()  # it comes back to a daemon that has heard already: the shell says so at once
        self.asks_for_room(proc, proc.room())

    def left(self, life: int, proc: Proc, clean: bool) -> None:
        """Its process is gone. Who came in its place has told it."""
        if life == self.life:
            self.at_leisure(self._left, proc, clean)

    def _left(self, proc: Proc, clean: bool) -> None:
        if self.standing.get(proc.rank) is proc:
            del self.standing[proc.rank]
            self.feed(ev.RankLeft(proc.rank, clean))

    def asks_for_room(self, proc: Proc, nbytes: int) -> None:
        """Slots of so many bytes; what is FREE and smaller goes at once, the others when they are free."""
        self._room[proc.rank] = nbytes
        self.world.clock.after(SIZING_S + self.world.slot_s, self.at_leisure, self._size, self.life, proc)

    def _size(self, life: int, proc: Proc) -> None:
        if life == self.life and self.procs.get(proc.rank) is proc and proc.rank in self._room and not self.squeezed:
            self._shrink(proc.rank, self._room[proc.rank])
            self.grow(proc.rank)

    def grow(self, rank: int) -> None:
        """One slot after another, or all at once where touching memory takes no time. In the event loop: a resize that waited there
        took one away that had come beside it, and that was told as there after it had been told as gone, for ever."""
        room = self._room.get(rank, 0)
        have = sum(mem.own and mem.rank == rank and mem.capacity >= room for mem in self.memory.values())
        lacking = self.world.policy.own_slots - have
        count = min(lacking, 1) if self.world.slot_s else lacking
        if count > 0:
            self.feed(ev.SlotsReady(rank, tuple(self.new_mem(rank, own=True, room=room).id for _ in range(count))))
        if lacking > count:
            self.world.clock.after(self.world.slot_s, self.at_leisure, self._size, self.life, self.procs[rank])

    def squeeze(self, squeezed: bool) -> None:
        """Memory is short: FREE slots go, nothing new is taken in. When it is over, ranks get their slots back."""
        if self.alive:
            self.squeezed = squeezed
            self.at_leisure(self._squeeze, squeezed)

    def _squeeze(self, squeezed: bool) -> None:
        for rank in list(self.procs):
            if squeezed:
                self._shrink(rank)
            else:
                self.grow(rank)
            self.feed(ev.SlotsShort(rank, f"not {self.world.policy.own_slots} slots: the budget is spent" if squeezed else ""))

    def _shrink(self, rank: int, room: int = 1 << 60) -> None:
        """FREE slots with less room go."""
        own = [mem for mem in self.memory.values() if mem.own and mem.rank == rank and mem.capacity < room]
        free = [mem.id for mem in own if mem.state == "free"]
        for slot in free:
            del self.memory[slot]
        if free:
            self.feed(ev.SlotsGone(rank, tuple(free)))

    def best(self, snapshot: SnapshotId, rank: int) -> Mem | None:
        held = [m for m in self.memory.values() if m.state == "sealed" and (m.snapshot, m.rank) == (snapshot, rank)]
        return min(held, key=lambda m: m.fact.tier if m.fact else 0, default=None)
