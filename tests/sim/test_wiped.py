"""A daemon comes back without memory and without state directory: it learns from the others what runs (P2, P14)."""

from __future__ import annotations

import pytest

from tests.sim.world import World

SEED = 2  # a world of several nodes
START_S, BACK_S = 30.0, 7.0  # simulated
QUIET_S = 5.0  # until everything is told and heard
NOTICED_S = 1.2  # more than Net takes to see that a node is gone, less than steward_timeout_s


def trained() -> World:
    """A job without faults that has certified something."""
    world = World(SEED)
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 2), "the job did not start"
    return world


def wipe(world: World, index: int, *, ranks_die: bool) -> None:
    """The daemon of member ``index``. Its link is seen to go and to come; nobody has taken its place by then."""
    host = world.hosts[world.started.nodes[index].node]
    if ranks_die:
        world.launcher.ranks_die(host)
    host.stop()
    host.lose_memory()
    host.state.replaced()
    world.clock.run(world.clock.now + NOTICED_S)
    host.start()


@pytest.mark.parametrize("index", [0, 1])
def test_its_ranks_train_on_and_snapshots_go_on(index: int) -> None:
    world = trained()
    before = set(world.oracle.certified_ever)
    wipe(world, index, ranks_die=False)
    assert world.clock.run(
        world.clock.now + BACK_S, lambda: len(set(world.oracle.certified_ever) - before) >= 2
    )
    assert {host.record.number for host in world.hosts.values() if host.record} == {1}
    assert world.launcher.starts == 1
    world.oracle.check_all()


@pytest.mark.parametrize("index", [0, 1])
def test_its_ranks_died_and_it_knows_the_job_all_the_same(index: int) -> None:
    """Nobody has anything to tell: the ranks of the others wait for the lost ones."""
    world = trained()
    world.launcher.ended = True  # nobody starts the job again
    run = world.started
    run.stopped = True
    world.clock.run(world.clock.now + QUIET_S)
    wipe(world, index, ranks_die=True)
    host = world.hosts[run.nodes[index].node]
    assert world.clock.run(world.clock.now + BACK_S, lambda: host.machine.view()["phase"] == "running")
    assert host.machine.view()["steward"] == run.nodes[0].node
