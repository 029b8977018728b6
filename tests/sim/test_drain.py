"""A node that is to go hands away what only it holds; then it goes, with its memory (P2, P3; issue: drain)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from tests.sim.host import Host
from tests.sim.moments import DAEMON, NODE
from tests.sim.world import World

START_S, DRAIN_S, SOON_S = 30.0, 30.0, 5.0  # simulated
QUIET_S = 6.0  # until everything is told, heard and released


def trained(seed: int, redundancy: Redundancy, *, own_slots: int = 3) -> World:
    """A job without faults that has certified something at the wanted level."""
    world = World(seed)
    world.policy = replace(world.policy, replicas=redundancy.tolerates, redundancy=redundancy, own_slots=own_slots)
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: best(world) >= redundancy.tolerates), "the job did not start"
    return world


def best(world: World) -> int:
    return max((promise.level for promise in world.oracle.promises.values()), default=-1)


def stop_training(world: World) -> None:
    world.launcher.ended = True
    world.started.stopped = True
    world.clock.run(world.clock.now + QUIET_S)


def without(world: World, *gone: Host) -> int:
    """What the newest promised snapshot survives beyond the loss of these, from the true content of memory."""
    newest = max(snapshot for snapshot, promise in world.oracle.promises.items() if promise.level >= 0)
    return world.oracle.truth(newest, among={name for name, host in world.hosts.items() if host not in gone})


def drained(host: Host) -> bool:
    said = host.machine.view()["drain"]
    return bool(said["known"]) and said["slots"] == 0


def drain(world: World, *hosts: Host) -> None:
    for host in hosts:
        host.feed(ev.DrainAsked(True))
    assert world.clock.run(world.clock.now + DRAIN_S, lambda: all(map(drained, hosts))), [
        host.machine.view()["drain"] for host in hosts
    ]


def of_size(size: int) -> int:
    """A seed whose world has so many nodes, each its own domain."""
    return next(seed for seed in range(1, 200) if seed % 50 and _sizes(seed) == (size, size))


def _sizes(seed: int) -> tuple[int, int]:
    hosts = World(seed).hosts.values()
    return len(hosts), len({host.domain for host in hosts})


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("size", "redundancy"),
    [(3, Replicas(1)), (4, Replicas(1)), (5, Replicas(2)), (4, Parity(2, 1)), (6, Parity(2, 2))],
    ids=lambda value: value.text if isinstance(value, Replicas | Parity) else str(value),
)
def test_the_level_holds_without_the_node_that_was_drained(size: int, redundancy: Redundancy, index: int) -> None:
    """P2, P3: no repair is needed after it went. Index 0 is the steward's node."""
    world = trained(of_size(size), redundancy)
    stop_training(world)
    host = world.hosts[world.started.nodes[index].node]
    assert without(world, host) < redundancy.tolerates, "it was needed"
    drain(world, host)
    assert without(world, host) >= redundancy.tolerates
    world.faults.kill(host, NODE)
    assert best(world) >= redundancy.tolerates
    world.oracle.check_all()


@pytest.mark.parametrize("redundancy", [Replicas(1), Parity(2, 1)], ids=lambda value: value.text)
def test_two_at_once(redundancy: Redundancy) -> None:
    world = trained(of_size(6), redundancy)
    stop_training(world)
    pair = [world.hosts[node.node] for node in world.started.nodes[1:3]]
    drain(world, *pair)
    assert without(world, *pair) >= redundancy.tolerates


@pytest.mark.parametrize("redundancy", [Replicas(1), Parity(2, 1)], ids=lambda value: value.text)
def test_training_goes_on_and_nothing_new_is_placed_on_it(redundancy: Redundancy) -> None:
    world = trained(of_size(4), redundancy)
    host = world.hosts[world.started.nodes[1].node]
    drain(world, host)
    begun = max(world.oracle.certified_ever)
    later = world.clock.now + SOON_S
    assert world.clock.run(
        later + DRAIN_S, lambda: world.clock.now > later and len([s for s in world.oracle.certified_ever if s > begun]) > 3
    )
    begun = sorted(world.oracle.certified_ever)[-2]
    fresh = [m for m in host.memory.values() if not m.own and m.snapshot is not None and m.snapshot > begun]
    assert not fresh
    world.oracle.check_all()


def test_where_nobody_can_take_it_it_says_so() -> None:
    """Two domains: what is left is one, and the level falls whatever is done."""
    world = trained(of_size(2), Replicas(1))
    stop_training(world)
    host = world.hosts[world.started.nodes[1].node]
    host.feed(ev.DrainAsked(True))
    stuck = lambda: host.machine.view()["drain"]["stuck"] > 0  # noqa: E731
    assert world.clock.run(world.clock.now + DRAIN_S, stuck)
    said = host.machine.view()["drain"]
    assert said["stuck"] == said["slots"] and "no failure domain" in said["reasons"][0]
    assert [(fall["level"], fall["without"]) for fall in said["falls"]] == [(1, 0)]


def test_snapshots_go_on_where_nobody_else_can_take_them() -> None:
    """P14: with two nodes and few slots the leaving one is still used, as long as it is there."""
    world = trained(of_size(2), Replicas(1), own_slots=2)
    world.hosts[world.started.nodes[1].node].feed(ev.DrainAsked(True))
    world.clock.run(world.clock.now + SOON_S)
    before = set(world.oracle.certified_ever)
    assert world.clock.run(world.clock.now + DRAIN_S, lambda: len(set(world.oracle.certified_ever) - before) >= 3)


def test_cancelled_and_restarted_it_stays() -> None:
    world = trained(of_size(4), Replicas(1))
    host, other = (world.hosts[node.node] for node in world.started.nodes[1:3])
    leaving = lambda: other.machine.ctx.leaving  # noqa: E731
    host.feed(ev.DrainAsked(True))
    assert world.clock.run(world.clock.now + SOON_S, lambda: leaving() == {host.name})
    host.feed(ev.DrainAsked(False))
    assert world.clock.run(world.clock.now + SOON_S, lambda: not leaving())
    host.feed(ev.DrainAsked(True))
    assert world.clock.run(world.clock.now + SOON_S, lambda: leaving() == {host.name})
    world.faults.kill(host, DAEMON)
    assert world.clock.run(world.clock.now + DRAIN_S, lambda: host.alive and not leaving())
    assert not host.machine.view()["drain"]["leaving"]
