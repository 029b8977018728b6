"""The operator has a job forgotten while a node stands still, of which no link sees anything: it forgets as well (P15). Or while
all nodes of a start that trains are down, whose ranks come back to them: it goes on, and is served as before (P14)."""

from __future__ import annotations

from functools import partial

import pytest

from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.life import Tombstone
from tests.sim import forgetting
from tests.sim.broken import Broken
from tests.sim.world import World

SEED = 2  # a world of several nodes
START_S = 30.0  # simulated, until something is certified
OVER_S = 10.0  # until every node knows that the job is over
STILL_S = 14.0
FORGOTTEN_S = 10.0
WAITING_S = 30.0  # until a loop has waited for a level, and some more


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


def test_a_copy_makes_a_machine_where_the_job_was_forgotten() -> None:
    """As in the daemon: its steward, that still counts on it, is heard again (seed 338651138865)."""
    world = World(SEED)
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 2), "the job did not start"
    run = world.started
    world.launcher.ended = run.stopped = True
    for proc in run.procs:
        proc.die()
    host = world.hosts[run.nodes[-1].node]
    host.stop()
    host.lose_memory()
    host.start()
    assert world.clock.run(world.clock.now + OVER_S, lambda: bool(host.machine.uplink.session)), "its steward is silent"
    record = host.record
    assert record is not None
    forgetting.bury(host, ins.Bury(Tombstone(record.number)))
    assert world.clock.run(world.clock.now + WAITING_S, lambda: bool(host.memory)), "it was sent no copy"
    assert world.clock.run(world.clock.now + FORGOTTEN_S, lambda: host.record == record), "it is deaf, and holds a copy"


def trains_on_after_an_order_that_none_of_its_nodes_heard() -> World:
    world = World(SEED)
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 2), "the job did not start"
    world.oracle.forgets(max(world.oracle.done))
    assert not world.oracle.promises
    world.started._patient = True
    return world


def test_a_job_that_goes_on_where_an_order_was_not_heard_is_told_its_levels() -> None:
    """They were said, and the oracle was deaf to them: a loop that waited for one seemed to stand still (seed 9326709207)."""
    world = trains_on_after_an_order_that_none_of_its_nodes_heard()
    world.wait("snapshots keep completing", partial(world._keep_completing, world.oracle.certified()))
    world.clock.run(world.clock.now + WAITING_S)
    assert world.oracle.counts["a loop that waited for a level"]
    world._finish()
    newest = world._newest()
    assert newest in world.oracle.unpromised and newest not in world.oracle.promises
    world.oracle.unpromised[newest] = world.wanted_now() - 1
    assert not world.protected()


def test_a_job_that_goes_on_where_an_order_was_not_heard_and_is_told_no_level_still_stands_still() -> None:
    world = trains_on_after_an_order_that_none_of_its_nodes_heard()
    for host in world.hosts.values():
        host.machine.steward.certify.tell = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Broken, match="a loop stood still"):
        world.clock.run(world.clock.now + WAITING_S)
