"""What goes wrong: nodes die with their memory, daemons crash, stop, are cut off; ranks die; storage and disks fail; bits flip."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.events import OTHER_MAPPER, STILL_READ, DrainAsked, FlushAsked, Reading
from tests.sim import forgetting
from tests.sim.breaks import break_down
from tests.sim.disk import Written
from tests.sim.moments import CUT_S, DAEMON, KEEPER, NODE, REBOOT, STORAGE_S, Moments
from tests.sim.seasons import AIMED_OF, RATES, draw_season
from tests.sim.state import OBJECTS_BYTES, Mem, fragments_of
from tests.sim.traps import AT, SPRUNG_WITHIN_S, OldClock, Trap
from tests.sim.writes import SYNC_S

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World

STOP_S = (0.2, 6.0)
READS_S = (0.1, 12.0)
STILL_S = (0.2, 3.0)  # unseen: up to one and a half steward_timeout_s, as links may have it
STATE_S = (2.0, 12.0)
ORDER_S = (0.2, 3.0)  # after the end of a job's ranks
SLOW_MOST = 50.0  # times, of a link for bulk
FEW_OF = 0.15  # of the seeds
SURVIVES_OF = 0.2  # of the ranks of a job that is killed
COMPUTE_LATE = 0.3  # of the computations, and then up to this
COMPUTE_S_MAX = 2.0


class Faults:
    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.active = True
        self.rate = 0.5 if world.harsh else self.rng.choice([0.05, 0.15, 0.3])  # per second
        self.corruption = self.rng.random() < 0.2
        self.aimed = self.rng.random() < 0.25  # at the steward, when a snapshot has just become complete
        self.moments = Moments(self)
        self._bits = Random(f"bits {world.seed}")
        self._kinds: list[Callable[[], None]] = [
            self._node, self._node, self._node, self._daemon, self._daemon, self._daemon, self._rank, self._rank, self._rank,
            self._pause, self._pause, self._partition, self._partition, self._storage, self._storage, self._damage,
            self._damage, self._two_nodes, self._keeper, self._deaf, self._clog, self._slow_link, self._trap, self._trap,
            self._state_dir, self._squeeze, self._squeeze, self._power, self._flush_asked,
        ]  # fmt: skip
        if world.harsh:  # what is usually survived, so that what is survived wrongly shows
            self._kinds = [
                self._daemon, self._daemon, self._daemon, self._daemon, self._rank, self._rank, self._pause, self._pause,
                self._partition, self._partition, self._partition, self._partition, self._damage, self._damage, self._damage,
                self._damage, self._damage, self._damage, self._node, self._node, self._storage, self._storage,
                self._deaf, self._clog, self._trap, self._trap, self._squeeze, self._state_dir,
            ]  # fmt: skip
        elif not world.large and self.rng.random() < FEW_OF:  # a few kinds, often: they meet each other
            self._kinds = self.rng.sample(sorted(set(self._kinds), key=lambda kind: kind.__name__), 3)
            self.rate = 0.6
        self.season = draw_season(world.seed, world.large)
        if self.season.kinds:
            self._dense = Random(f"dense {world.seed}")
            self._kinds = [getattr(self, name) for name, weight in self.season.kinds for _ in range(weight)]
            self.rate, self.aimed = self._dense.choice(RATES), self._dense.random() < AIMED_OF

    def start(self) -> None:
        self.world.clock.after(3.0, self._next)
        self._plan_drains()
        self._plan_stills()
        self._plan_hang_ups()
        self._plan_breaks()
        self._plan_readers()

    def _plan_drains(self) -> None:
        """In every second world nodes are asked to go; some go, some stay after all, some are asked until the end. Drawn
        apart, so that a seed of before shows what it showed."""
        rng = Random(f"drains {self.world.seed}")
        for _ in range(rng.choice([0, 0, 1, 2])):
            name, at = rng.choice(sorted(self.world.hosts)), rng.uniform(4.0, 25.0)
            after = rng.choice([self._gone, self._stays, None])
            self.world.clock.after(at, self._drain, self.world.hosts[name], True)
            if after is not None:
                self.world.clock.after(at + rng.uniform(0.5, 8.0), after, self.world.hosts[name])

    def _plan_stills(self) -> None:
        """In every third world a daemon stands still, and is back before any link sees it. Drawn apart, too."""
        rng = Random(f"stills {self.world.seed}")
        if rng.random() < 1 / 3:
            host, at = self.world.hosts[rng.choice(sorted(self.world.hosts))], rng.uniform(4.0, 25.0)
            self.world.clock.after(at, self._stand_still, host, rng.uniform(*STILL_S))

    def _plan_hang_ups(self) -> None:
        """In every third world some connections between a rank and its daemon break, and both live on. Drawn apart, too."""
        rng = Random(f"hang-ups {self.world.seed}")
        for _ in range(rng.choice([0, 0, rng.randint(1, 4)])):
            self.world.clock.after(rng.uniform(4.0, 29.0), self._hang_up, rng)

    def _plan_breaks(self) -> None:
        """In every fourth world machines break, the steward's more often than others. Drawn apart, too."""
        rng = Random(f"breaks {self.world.seed}")
        for _ in range(rng.choice([0, 0, 0, rng.randint(1, 4)])):
            self.world.clock.after(rng.uniform(4.0, 29.0), self._break, rng)

    def _plan_readers(self) -> None:
        """In every third world the job is read by who is no rank, now and then by several at once. Drawn apart, too."""
        rng = Random(f"readers {self.world.seed}")
        for number in range(rng.choice([0, 0, rng.randint(1, 6)])):
            self.world.clock.after(rng.uniform(4.0, 29.0), self._read, rng, f"reader {number}")

    def _read(self, rng: Random, reader: str) -> None:
        """All nodes keep what is newest there, for a while; some forget it sooner, as their daemons begin anew."""
        seconds = rng.uniform(*READS_S)
        for host in rng.choice(self.world.everyone).hosts.values():
            if self.active and host.alive and not host.paused:
                self.count("a job that is read")
                host.feed(Reading(reader, tuple(sorted(host.machine.slots.sealed)[-rng.randint(1, 3) :])))
                self.world.clock.after(seconds, host.feed, Reading(reader, ()))

    def _break(self, rng: Random) -> None:
        there = [host for host in rng.choice(self.world.everyone).hosts.values() if host.alive and not host.paused]
        stewards = [host for host in there if host.machine.steward.active]
        if self.active and there:
            self.count("a machine that broke")
            self.world.trouble()
            break_down(rng.choice(stewards if stewards and rng.random() < 0.5 else there))

    def _hang_up(self, rng: Random) -> None:
        run = rng.choice(self.world.everyone).launcher.run
        if self.active and run is not None:
            self.count("a connection that broke")
            rng.choice(run.procs).hang_up()

    def _stand_still(self, host: Host, seconds: float) -> None:
        if self.active and host.alive and not host.paused:
            self.count("daemon stood still, unseen")
            self._stop(host, seconds, unseen=True)

    def _drain(self, host: Host, on: bool) -> None:
        """Of all jobs: they share the daemon. None begins when faults are over; one that was begun may still be ended."""
        if host.alive and (self.active or not on):
            self.world.trace(host.name, "!", "is to go" if on else "stays")
            self.world.oracle.count("a node asked to go" if on else "a node that stays after all")
            for world in self.world.everyone:
                world.hosts[host.name].feed(DrainAsked(on))

    def _gone(self, host: Host) -> None:
        if self.active and host.alive:
            said = [world.hosts[host.name].machine.view()["drain"] for world in self.world.everyone]
            if all(one["known"] and not one["slots"] for one in said):
                self.world.oracle.count("a drained node gone")
            self.kill(host, NODE)

    def _stays(self, host: Host) -> None:
        self._drain(host, False)

    def stop(self) -> None:
        self.active = False

    def _next(self) -> None:
        if not self.active:
            return
        self.world.clock.after(self.rng.expovariate(self.rate), self._strike)

    def _strike(self) -> None:
        if self.active:
            self.rng.choice(self._kinds)()
            self._next()

    def count(self, what: str) -> None:
        self.world.oracle.count("fault: " + what)

    # --- daemons and nodes --------------------------------------------------------------------------------------
    def kill(self, host: Host, how: str) -> None:
        """Of all jobs: they share the process."""
        self.world.trouble()
        for world in self.world.everyone:
            self._kill_one(world, world.hosts[host.name], how)
        self.count(how)
        self.world.clock.after(0.3 + self.rng.expovariate(0.5), self._revive, host.name)

    def _kill_one(self, world: World, host: Host, how: str) -> None:
        world.trace(host.name, "!", how)
        if host.alive and host.machine.steward.active and world.oracle.complete_uncertified:
            world.oracle.count("steward lost between holdings and certificate")
        host.stop()
        if how == DAEMON:
            return
        for proc in host.standing.values() if how == KEEPER else ():
            proc.keeps_mapped()
        host.lose_memory()
        # Without storage only daemons can say that the job has run before: not all of them may forget it.
        if how == NODE and self.rng.random() < 0.5 and world.policy.durable:
            host.state.replaced()
        if how in (NODE, REBOOT):
            host.state.power_cut()
            world.launcher.ranks_die(host)
        world.oracle.check_all()

    def _revive(self, name: str) -> None:
        self.world.trouble()
        for world in self.world.everyone:
            if not world.hosts[name].alive:
                world.hosts[name].start()

    def _some(self) -> Host | None:
        alive = [host for host in self.world.hosts.values() if host.alive]
        return self.rng.choice(alive) if alive else None

    def _kill_some(self, how: str) -> None:
        host = self._some()
        if host is not None:
            self.kill(host, how)

    def _node(self) -> None:
        self._kill_some(NODE if self.rng.random() < 0.8 else REBOOT)

    def _two_nodes(self) -> None:
        self._node()
        self._node()

    def _daemon(self) -> None:
        self._kill_some(DAEMON)

    def _keeper(self) -> None:
        self._kill_some(KEEPER)

    def _rank(self) -> None:
        run = self.rng.choice(self.world.everyone).launcher.run
        if run is not None:
            self.count("rank lost")
            self.rng.choice(run.procs).die()

    def kill_living(self, host: Host, how: str) -> None:
        if self.active and host.alive:
            self.kill(host, how)

    def _steward(self) -> None:
        """The daemon that leads the job."""
        stewards = [host for host in self.world.hosts.values() if host.alive and host.machine.steward.active]
        if stewards:
            self.count("steward's daemon aimed at")
            self.kill(self.rng.choice(stewards), self.rng.choice([DAEMON, DAEMON, KEEPER, REBOOT]))

    def _job(self) -> None:
        """All ranks die, or nearly all, and now and then cleanly, as after an error that each of them met."""
        run = self.rng.choice(self.world.everyone).launcher.run
        if run is not None:
            self.count("job killed")
            for proc in run.procs:
                if self.rng.random() >= SURVIVES_OF:
                    proc.die(clean=self.rng.random() < 0.3)

    def _pause(self) -> None:
        host = self._some()
        if host is None:
            return
        if self.rng.random() < 0.3:
            self.count("daemon stopped with an old time")
            for world in self.world.everyone:
                one = world.hosts[host.name]
                one.trap = OldClock(one, lambda one=one: self._stop(one))  # type: ignore[misc]
        else:
            self.count("daemon stopped")
            self._stop(host)

    def _stop(self, host: Host, seconds: float = 0.0, *, unseen: bool = False) -> None:
        self.world.trouble()
        self.world.trace(host.name, "!", "stops")
        seconds = seconds or self.rng.uniform(*STOP_S)
        for world in self.world.everyone:
            world.hosts[host.name].pause(True, unseen=unseen)
            self.world.clock.after(seconds, world.hosts[host.name].pause, False)

    def _trap(self) -> None:
        """The steward's daemon more often than others."""
        host = self._some()
        stewards = [h for h in self.world.hosts.values() if h.alive and h.machine.steward.active]
        if stewards and self.rng.random() < 0.5:
            host = self.rng.choice(stewards)
        if host is None:
            return
        self.set_trap(host, self.rng.choice(AT))

    def set_trap(self, host: Host, at: type, how: str = "") -> None:
        how = how or self.rng.choice([DAEMON, DAEMON, REBOOT, KEEPER, "stop", "stop"])

        def strike(do: ins.Instruction) -> None:
            self._sprung(host, how, do)

        trap = host.trap = Trap(host, at, strike)
        self.world.clock.after(SPRUNG_WITHIN_S, self._take_away, host, trap)

    def _sprung(self, host: Host, how: str, do: ins.Instruction) -> None:
        self.world.trouble()
        if how == "stop":
            self.count("daemon stopped between two instructions")
            host.put_back(do)
            self._stop(host)
            return
        self.count("daemon dies between two instructions")
        if isinstance(do, ins.PersistEpoch):
            self.count("daemon dies while an epoch is written down")
            host.state.cut(Written(do.record, do.ran), self.rng)
        self.kill(host, how)

    @staticmethod
    def _take_away(host: Host, trap: Trap) -> None:
        if host.trap is trap:
            host.trap = None

    # --- cables -------------------------------------------------------------------------------------------------
    def _partition(self) -> None:
        names = list(self.world.hosts)
        self.rng.shuffle(names)
        self.cut_off(set(names[: self.rng.randint(1, max(1, len(names) // 2))]))

    def cut_off(self, away: set[str]) -> None:
        self.count("partition")
        self.world.trouble()
        self.world.trace(",".join(sorted(away)), "!", "cut off")
        self.world.net.split(away)
        self.world.clock.after(self.rng.uniform(*CUT_S), self.heal)

    def heal(self) -> None:
        self.world.trouble()
        self.world.net.heal()

    def _pair(self) -> tuple[str, str]:
        a, b = self.rng.sample(sorted(self.world.hosts), 2)
        return a, b

    def _deaf(self) -> None:
        """One node does not hear another, or nobody; the other way round all is well."""
        a, b = self._pair()
        ways = (
            {(a, b)} if self.rng.random() < 0.6 else {(a, other) for other in self.world.hosts if other != a}
        )
        self.count("one way lost")
        self.world.trouble()
        self.world.trace(a, "!", f"is not heard by {sorted(way[1] for way in ways)}")
        self.world.net.links.deaf |= ways
        self.world.net.changed()
        self.world.clock.after(self.rng.uniform(*CUT_S), self.heal)

    def _clog(self) -> None:
        """Links of some nodes stop one after the other, and open again in another order."""
        names = sorted(self.world.hosts)
        now, links = self.world.clock.now, self.world.net.links
        self.count("clog")
        self.world.trouble()
        for a in self.rng.sample(names, self.rng.randint(1, max(1, len(names) // 2))):
            end = now + self.rng.uniform(*CUT_S)
            both = self.rng.random() < 0.5
            self.world.trace(a, "!", f"is clogged until {end:.3f}")
            for b in names:
                if b != a:
                    links.clogged[a, b] = max(end, links.clogged.get((a, b), 0.0))
                    if both:
                        links.clogged[b, a] = max(end, links.clogged.get((b, a), 0.0))
            self.world.clock.after(end - now, self._unclog)
        self.world.net.changed()

    def _unclog(self) -> None:
        now, links = self.world.clock.now, self.world.net.links
        links.clogged = {way: end for way, end in links.clogged.items() if end > now}
        self.world.trouble()
        self.world.net.changed()

    def _slow_link(self) -> None:
        a, b = self._pair()
        self.count("slow link")
        self.world.net.links.slow[a, b] = self.rng.uniform(5.0, SLOW_MOST)
        self.world.clock.after(self.rng.uniform(*CUT_S), self._as_fast_as_ever, a, b)

    def _as_fast_as_ever(self, a: str, b: str) -> None:
        self.world.net.links.slow.pop((a, b), None)

    # --- storage and disks --------------------------------------------------------------------------------------
    def _storage(self) -> None:
        kind = self.rng.choice(["up", "up", "full", "slow", "failing"])
        self.count("storage " + {"up": "away"}.get(kind, kind))
        for world in self.world.everyone:
            setattr(world.store, kind, kind != "up")
            self.world.clock.after(self.rng.uniform(*STORAGE_S), setattr, world.store, kind, kind == "up")

    def _power(self) -> None:
        """Of the storage: what was not synced is lost or torn. At once, or between the next write and its sync."""
        for world in self.world.everyone:
            if self.rng.random() < 0.3:
                self._cut(world)
            else:
                world.store.when_written = lambda world=world: self.world.clock.after(
                    SYNC_S / 2, self._cut, world
                )  # type: ignore[misc]

    def _cut(self, world: World) -> None:
        if self.active:
            self.count("storage loses power")
            world.trace("store", "!", "loses power")
            if world.store.power_cut():
                self.count("un-synced writes lost")

    def _state_dir(self) -> None:
        host = self._some()
        if host is not None:
            failing = self.rng.choice(["EIO", "ENOSPC", "fsync"])
            self.count("state directory " + failing)
            host.state.failing = failing
            self.world.clock.after(self.rng.uniform(*STATE_S), host.state.mended)

    # --- memory -------------------------------------------------------------------------------------------------
    def _squeeze(self) -> None:
        host = self._some()
        if host is not None:
            self.count("memory short")
            host.squeeze(True)
            self.world.clock.after(self.rng.uniform(*CUT_S), host.squeeze, False)

    def slot_in_use(self) -> str:
        """Why a slot that is given cannot be taken; "": it can."""
        if not self.active or self.rng.random() > self.season.in_use_of:
            return ""
        return self.rng.choice([STILL_READ, OTHER_MAPPER])

    def compute_s(self) -> float:
        """Until a thread begins with what was asked of it, which must not have changed meanwhile."""
        late = self.active and self.rng.random() < COMPUTE_LATE
        return self.rng.uniform(0.0, COMPUTE_S_MAX) if late else 0.0

    def torn(self) -> bool:
        """Training wrote a tensor past its fence, while it was copied."""
        found = self.active and self._bits.random() < self.season.torn_of
        if found:
            self.count("a write past the fence")
        return found

    def _damage(self) -> None:
        """A bit flips in memory."""
        world = self.rng.choice(self.world.everyone)
        alive = [host for host in world.hosts.values() if host.alive]
        host = self.rng.choice(alive) if alive else None
        sealed = [mem for mem in host.memory.values() if mem.state == "sealed"] if host is not None else []
        if host is None or not sealed:
            return
        self.damage_one(host, self.rng.choice(sealed))

    def damage_one(self, host: Host, mem: Mem) -> None:
        if mem.payload and mem.snapshot is not None:
            host.world.trace(host.name, "!", f"a bit of slot {mem.id} flips")
            host.world.oracle.damaged(host, mem.snapshot)
            self._flip(mem)
            self.count("bit flip")

    def _flip(self, mem: Mem) -> None:
        """Only objects and fragments have sums: what lies between them is nobody's. No bit flips back."""
        assert mem.payload is not None and mem.layout is not None
        if mem.fact is not None and mem.fact.shard is not None:
            at = self._bits.randrange(OBJECTS_BYTES, len(mem.payload))
        else:
            whole = [(0, OBJECTS_BYTES), *((f.offset, f.nbytes) for f in fragments_of(mem.layout))]
            spans = [(start, n) for start, n in whole if n and start + n <= len(mem.payload)]
            start, n = spans[self.rng.randrange(len(whole)) % len(spans)]
            at = start + self._bits.randrange(n)
        bit = 1 if mem.payload[at] == mem.sums[at] else 2
        mem.payload = mem.payload[:at] + bytes([mem.payload[at] ^ bit]) + mem.payload[at + 1 :]

    # --- trainers that do not fit -------------------------------------------------------------------------------
    def misfit(self) -> str:
        """What is wrong with a rank that restores: its model does not fit, its bytes do not come, it cannot take them."""
        if not self.active or self.rng.random() > self.season.misfit_of:
            return ""
        return self.rng.choice(["mismatch", "timeout", "load", "load"])

    def _forget(self) -> None:
        """The operator ends the job and has it forgotten; whoever started it may be starting it again."""
        world = self.rng.choice(self.world.everyone)
        for run in world.launcher.runs():
            run.kill()
        self.world.clock.after(self.rng.uniform(*ORDER_S), self._order, world)

    def _order(self, world: World) -> None:
        if self.active and forgetting.order(world):
            self.count("job forgotten by order")

    # --- wishes -------------------------------------------------------------------------------------------------
    def _flush_asked(self) -> None:
        host = self._some()
        steps = [proc.step for proc in host.procs.values() if proc.step >= 0] if host is not None else []
        if host is not None and steps:
            host.feed(FlushAsked(min(steps)))
