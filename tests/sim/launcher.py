"""Whoever starts the job again when it broke: where, with which world, and what it asks for."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from ckptd.core.protocol.messages import RestoreAsk
from tests.sim.host import Host
from tests.sim.trainer import Run

if TYPE_CHECKING:
    from tests.sim.world import World

OVER_ITSELF_S = 1.5  # after the first, at most


class Launcher:
    """Starts the job again when it broke, where daemons are up: another world each time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.run: Run | None = None
        self.old: list[Run] = []
        self.starts = 0
        self.ended = False
        self.twice = False  # two starts live side by side, and nobody has cleared that up
        self._chance = Random(f"over itself {world.seed}")  # apart, so that a seed of before shows what it showed

    def look(self) -> None:
        """Every half second: is the job alive?"""
        self.world.clock.after(0.5, self.look)
        run = self.run
        if self.ended or (run is not None and not run.broken):
            return
        if run is not None:
            self._clear(run)
            self.run = None
            self.world.clock.after(0.5 + 2 * self.world.rng.random(), self._start_if_none)
        elif self.starts == 0:
            self._start_if_none()

    def _clear(self, run: Run) -> None:
        """Usually everything left of a broken start is killed; ranks behind a partition may live on."""
        self.old.append(run)
        for proc in run.procs:
            stranded = self.world.net.side.get(proc.host.name, 0) != 0
            if not stranded or self.world.calm:
                proc.die()

    def _start_if_none(self) -> None:
        if self.run is None and not self.ended:
            self.start()

    def start(self) -> None:
        world = self.world
        up = [
            h for h in world.hosts.values() if h.alive and not h.paused and world.net.side.get(h.name, 0) == 0
        ]
        everyone = world.policy.durable or len(up) == len(world.hosts)
        if not up or not everyone:  # without storage, only the nodes that ran it before know that it ran
            world.clock.after(1.0, self._start_if_none)
            return
        for run in self.old:
            if world.calm:
                run.kill()
        world.rng.shuffle(up)
        if len(up) > 1 and not world.calm and world.policy.durable and world.rng.random() < world.faults.season.twice_of:
            world.oracle.count("fault: the job started twice at once")
            self.twice = True
            self.old.append(self._begin(up[len(up) // 2 :]))
            up = up[: len(up) // 2]
        part = world.calm or world.rng.random() < 0.6 or not world.policy.durable
        count = len(up) if part else world.rng.randint(1, len(up))
        self.run = self._begin(up[:count])
        if not world.calm and self._chance.random() < world.faults.season.over_itself_of:
            world.clock.after(self._chance.uniform(0.0, OVER_ITSELF_S), self._over_itself, self.run, up[:count])

    def _over_itself(self, first: Run, hosts: list[Host]) -> None:
        """A scheduler that starts the job anew does not always wait until the ranks of the first start are gone."""
        up = [host for host in hosts if host.alive and not host.paused]
        if self.run is first and not first.training and not self.world.calm and len(up) == len(hosts):
            self.world.oracle.count("fault: the job started over itself")
            self.old.append(first)
            self.run = self._begin(hosts)

    def clear_up(self) -> None:
        """Of two starts of one job, storage commits only what the later one has; whoever runs the job ends both of them."""
        if self.twice:
            self.twice = False
            for run in self.runs():
                run.kill()

    def runs(self) -> list[Run]:
        """Oldest first; ranks of old ones may live on behind a partition."""
        return [*self.old, *([self.run] if self.run is not None else [])]

    def ranks_die(self, host: Host) -> None:
        """With their node."""
        for run in self.runs():
            for proc in run.procs:
                if proc.host is host:
                    proc.die()

    def _begin(self, hosts: list[Host]) -> Run:
        self.starts += 1
        run = Run(self.world, f"a{self.starts}", self._seats(hosts), self._ask())
        run.start()
        self.world.faults.moments.on_start(hosts)
        return run

    def _seats(self, hosts: list[Host]) -> list[Host]:
        """A node has some ranks, usually as many as the others; they follow each other, or go round."""
        rng = self.world.rng
        if len(hosts) > 8:
            return hosts
        if rng.random() < 0.1:
            return [host for host in hosts for _ in range(rng.choice([1, 1, 2, 3]))]
        per_node = rng.choice([1, 1, 1, 1, 2, 2, 3 if len(hosts) < 4 else 1])
        return hosts * per_node if rng.random() < 0.2 else [host for host in hosts for _ in range(per_node)]

    def _ask(self) -> RestoreAsk | None:
        world, last = self.world, self.old[-1].failures if self.old else []
        ask = RestoreAsk()
        if any(code in ("unrecoverable", "unreachable") for code in last):
            ask = replace(ask, allow_fresh=world.calm or world.rng.random() < 0.5)
        elif self.starts > 1 and world.rng.random() < 0.05:
            return None
        elif self.starts > 1 and world.rng.random() < 0.1:
            certified = sorted(world.oracle.certified_ever)
            if certified:
                ask = replace(ask, step=world.rng.choice(certified[-5:]).step, allow_fresh=True)
        return ask
