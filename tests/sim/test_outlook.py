"""What the meter promises against what memory really holds: in the simulator, with all its faults (P2, P3)."""

from __future__ import annotations

import pytest

from ckptd.core.protocol.machine.situation import by_levels, situation
from ckptd.core.redundancy.outlook import DOMAIN, NODE, PROCESS, left
from tests.sim.host import Host
from tests.sim.world import World

SEEDS, MORE_SEEDS = (1, 7), (2, 4, 12, 14, 10)  # worlds of copies and of parity, of one and of several nodes per domain
LOOK_EVERY_S = 0.5
LIFE_S = 20.0
CALM_LOOKS = 6  # half a life apart: a world may be in the middle of a start when it becomes calm
UNNOTICED_S = 4.0  # a loss may be this new: nobody has seen it yet
NOTICED_S = 1.9  # by then Net has seen that a node is gone; less than steward_timeout_s


def looked_at(world: World, host: Host) -> int:
    """Every promise that this node makes now, against memory without the victim. How many there were."""
    now, count = situation(host.machine), 0
    victims = [(PROCESS, "", set[str]())]
    for other in world.hosts.values():
        victims += [(NODE, other.name, {other.name})]
        victims += [(DOMAIN, other.domain, {h.name for h in world.hosts.values() if h.domain == other.domain})]
    for failure, victim, lost in victims:
        found = left([point for point in now.points if not point.durable], failure, victim)
        if found is not None:
            count += 1
            there = {name for name, it in world.hosts.items() if it.alive} - lost
            newer = [snapshot for snapshot in world.oracle.origins if snapshot >= found.snapshot]  # its release may be on its way
            assert any(world.oracle.truth(s, among=there) >= 0 for s in newer), (host.name, failure, victim, found)
    return count


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in MORE_SEEDS)])
def test_no_node_promises_more_than_memory_holds(seed: int) -> None:
    """While nothing has just happened that cannot be known yet."""
    world = World(seed)
    faults = world.faults
    faults._kinds = [kind for kind in faults._kinds if kind != faults._damage]  # a flipped bit is known when it is read
    world.start()
    faults.start()
    count = 0
    for look in range(int(LIFE_S / LOOK_EVERY_S)):
        world.clock.run(look * LOOK_EVERY_S)
        if not world.trouble_since(UNNOTICED_S):
            count += sum(looked_at(world, host) for host in world.hosts.values() if host.alive and not host.paused)
    world.quiet()
    for _ in range(CALM_LOOKS):
        world.clock.run(world.clock.now + LIFE_S / 2)
        count += sum(looked_at(world, host) for host in world.hosts.values() if host.alive and not host.paused)
    assert count > 0


def trained(seed: int) -> World:
    """A job without faults that has certified something."""
    world = World(seed)
    world.start_without_faults()
    assert world.clock.run(LIFE_S, lambda: len(world.oracle.certified_ever) >= 3)
    return world


def the_steward(world: World) -> Host:
    return next(host for host in world.hosts.values() if host.alive and host.machine.steward.active)


def lose(world: World, host: Host) -> None:
    """The whole node; nobody starts the job again."""
    world.launcher.ended = True
    world.launcher.ranks_die(host)
    host.stop()
    host.lose_memory()


def test_the_stewards_node_says_all_that_is_so() -> None:
    """In calm, with nothing under way, each node's promise is exactly the newest snapshot that memory without it holds."""
    world = trained(2)
    world.started.stopped = True
    world.clock.run(world.clock.now + 10.0)
    now = situation(the_steward(world).machine)
    for name in world.hosts:
        there = set(world.hosts) - {name}
        held = [s for s in world.oracle.origins if world.oracle.truth(s, among=there) >= 0]
        found = left([point for point in now.points if point.level >= 0], NODE, name)
        assert (found.snapshot if found else None) == max(held, default=None)


def test_the_stewards_node_knows_more_than_levels_say() -> None:
    """While copies are on their way, some nodes could be lost already."""
    world, more = trained(2), 0
    for _ in range(400):
        world.clock.run(world.clock.now + 0.02)
        steward = the_steward(world)
        looked_at(world, steward)
        for name in world.hosts:
            exact, by_level = (left(p, NODE, name) for p in (situation(steward.machine).points, by_levels(steward.machine)))
            assert exact is not None and by_level is not None and exact.snapshot >= by_level.snapshot
            more += exact.snapshot > by_level.snapshot
    assert more > 0


@pytest.mark.parametrize("seed", [2, 5, 8, 13])
def test_what_a_lost_node_held_is_not_counted(seed: int) -> None:
    """From the moment on at which its link is seen to be down."""
    world = trained(seed)
    steward = the_steward(world)
    lost = next(host for host in world.hosts.values() if host is not steward and host.memory)
    lose(world, lost)
    assert world.clock.run(world.clock.now + NOTICED_S, lambda: lost.name in steward.machine.ctx.down)
    for _ in range(50):
        looked_at(world, steward)
        world.clock.run(world.clock.now + 0.02)


def test_without_a_steward_what_is_down_counts_as_lost() -> None:
    """Nobody certifies anything before the successor speaks: until then levels of before the loss would be believed."""
    world = trained(2)
    steward = the_steward(world)
    others = [host for host in world.hosts.values() if host is not steward]
    before = {host.name: by_levels(host.machine) for host in others}
    assert all(left(points, NODE, "") is not None for points in before.values())
    lose(world, steward)
    assert world.clock.run(
        world.clock.now + NOTICED_S, lambda: all(steward.name in host.machine.ctx.down for host in others)
    )
    for host in others:
        assert host.machine.uplink.steward == steward.name and not host.machine.steward.active
        assert looked_at(world, host) >= 1, "what is left can still be come back to"
        assert left(by_levels(host.machine), NODE, "") is None, "a second loss was not protected against"
    for _ in range(250):  # the successor begins with empty books: what it has not been told has not fallen
        world.clock.run(world.clock.now + 0.02)
        for host in others:
            looked_at(world, host)
        assert all(left(situation(host.machine).points, PROCESS, "") is not None for host in others)
    assert the_steward(world).machine.steward.sessions.settled()
