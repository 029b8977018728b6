"""What goes wrong: nodes die with their memory, daemons crash, stop, are cut off; ranks die; storage vanishes; bits flip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptd.core.ids import SnapshotId

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.active = True
        self.rate = 0.5 if world.harsh else self.rng.choice([0.05, 0.15, 0.3])  # per second
        self.corruption = self.rng.random() < 0.2
        self.aimed = self.rng.random() < 0.25  # at the steward, when a snapshot has just become complete
        self._kinds: list[Callable[[], None]] = [
            self._node, self._node, self._daemon, self._daemon, self._rank, self._rank, self._pause, self._partition,
            self._storage, self._damage, self._two_nodes,
        ]  # fmt: skip
        if world.harsh:  # what is usually survived, so that what is survived wrongly shows
            self._kinds = [
                self._daemon, self._daemon, self._rank, self._pause, self._partition, self._partition, self._damage,
                self._damage, self._damage, self._node, self._storage,
            ]  # fmt: skip

    def start(self) -> None:
        self.world.clock.after(3.0, self._next)

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

    def on_complete(self, snapshot: SnapshotId) -> None:
        """All ranks hold it, nobody has certified it."""
        if not self.active or not self.aimed or self.rng.random() > 0.1:
            return
        record = self.world.oracle.records.get(snapshot.epoch)
        if record is not None:
            self.world.clock.after(0.0, self._kill_steward, record.nodes[0].node, snapshot)

    def _kill_steward(self, node: str, snapshot: SnapshotId) -> None:
        host = self.world.hosts[node]
        if host.alive and snapshot in self.world.oracle.complete_uncertified:
            self.kill(host, memory=self.rng.random() < 0.5)

    # --- kinds --------------------------------------------------------------------------------------------------
    def kill(self, host: Host, *, memory: bool) -> None:
        """memory: the whole node dies, with its ranks."""
        world = self.world
        world.trouble()
        world.trace(host.name, "!", "node dies" if memory else "daemon dies")
        if host.alive and host.machine.steward.active and world.oracle.complete_uncertified:
            world.oracle.count("steward lost between holdings and certificate")
        host.stop()
        if memory:
            run = world.launcher.run
            host.lose_memory()
            for old in [*world.launcher.old, *([run] if run is not None else [])]:
                for proc in old.procs:
                    if proc.host is host:
                        proc.die()
            world.oracle.check_all()
        world.oracle.count("node lost" if memory else "daemon lost")
        world.clock.after(0.3 + self.rng.expovariate(0.5), self._revive, host)

    def _revive(self, host: Host) -> None:
        if not host.alive:
            self.world.trouble()
            host.start()

    def _some(self) -> Host | None:
        alive = [host for host in self.world.hosts.values() if host.alive]
        return self.rng.choice(alive) if alive else None

    def _node(self) -> None:
        host = self._some()
        if host is not None:
            self.kill(host, memory=True)

    def _two_nodes(self) -> None:
        self._node()
        self._node()

    def _daemon(self) -> None:
        host = self._some()
        if host is not None:
            self.kill(host, memory=False)

    def _rank(self) -> None:
        run = self.world.launcher.run
        if run is not None:
            self.world.oracle.count("rank lost")
            self.rng.choice(run.procs).die()

    def _pause(self) -> None:
        host = self._some()
        if host is not None:
            self.world.trouble()
            self.world.trace(host.name, "!", "stops")
            host.pause(True)
            self.world.clock.after(self.rng.uniform(0.2, 6.0), host.pause, False)

    def _partition(self) -> None:
        names = list(self.world.hosts)
        self.rng.shuffle(names)
        away = set(names[: self.rng.randint(1, max(1, len(names) // 2))])
        self.world.trouble()
        self.world.trace(",".join(sorted(away)), "!", "cut off")
        self.world.net.split(away)
        self.world.clock.after(self.rng.uniform(0.5, 8.0), self._heal)

    def _heal(self) -> None:
        self.world.trouble()
        self.world.net.heal()

    def _storage(self) -> None:
        self.world.store.up = False
        self.world.clock.after(self.rng.uniform(1.0, 8.0), self._storage_back)

    def _storage_back(self) -> None:
        self.world.store.up = True

    def _damage(self) -> None:
        """A bit flips in memory."""
        host = self._some()
        sealed = [mem for mem in host.memory.values() if mem.state == "sealed"] if host is not None else []
        if host is None or not sealed:
            return
        mem = self.rng.choice(sealed)
        if mem.content and mem.snapshot is not None:
            self.world.trace(host.name, "!", f"a bit of slot {mem.id} flips")
            self.world.oracle.damaged(host, mem.snapshot)
            mem.content[self.rng.randrange(len(mem.content))] = ("flip", 0)
            self.world.oracle.count("bit flip")
