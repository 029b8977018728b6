"""A job that trains far faster than the seeded worlds: steps of milliseconds, links that now and then stall (P14).

No faults: what is measured is how many snapshots the grants let through. Links between rank and daemon keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.steward import steward
from ckptd.core.protocol.messages import RestoreAsk
from tests.sim.clock import Clock
from tests.sim.host import Host
from tests.sim.trainer import Proc, Run
from tests.sim.world import World

START_S = 30.0  # simulated, until every rank trains
LOOP_S = 600.0  # at most, for all steps
SETTLE_S = 2.0


@dataclass(frozen=True)
class Speed:
    """Seconds. A link's delay is ``link_s``, and with probability ``stall`` up to ``stall_s`` more."""

    step_s: float = 0.004
    capture_s: float = 0.001
    seal_s: float = 0.0005
    replicate_s: float = 0.001
    link_s: float = 0.0003
    stall: float = 0.0
    stall_s: float = 0.02
    net_s: float = 0.0003


class Line:
    """One direction of a unix socket: late now and then, never out of order."""

    def __init__(self, clock: Clock, delay: Callable[[], float]) -> None:
        self._clock, self._delay, self._last = clock, delay, 0.0

    def send(self, call: Callable[..., None], *args: Any) -> None:
        self._last = max(self._last, self._clock.now + self._delay())
        self._clock.after(self._last - self._clock.now, call, *args)


class FastProc(Proc):
    world: FastWorld

    def __init__(self, run: Run, rank: int, host: Host) -> None:
        super().__init__(run, rank, host)
        self.up = Line(self.world.clock, self.world.link_delay)
        self.down = Line(self.world.clock, self.world.link_delay)

    def tell(self, event: ev.Event) -> None:
        self.up.send(self.host.feed_if, self.conn, event)


class FastHost(Host):
    def _GiveSlot(self, do: ins.GiveSlot) -> None:  # noqa: N802
        mem, proc = self.memory[do.slot], self.procs[do.rank]
        assert isinstance(proc, FastProc) and mem.state == "free"
        mem.state, mem.grant = "filling", do.grant
        proc.down.send(proc.granted, self.life, do)

    def _TakeBack(self, do: ins.TakeBack) -> None:  # noqa: N802
        proc = self.procs[do.rank]
        assert isinstance(proc, FastProc)
        proc.down.send(proc.taken_back, self.life, do.grant)


class FastRun(Run):
    def keeps(self, step: int) -> bool:
        return False

    def _musts(self, step: int) -> bool:
        return False


class FastWorld(World):
    def __init__(
        self,
        seed: int,
        speed: Speed,
        *,
        nodes: int = 1,
        per_node: int = 1,
        own_slots: int = 3,
    ) -> None:
        super().__init__(seed)
        steward.RANKS_AT_ONCE_MAX = 256  # what is measured here are the books of a small job
        self.speed = speed
        self.policy = Policy(replicas=1, own_slots=own_slots, durable=False)
        self.step_s, self.capture_s, self.replicate_s = speed.step_s, speed.capture_s, speed.replicate_s
        self.seal_s, self.stride = speed.seal_s, 1
        self.quiet()
        self.at_no_cost()
        self.net.delay_s = speed.net_s
        self.hosts = {f"n{i}": FastHost(self, f"n{i}", f"d{i}") for i in range(nodes)}
        self._per_node = per_node

    def link_delay(self) -> float:
        stalls = self.rng.random() < self.speed.stall
        return self.speed.link_s * (0.5 + self.rng.random()) + (
            self.rng.random() * self.speed.stall_s if stalls else 0.0
        )

    def train(self, steps: int) -> int:
        """Snapshots that were certified, of so many steps with snapshot() in each."""
        for host in self.hosts.values():
            host.start()
        places = [host for host in self.hosts.values() for _ in range(self._per_node)]
        run = FastRun(self, "a1", places, RestoreAsk())
        run.procs = [FastProc(run, rank, self.hosts[name]) for rank, name in enumerate(run.ranks)]
        self.launcher.run = run
        run.start()
        assert self.clock.run(START_S, lambda: run.training), "the job did not start"
        assert self.clock.run(self.clock.now + LOOP_S, lambda: run.step >= steps), "the loop did not end"
        run.stopped = True
        self.clock.run(self.clock.now + SETTLE_S)
        self.oracle.check_all()
        return len(self.oracle.certified_ever)
