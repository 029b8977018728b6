"""The training side: rank processes in lockstep, and their client's rules about grants."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from ckptd.core.ids import NodeInfo, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol.instructions import GiveSlot
from ckptd.core.protocol.messages import HoldingFact, RestoreAsk
from ckptd.core.state_map.layout import REPLICA, Layout
from tests.sim.broken import Broken
from tests.sim.host import SIZING_S, UNIX_S, Host
from tests.sim.state import Mem, captured, digests_of, fragments_of, layout_of
from tests.sim.training import Origin, Trail

if TYPE_CHECKING:
    from tests.sim.world import World

TORN = "a tensor was written past the fence"
FENCE = 4.0  # the optimizer waits this many usual captures for one
MUST_S = 3.0  # snapshot(must=True) waits this long for its grant
ASKS_S = 2.0  # it says again that it waits
WAITS_S = 12.0  # wait("sealed") after it
LOOKS_S = 0.2


class Proc:
    """One rank's process with its client."""

    def __init__(self, run: Run, rank: int, host: Host) -> None:
        self.run, self.rank, self.host, self.world = run, rank, host, run.world
        self.alive = True
        self.ready = False  # restore() returned
        self.conn = 0  # the life of the daemon it is connected to
        self.line = 0  # the number of its connection
        self.step = -1
        self.passed = -1  # newest step called that no grant took and whose state is gone
        self.newest = 0  # grant that ever came
        self.taken = -1  # newest grant that was taken
        self.took = True  # a grant took the step called last
        self.void = False  # ... and what was captured of it is void
        self.told_at = -1e9  # when the daemon was told that we wait
        self.asks: int | None = None
        self.grants: dict[int, GiveSlot] = {}
        self.came_at: dict[int, int] = {}  # grant -> newest step called when it came
        self.filling: Mem | None = None
        self.loaded: tuple[tuple[str, int, bytes], ...] | None = None  # (key, first element, bytes)
        self.restored: SnapshotId | None = None
        self.epoch = 0  # that it loaded for
        self.most = 0  # bytes of a snapshot so far
        self.maps: list[Mem] = []  # slots of a daemon that lost its memory

    # --- connection ---------------------------------------------------------------------------------------------
    def connect(self) -> None:
        if not self.alive or self.host.procs.get(self.rank) is self:
            return
        if not self.host.alive or self.host.paused:
            self.world.clock.after(0.3, self.connect)
            return
        self.conn, self.line = self.host.life, self.line + 1
        self.host.attach(self, running=self.ready)

    def disconnected(self) -> None:
        self.grants.clear()
        self.void |= self.filling is not None
        self.filling, self.conn = None, -1  # what is still on its way belongs to nobody
        if self.alive and not self.ready and self.run.ask is not None:
            self.failed("lost", "the daemon was lost in mid-restore")
        elif self.alive:  # a rank that asks for no restore trains already, and joins anew
            if self.asks is not None:
                self._stop_asking(self.asks)
            self.world.clock.after(0.2 + 0.2 * self.world.rng.random(), self.connect)

    def keeps_mapped(self) -> None:
        """The daemon and its keeper are gone; what was this rank's own is still mapped here."""
        self.maps = [mem for mem in self.host.memory.values() if mem.own and mem.rank == self.rank and self.alive]

    def gives_back(self) -> None:
        """To the daemon that lost it, as the client offers what it maps before it joins (D1, P7)."""
        maps, self.maps = self.maps, []
        for mem in maps:
            if mem.id not in self.host.memory:
                self.world.oracle.count("memory that a trainer gave back")
                self.host.memory[mem.id] = mem
                if mem.state == "sealed":
                    self.world.oracle.held(self.host, mem)
                self.host.adopt(mem)

    def hang_up(self) -> None:
        """Its connection breaks while it and its daemon live on, as that of a process which was stopped for long."""
        if self.alive and self.host.procs.get(self.rank) is self:
            del self.host.procs[self.rank]
            self.disconnected()

    def tell(self, event: ev.Event) -> None:
        if self.conn == self.host.life and self.host.alive:
            self.world.clock.after(UNIX_S, self.host.feed_if, self.conn, event)

    def die(self, *, clean: bool = False) -> None:
        """The process is gone: it said goodbye, or its daemon's pidfd fires."""
        if not self.alive:
            return
        self.alive = False
        if self.host.procs.get(self.rank) is self:
            del self.host.procs[self.rank]
            if self.conn == self.host.life and self.host.alive:
                self.world.clock.after(UNIX_S, self.host.left, self.conn, self, clean)

    def failed(self, code: str, reason: str) -> None:
        """restore() raised: the trainer ends."""
        self.world.trace(f"rank{self.rank}", "!", f"{code}: {reason}")
        self.run.failures.append(code)
        self.die()

    def superseded(self) -> None:
        self.die()

    # --- restore ------------------------------------------------------------------------------------------------
    def opened(self, epoch: int, snapshot: SnapshotId | None, loaded: tuple[tuple[str, int, bytes], ...]) -> None:
        self.epoch, self.restored, self.loaded = epoch, snapshot, loaded
        self.world.oracle.loaded(self.run)

    def may_train(self) -> None:
        if self.loaded is None and self.run.ask is None and self.host.record is not None:
            self.opened(self.host.record.number, None, ())  # its connection was broken when it was opened
        if not self.ready and self.loaded is not None:
            self.ready = True
            self.world.oracle.let_go(self)
            self.run.became_ready()

    # --- snapshot() ---------------------------------------------------------------------------------------------
    def call(self, step: int, must: bool) -> bool:
        """True: the rank goes on at once (a capture may run in the background)."""
        self.passed = self.passed if self.took else self.step
        self.asks = None
        self.step, self.took, self.void = step, False, False
        return self._take_or_ask(step, must)

    def _take_or_ask(self, step: int, must: bool) -> bool:
        usable = sorted(
            (g for g in self.grants.values() if g.from_step <= step), key=lambda g: (g.from_step, g.grant)
        )
        self.tell(ev.RankProgress(self.rank, step, must and not usable))
        if usable:
            return not self._capture(usable[0], step)
        if must and self.conn == self.host.life:
            self.asks = step
            self.world.clock.after(MUST_S, self._stop_asking, step)
            return False
        return True

    def takes_again(self, step: int) -> None:
        """wait() of a rank that was told that this step is void, or was not granted it: the state is still there."""
        if self.asks is not None or self.filling is not None or not self.alive or self.conn != self.host.life:
            return
        if self.believes:
            if self.world.clock.now - self.told_at >= ASKS_S:
                self.told_at = self.world.clock.now
                self.tell(ev.LevelAsked(step, self.taken))
            return
        self.took = self.void = False
        self.world.oracle.count("a step captured anew")
        self._take_or_ask(step, must=True)

    @property
    def believes(self) -> bool:
        """That the step called last is captured, and will have a level."""
        return self.took and not self.void

    def told(self, snapshot: SnapshotId, void: str) -> None:
        if void and snapshot == SnapshotId(self.epoch, self.step, self.taken):
            self.void = True

    def _stop_asking(self, step: int) -> None:
        if self.asks == step and self.alive:
            self.asks = None
            self.run.passed(self)

    def granted(self, life: int, give: GiveSlot) -> None:
        if life != self.conn or not self.alive:
            return
        self.newest = max(self.newest, give.grant)
        self.came_at[give.grant] = self.step
        passed = self.passed if give.grant > self.taken else self.step
        if self.asks is not None and passed < give.from_step <= self.asks:
            step, self.asks = self.asks, None
            if not self._capture(give, step):
                self.run.passed(self)
        elif give.from_step <= (passed if self.took else self.step):
            self.tell(ev.RankMissed(self.rank, give.grant, "late"))
        else:
            self.grants[give.grant] = give

    def taken_back(self, life: int, grant: int) -> None:
        if life == self.conn and self.alive and self.grants.pop(grant, None) is not None:
            self.tell(ev.RankMissed(self.rank, grant, "taken back"))

    def room(self) -> int:
        """Bytes that the next snapshot takes, and no earlier one took more."""
        self.most = max(self.most, self._layout(self.run.step + 1).payload_bytes)
        return self.most

    def _capture(self, give: GiveSlot, step: int) -> bool:
        """False: there is no room for it."""
        self.grants.pop(give.grant, None)
        self.taken, self.took, self.void = give.grant, True, False
        if self._layout(step).payload_bytes > self.host.memory[give.slot].capacity:
            self.world.oracle.count("a slot too small")
            self.tell(ev.RankMissed(self.rank, give.grant, ev.NO_MEMORY))
            self.most = max(self.most, self._layout(step).payload_bytes)
            self.host.asks_for_room(self, self.most)
            self.void = True
            return False
        mem = self.filling = self.host.memory[give.slot]
        assert mem.state == "filling", f"a capture into a slot that is {mem.state}"
        payload = captured(self.world.model, Origin(self.run.trail, step, give.grant), self._layout(step))
        mem.payload = payload[: len(payload) // 2]
        slow = 10 if self.world.rng.random() < 0.01 and not self.world.calm else 1
        seconds = slow * self.world.capture_s * (0.5 + self.world.rng.random()) * self.world.load(len(payload))
        fence = FENCE * self.world.capture_s
        if seconds > fence:
            self.world.clock.after(fence, self._give_up, self.conn, mem, give)
        else:
            self.world.clock.after(seconds, self._captured, self.conn, mem, give, step, payload)
        return True

    def _layout(self, step: int) -> Layout:
        return layout_of(self.world.model.tensors(step), self.rank, self.run.domains, self.world.policy.tolerates)

    def _corrupted(self, step: int, payload: bytes) -> bytes:
        """Each rank in its own way: what is wrong everywhere alike nobody can find."""
        at = next(f.offset for f in fragments_of(self._layout(step)) if f.sharing == REPLICA)
        return payload[:at] + bytes([payload[at] ^ (1 + self.rank)]) + payload[at + 1 :]

    def _fills(self, conn: int, mem: Mem, give: GiveSlot) -> bool:
        """Still, and not for another grant, which a broken connection and a new one may have brought meanwhile."""
        return conn == self.conn and self.filling is mem and mem.grant == give.grant

    def _give_up(self, conn: int, mem: Mem, give: GiveSlot) -> None:
        if self.alive and self._fills(conn, mem, give):
            self.filling, self.void = None, True
            self.tell(ev.RankMissed(self.rank, give.grant, "fence timeout"))
        if self.alive:
            self.run.passed(self)

    def _captured(self, conn: int, mem: Mem, give: GiveSlot, step: int, payload: bytes) -> None:
        if not self.alive:
            return
        if self._fills(conn, mem, give) and self.host.alive:
            self.filling = None
            if self.world.faults.torn():
                self.void = True
                self.tell(ev.RankMissed(self.rank, give.grant, TORN, written={"model": ("w",)}))
                self.run.passed(self)
                return
            mem.payload = self._corrupted(step, payload) if self.world.corrupts(self, self._layout(step)) else payload
            self.world.clock.after(
                UNIX_S + self.world.seal_s, self.host.at_leisure,
                self._sealed, conn, mem, give, step, self.run.attempt,
            )
        self.run.passed(self)

    def _sealed(self, conn: int, mem: Mem, give: GiveSlot, step: int, attempt: str) -> None:
        """The daemon has made the sums; as the shell does, it gives up when a newer epoch opened meanwhile."""
        host = self.host
        if conn != host.life or mem.state != "filling" or mem.payload is None or mem.grant != give.grant:
            return
        record = host.record
        if record is None or record.nonce != attempt:
            host.feed_if(conn, ev.RankMissed(self.rank, give.grant, "a newer epoch opened"))
            return
        layout = self._layout(step)
        mem.state, mem.layout, mem.sums = "sealed", layout, mem.payload
        keep = self.run.keeps(step)
        digests = digests_of(layout, mem.sums)
        mem.fact = HoldingFact(SnapshotId(record.number, step, give.grant), self.rank, 0, layout.layout_id, digests, keep)
        self.world.oracle.sealed(host, mem, Origin(self.run.trail, step, give.grant))
        came_at = self.came_at.pop(give.grant, None)
        host.feed_if(conn, ev.SlotSealed(self.rank, mem.id, give.grant, step, layout, digests, keep, came_at))


class Run:
    """One start of the job: ranks on nodes, training in lockstep."""

    def __init__(self, world: World, attempt: str, places: list[Host], ask: RestoreAsk | None) -> None:
        """places: the node of each rank."""
        self.world, self.attempt, self.ask = world, attempt, ask
        self.ranks = tuple(host.name for host in places)
        self.nodes: tuple[NodeInfo, ...] = tuple(host.info for host in dict.fromkeys(places))
        self.domains = tuple(host.domain for host in places)
        self.hosts = tuple(dict.fromkeys(places))
        self.failures: list[str] = []
        self.step = 0
        self.trail: Trail  # once all are ready
        self.stopped = False
        self._waiting: set[int] = set()
        self._left_to_ready = len(self.ranks)
        self.procs = [Proc(self, rank, world.hosts[name]) for rank, name in enumerate(self.ranks)]
        self.salt = world.rng.randrange(1 << 30)
        self._patient = self.salt % 3 == 0  # its first step is must=True, and it waits for what is
        self._first = 0
        self.confused = ""  # what rank 0 says otherwise than the others
        if len(places) > 1 and not world.calm and world.rng.random() < world.faults.season.confused_of:
            self.confused = world.rng.choice(["ask", "world"])

    def joining(self, rank: int) -> tuple[tuple[str, ...], RestoreAsk | None]:
        """The world and the ask that this rank names."""
        if rank or not self.confused:
            return self.ranks, self.ask
        if self.confused == "ask":
            return self.ranks, RestoreAsk(source="memory", step=1)
        return (*self.ranks, self.ranks[0]), self.ask

    def first_comes_again(self) -> bool:
        """Somebody starts rank 0 once more by hand, with another world, while it joins. False: it does not."""
        first = self.procs[0]
        if not first.alive or first.ready or first.conn != first.host.life:
            return False
        first.die()
        self.confused = "world"
        self.procs[0] = Proc(self, 0, first.host)
        self.world.clock.after(2 * UNIX_S, self.procs[0].connect)
        return True

    def start(self) -> None:
        for proc in self.procs:
            self.world.clock.after(0.3 * self.world.rng.random(), proc.connect)

    @property
    def broken(self) -> bool:
        return not all(proc.alive for proc in self.procs)

    @property
    def training(self) -> bool:
        return self._left_to_ready == 0 and not self.broken

    def became_ready(self) -> None:
        self._left_to_ready -= 1
        if self._left_to_ready == 0:
            self.trail = self.world.oracle.restored(self)
            self.step = self.procs[0].restored.step if self.procs[0].restored is not None else 0
            self._first = self.step + self.world.stride
            self.world.clock.after(self._until_first_step_s(), self._advance)

    def _until_first_step_s(self) -> float:
        """A loop may call before its slots are there, or while they come."""
        if not self._patient:
            return self.world.step_s
        return SIZING_S + self.world.slot_s * 2 * Random(f"first step {self.attempt}").random()

    def _advance(self) -> None:
        """One step of all ranks; the next begins when every rank has passed this one's snapshot() and fence."""
        if self.broken or self.stopped:
            return
        if any(proc.filling is not None for proc in self.procs):  # an optimizer step waits for what is copied
            self.world.clock.after(LOOKS_S, self._advance)
            return
        self.step += self.world.stride
        for proc in self.procs:
            proc.asks = None  # a wait() that is over: what comes for that step now is late
        self._waiting = {proc.rank for proc in self.procs}
        must = self._musts(self.step)
        for proc in self.procs:
            self.world.clock.after(0.2 * self.world.step_s * self.world.rng.random(), self._call, proc, must)

    def _call(self, proc: Proc, must: bool) -> None:
        if proc.alive and not self.stopped and proc.call(self.step, must):
            self.passed(proc)

    def passed(self, proc: Proc) -> None:
        if proc.rank in self._waiting:
            self._waiting.discard(proc.rank)
            if not self._waiting and self._patient and self._musts(self.step):
                self._wait(self.world.clock.now)
            elif not self._waiting:
                self.world.clock.after(self.world.step_s, self._advance)

    def _wait(self, since: float, captured: tuple[int, ...] = (), captured_at: float = 0.0) -> None:
        """The loop stands still until it hears what became of this step, as before an evaluation or at its end (P14). captured: the
        grants under which the ranks believe that they have it, since when; (): one of them does not."""
        if self.broken or self.stopped:
            return
        world, now, epoch = self.world, self.world.clock.now, self.procs[0].epoch
        certified = (epoch, self.step) in world.oracle.certified_steps
        believed = tuple(proc.taken for proc in self.procs) if all(proc.believes for proc in self.procs) else ()
        if believed != captured:
            captured, captured_at = believed, now
        waits = now - since < WAITS_S or (captured and now - captured_at < WAITS_S)
        if not certified and waits:
            for proc in self.procs:
                proc.takes_again(self.step)
            world.clock.after(LOOKS_S, self._wait, since, captured, captured_at)
            return
        world.oracle.count("a loop that waited for a level")
        there = all(host.alive and host.record is not None and host.record.number == epoch for host in self.hosts)
        if not certified and captured and there and not world.trouble_since(WAITS_S):
            raise Broken(f"P14 a loop stood still at step {self.step} of epoch {epoch} for {WAITS_S} s, and no level was told")
        world.clock.after(world.step_s, self._advance)

    def keeps(self, step: int) -> bool:
        return (step * 7919 + self.salt) % 41 == 0

    def _musts(self, step: int) -> bool:
        first = self._patient and step == self._first
        return first or (step * 104729 + self.salt) % (5 if self._patient else 23) == 0

    def say_goodbye(self) -> None:
        """The training loop has ended."""
        for proc in self.procs:
            proc.die(clean=True)

    def kill(self) -> None:
        self.stopped = True
        for proc in self.procs:
            proc.die()
