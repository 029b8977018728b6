"""One simulated cluster: hosts, network, storage, a job that trains, faults, and the model that watches (design D5)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

from ckptd.core.events import FlushAsked
from ckptd.core.ids import SnapshotId
from ckptd.core.layout import Layout
from ckptd.core.machine.machine import JobMachine
from ckptd.core.policy import Policy
from tests.sim.clock import Clock
from tests.sim.faults import Faults
from tests.sim.host import Host
from tests.sim.mutants import MUTANTS
from tests.sim.net import Net
from tests.sim.oracle import Oracle
from tests.sim.state import Token
from tests.sim.store import Broken, Store
from tests.sim.trainer import Launcher, Proc, Run

FAULTY_S = 30.0  # simulated seconds with faults
CALM_S = 240.0  # at most, until everything completes, is protected and durable
ENOUGH_SNAPSHOTS = 3  # newly completed in the calm phase
VALIDATE_EVERY = 16  # events of a host


class World:
    def __init__(self, seed: int, *, mutant: str = "", verbose: bool = False) -> None:
        self.seed, self.rng = seed, Random(seed)
        self.verbose, self._mutant = verbose, mutant
        rng = self.rng
        self.clock = Clock()
        size = rng.choice([2, 2, 3, 3, 3, 4, 4, 4, 5, 6]) if seed % 50 else rng.choice([12, 24, 64])
        self.large = size > 8
        self.harsh = seed % 4 == 3 and not self.large
        self.policy = self._policy(size)
        self.step_s = 0.25
        self.capture_s = self.step_s * self._ratio()
        self.replicate_s = self.step_s * self._ratio()
        self.flush_s = self.step_s * self._ratio()
        self.fetch_s = 0.1
        self.seal_s = 0.01
        self.stride = rng.choice([1, 1, 1, 5])
        self.calm = False
        self._troubled_at = -1e9
        self.net = Net(self, rng)
        self.store = Store(self.policy)
        self.oracle = Oracle(self)
        spread = rng.random() < 0.8
        domains = size if spread else max(2, size // 2)
        self.hosts = {f"n{i}": Host(self, f"n{i}", f"d{i % domains}") for i in range(size)}
        self.launcher = Launcher(self)
        self.faults = Faults(self)
        self._events = 0
        self._asked_for: SnapshotId | None = None

    def _ratio(self) -> float:
        return float(10 ** self.rng.uniform(-1, 1))

    def _policy(self, size: int) -> Policy:
        rng = self.rng
        return Policy(
            replicas=rng.choice([0, 1, 1, 1, 1, 2]) if size > 2 else 1,
            own_slots=rng.choice([2, 2, 3, 3, 4]),
            flush_every_steps=rng.choice([0, 5, 20]),
            inventory_timeout_s=1.0,
            join_timeout_s=8.0,
            restore_timeout_s=8.0,
            breakpoint_grace_s=1.5,
            steward_timeout_s=2.0,
            replicate_retry_s=0.5,
            write_timeout_s=8.0,
            keep_last=2,
        )

    # --- services of the parts ----------------------------------------------------------------------------------
    def make_machine(self, host: Host) -> JobMachine:
        machine = JobMachine("0/job", host.info, self.policy)
        if self._mutant:
            MUTANTS[self._mutant](machine)
        return machine

    def mutant(self, name: str) -> bool:
        return self._mutant == name

    def token(self, run: Run, step: int) -> Token:
        return run.attempt, step

    def corrupts(self, proc: Proc, layout: Layout) -> bool:
        """Silent corruption: one rank's copy by contract differs."""
        holders = min(self.policy.replicas + 1, len(set(proc.run.domains)))
        shared = holders > 1 and any(f.key == "norm" for f in layout.fragments)
        return shared and not self.calm and self.faults.corruption and self.rng.random() < 0.01

    def wanted_now(self) -> int:
        run = self.launcher.run
        domains = set(run.domains) if run is not None else {h.domain for h in self.hosts.values()}
        return max(0, min(self.policy.replicas, len(domains) - 1))

    def trouble(self) -> None:
        self._troubled_at = self.clock.now

    def trouble_since(self, seconds: float) -> bool:
        return self.net.loss > 0 or self.clock.now - self._troubled_at < seconds

    def on_complete(self, snapshot: SnapshotId) -> None:
        self.faults.on_complete(snapshot)

    def after_event(self, host: Host) -> None:
        self._events += 1
        if not self._events % VALIDATE_EVERY:
            host.machine.validate()

    def trace(self, who: str, way: str, what: Any) -> None:
        if self.verbose:
            sys.stdout.write(f"{self.clock.now:9.3f} {who:>6} {way} {what}\n")

    # --- a whole life -------------------------------------------------------------------------------------------
    def run(self) -> Oracle:
        """Raises Broken when a promise is."""
        for host in self.hosts.values():
            host.start()
        self.launcher.look()
        self.faults.start()
        self.clock.run(FAULTY_S / 3 if self.large else FAULTY_S)
        self._calm_down()
        before = set(self.oracle.certified_ever)
        self._wait("snapshots keep completing", lambda: len(self._of_this_run() - before) >= ENOUGH_SNAPSHOTS)
        self._finish()
        self.oracle.check_all()
        return self.oracle

    def _calm_down(self) -> None:
        """Faults stop; what died comes back."""
        self.calm = True
        self.faults.stop()
        self.trouble()  # a partition that heals now is noticed a little later, as after any other
        self.net.calm()
        self.store.up = True
        for host in self.hosts.values():
            host.pause(False)
            if not host.alive:
                host.start()

    def _finish(self) -> None:
        """Training ends; everything becomes protected and durable (P14)."""
        run = self.launcher.run
        assert run is not None
        run.stopped = True
        self.launcher.ended = True
        self._wait("everything becomes protected", self._protected)
        self._wait("everything becomes durable", self._durable)

    def _newest(self) -> SnapshotId:
        return max(self._of_this_run())

    def _of_this_run(self) -> set[SnapshotId]:
        run, records = self.launcher.run, self.oracle.records
        if run is None or not run.training:
            return set()
        return {s for s in self.oracle.certified_ever if records[s.epoch].nonce == run.attempt}

    def _protected(self) -> bool:
        newest = self._newest()
        promise = self.oracle.promises.get(newest)
        return promise is not None and promise.level >= self.wanted_now()

    def _durable(self) -> bool:
        """A last capture may still have been under way: the newest one is asked for again when it changes."""
        newest = self._newest()
        if newest != self._asked_for:
            self._asked_for = newest
            for host in self.hosts.values():
                host.feed(FlushAsked(newest.step))
        return newest in self.store.commits

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        if not self.clock.run(self.clock.now + CALM_S, condition):
            raise Broken(f"P14 not within {CALM_S} simulated seconds: {what}")

