"""Two starts of one job on both sides of a partition, while storage is away (P3): what ran is not passed over for what did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptd.core.protocol.machine.steward.decide import spread
from ckptd.core.protocol.machine.steward.grants import FULL_S
from ckptd.core.protocol.messages import RestoreAsk
from ckptd.core.redundancy.policies import Replicas
from tests.sim.trainer import Run
from tests.sim.world import World

SEED = 2
SIZE = 4
START_S = FULL_S + 30.0  # simulated, for a start or for a few snapshots, which may have to wait for slots
INSTANT_S = 0.0005  # less than a message takes


def cluster() -> World:
    """Hosts only; nobody starts the job but the test."""
    world = next(
        w
        for w in map(World, range(SEED, 1000))
        if len(w.hosts) == SIZE and w.policy.redundancy == Replicas(1)
    )
    world.quiet()
    for host in world.hosts.values():
        host.start()
    return world


def start(world: World, attempt: str, *nodes: int) -> Run:
    hosts = list(world.hosts.values())
    run = Run(world, attempt, [hosts[i] for i in nodes], RestoreAsk(allow_fresh=True))
    if world.launcher.run is not None:
        world.launcher.old.append(world.launcher.run)
    world.launcher.run = run
    run.start()
    return run


def until(world: World, what: str, condition: Callable[[], bool]) -> None:
    assert world.clock.run(world.clock.now + START_S, condition), f"not within {START_S} s: {what}"


def trains(world: World, run: Run) -> None:
    """Until it has certified something of its own."""
    before = set(world.oracle.certified_ever)
    until(world, f"{run.attempt} to train", lambda: run.training)
    until(world, f"{run.attempt} to certify", lambda: len(set(world.oracle.certified_ever) - before) >= 2)


def dies_at_its_restore(world: World, run: Run) -> None:
    """Its epoch is open on the steward's node; before anybody has loaded, a rank is gone."""
    steward = world.hosts[run.nodes[0].node]
    deadline = world.clock.now + START_S
    while steward.record is None or steward.record.nonce != run.attempt:
        assert world.clock.now < deadline, "it was never opened"
        world.clock.run(world.clock.now + INSTANT_S)
    run.kill()


def known(world: World) -> set[str]:
    return {host.record.nonce for host in world.hosts.values() if host.record is not None}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_higher_number_that_never_ran_does_not_hide_what_a_lower_one_trained(restarted: bool) -> None:
    """Nobody knew of both: the higher one says that it came after "a1", and all daemons write down the higher one."""
    world = cluster()
    trains(world, start(world, "a1", 0, 1, 2, 3))
    world.started.kill()
    world.store.up = False
    world.net.split({"n2", "n3"})
    world.clock.run(world.clock.now + 5.0)
    low, high = sorted(("x", "y"), key=lambda attempt: spread(attempt, 2))
    trained = start(world, low, 0, 1)
    trains(world, trained)
    stranded = start(world, high, 2, 3)
    dies_at_its_restore(world, stranded)
    world.net.heal()
    until(world, "all to know the higher number", lambda: known(world) == {high})
    trained.kill()
    for node in trained.nodes if restarted else ():  # they have it in writing
        world.hosts[node.node].stop()
        world.hosts[node.node].start()
    again = start(world, "a4", 0, 1, 2, 3)
    until(world, "the next start", lambda: again.training)
    restored = again.procs[0].restored
    assert restored is not None
    newest = max(s for s in world.oracle.certified_ever if world.oracle.records[s.epoch].nonce == low)
    assert restored == newest


def test_a_steward_of_one_node_lets_go_of_what_more_nodes_had_protected_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job had gone on there, and it was cut off when the next start began on all nodes (seed 5524)."""
    world = next(w for w in map(World, range(1, 100)) if not w.policy.durable and w.policy.redundancy == Replicas(1))
    world.start_without_faults()
    oracle = world.oracle
    assert world.clock.run(60.0, lambda: len(oracle.certified_ever) >= 2)
    older, newer = sorted(oracle.certified_ever)[:2]
    monkeypatch.setattr(world, "wanted_now", lambda: 1)
    oracle.certified_ever = {older: 1, newer: 0}
    assert not oracle._superseded(older, 1)
    one = oracle.records[newer.epoch].nodes[:1]
    oracle.records[newer.epoch - 1] = replace(oracle.records[newer.epoch], nodes=one)
    assert not oracle._superseded(older, 1), "what an earlier start could give says nothing"
    oracle.records[newer.epoch + 1] = replace(oracle.records[newer.epoch], nodes=one)
    assert oracle._superseded(older, 1)
