"""Degradation in a whole cluster: down to parity, down to local only, up again; what is certified is true everywhere (P2, P8)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from ckptd.core.redundancy.degradation import DOWN_S, UP_S
from ckptd.core.redundancy.policies import Replicas
from tests.sim.world import World

NODES = 4
START_S, TURN_S = 30.0, 40.0  # simulated


def trained() -> World:
    """Four nodes, each its own domain, one copy wanted; trains and is protected."""
    for seed in count():
        world = World(seed)
        apart = len({host.domain for host in world.hosts.values()}) == NODES
        if len(world.hosts) == NODES and apart and len(world.everyone) == 1 and not world.policy.flush_every_s:
            break
    world.policy = replace(world.policy, replicas=1, redundancy=Replicas(1), own_slots=3)
    world.slot_s = 0.0  # memory of its own is there from the beginning
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: protected_since(world, 0.0)), "the job did not start"
    return world


def protected_since(world: World, step: float) -> bool:
    return any(s.step > step and promise.level >= 1 for s, promise in world.oracle.promises.items())


def newest(world: World) -> int:
    return max(snapshot.step for snapshot in world.oracle.certified_ever)


def in_force(world: World) -> set[str]:
    return {world.hosts[node.node].machine.view()["redundancy"] for node in world.started.nodes}


def no_room(world: World, *what: str) -> None:
    for host in world.hosts.values():
        host.no_room_for = frozenset(what)


@pytest.mark.chaos
def test_down_to_parity_to_local_only_and_up_again() -> None:
    world = trained()
    assert in_force(world) == {"replicas=1"}

    no_room(world, "copies")
    assert world.clock.run(world.clock.now + TURN_S, lambda: in_force(world) == {"xor(4)"}), in_force(world)
    before = newest(world)
    assert world.clock.run(world.clock.now + TURN_S, lambda: protected_since(world, before)), "parity protects"

    no_room(world, "copies", "parity")
    assert world.clock.run(world.clock.now + TURN_S, lambda: in_force(world) == {"replicas=0"}), in_force(world)
    before = newest(world)
    assert world.clock.run(world.clock.now + TURN_S, lambda: newest(world) > before + 1), "snapshots go on"
    assert not protected_since(world, before), "and are not called protected"

    no_room(world)
    assert world.clock.run(world.clock.now + 2 * UP_S + TURN_S, lambda: in_force(world) == {"replicas=1"})
    before = newest(world)
    assert world.clock.run(world.clock.now + TURN_S, lambda: protected_since(world, before))
    assert world.oracle.counts["alarm degradation"] == 4
    world.oracle.check_all()


def test_a_short_shortage_changes_nothing() -> None:
    world = trained()
    no_room(world, "copies", "parity")
    world.clock.run(world.clock.now + DOWN_S / 2)
    no_room(world)
    world.clock.run(world.clock.now + TURN_S)
    assert in_force(world) == {"replicas=1"}
    assert world.oracle.counts["alarm degradation"] == 0
