"""Thousands of nodes with one rank each: how long the core's decisions take, on one machine for all of them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ckptd.core.policy import Policy
from tests.sim.host import Host
from tests.sim.moments import NODE
from tests.sim.world import World

START_S, LOST_S, BACK_S = 120.0, 60.0, 240.0  # simulated, at most
SNAPSHOTS = 3


@dataclass
class Times:
    """Seconds of the processor, of all nodes together: until all train, for snapshots, from a loss until all train again.

    worst: the longest single event, and what it was; the steward's event loop stands still for it."""

    start_s: float = 0.0
    snapshots_s: float = 0.0
    restore_s: float = 0.0
    worst_s: float = 0.0
    worst: str = ""
    by_event: Counter[str] = field(default_factory=Counter)


class Large(World):
    """No faults but the one that is asked for; every node with a domain of its own."""

    def __init__(self, size: int, seed: int = 3) -> None:  # in one of 5 n + 1 the books of few ranks wait as those of thousands
        super().__init__(seed)
        self.policy = Policy(replicas=1, own_slots=3, flush_every_steps=0, steward_timeout_s=20.0, durable=False,
                             join_timeout_s=60.0, restore_timeout_s=120.0, inventory_timeout_s=20.0)  # fmt: skip
        self.step_s, self.stride = 5.0, 1
        self.capture_s = self.replicate_s = 0.5
        self.quiet()
        self.at_no_cost()
        self.large = True
        self.net.delay_s = 0.002
        self.times = Times()
        self.hosts = {f"n{i}": TimedHost(self, f"n{i}", f"d{i}") for i in range(size)}

    def life(self) -> Times:
        self.start()
        self.times.start_s = self._until("all train", START_S, self._training)
        self.times.snapshots_s = self._until(
            "snapshots", LOST_S, lambda: len(self.oracle.certified_ever) >= SNAPSHOTS
        )
        before = set(self.oracle.certified_ever)
        self.faults.kill(self.hosts["n7"], NODE)
        again = lambda: self._training() and bool(set(self.oracle.certified_ever) - before)  # noqa: E731
        self.times.restore_s = self._until("all train again, from memory", BACK_S, again)
        return self.times

    def _training(self) -> bool:
        return self.launcher.run is not None and self.launcher.run.training

    def _until(self, what: str, seconds: float, condition: Any) -> float:
        began = time.process_time()
        assert self.clock.run(self.clock.now + seconds, condition), (
            f"not within {seconds} simulated seconds: {what}"
        )
        return time.process_time() - began


class TimedHost(Host):
    world: Large

    def _handle(self, event: Any, now: float) -> None:
        began = time.perf_counter()
        super()._handle(event, now)
        took = time.perf_counter() - began
        name = type(event).__name__ if not hasattr(event, "message") else type(event.message).__name__
        self.world.times.by_event[name] += took  # type: ignore[assignment]
        if took > self.world.times.worst_s:
            self.world.times.worst_s, self.world.times.worst = (
                took,
                f"{name} at {self.name}, {self.world.clock.now:.1f} s",
            )
