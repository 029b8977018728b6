"""The operator has a job forgotten while a node stands still, of which no link sees anything: it forgets as well (P15)."""

from __future__ import annotations

import pytest

from tests.sim import forgetting
from tests.sim.world import World

SEED = 2  # a world of several nodes
START_S = 30.0  # simulated, until something is certified
OVER_S = 10.0  # until every node knows that the job is over
STILL_S = 14.0
FORGOTTEN_S = 10.0


@pytest.mark.parametrize("index", [0, 1])
def test_a_node_that_stood_still_meanwhile_hears_of_it(index: int) -> None:
    """It saw no link go, had nothing to say, and held its memory, at level 1, for as long as it lived."""
    world = World(SEED)
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 2), "the job did not start"
    run, hosts = world.started, world.hosts.values()
    world.launcher.ended = run.stopped = True
    run.say_goodbye()
    until = world.clock.now + OVER_S
    assert world.clock.run(until, lambda: all(host.machine.lifetime.life.over for host in hosts)), "the job is not over"
    still = world.hosts[run.nodes[index].node]
    still.pause(True, unseen=True)
    assert forgetting.order(world)
    world.clock.run(world.clock.now + STILL_S)
    assert [host.name for host in hosts if not host.buried] == [still.name]
    still.pause(False)
    assert world.clock.run(world.clock.now + FORGOTTEN_S, lambda: still.buried), "it was never told"
    assert not still.memory
