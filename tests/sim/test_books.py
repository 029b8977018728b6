"""What the simulator asks of the books when all is quiet (books.py) is what can be owed (P14)."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.protocol.messages import RestoreAsk
from tests.sim import books
from tests.sim.host import Host
from tests.sim.test_oracle import flip_all
from tests.sim.trainer import Run
from tests.sim.world import World

SEED = 2  # a world of several nodes
START_S = 30.0  # simulated, until something is certified
QUIET_S = 5.0


def trains(world: World, host: Host, attempt: str) -> None:
    """A start on this node alone, until something of it is certified."""
    known = len(world.oracle.certified_ever)
    run = world.launcher.run = Run(world, attempt, [host], RestoreAsk(allow_fresh=True))
    run.start()
    assert world.clock.run(world.clock.now + START_S, lambda: len(world.oracle.certified_ever) > known), "it did not start"
    run.kill()


def test_a_node_that_no_later_start_has_asked_keeps_books_of_its_own() -> None:
    """While storage was away the job began anew on another node: the first one never hears of that epoch, nor need it."""
    world = World(SEED)
    world.quiet()
    first, second = list(world.hosts.values())[:2]
    for host in world.hosts.values():
        host.start()
    trains(world, first, "a1")
    world.store.up = False
    trains(world, second, "a2")
    world.store.up = True
    world.clock.run(world.clock.now + QUIET_S)
    assert [host.machine.steward.active and bool(host.machine.slots.sealed) for host in (first, second)] == [True, True]
    assert books.name_all(world)
    second.machine.steward.table.states.clear()
    assert not books.name_all(world)


def test_a_bit_that_flipped_where_nobody_has_read_since_is_not_known() -> None:
    """The job ended right then, and its last snapshot had no copy (seed 434309123995)."""
    world = next(w for w in map(World, range(1, 300)) if w.policy.durable and not w.policy.tolerates and len(w.everyone) == 1)
    world.start_without_faults()
    world.store.up = False
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 3)
    world.started.stopped = True
    world.clock.run(world.clock.now + QUIET_S)
    flip_all(world)
    newest = max(world.oracle.certified_ever)
    assert world.oracle.truth(newest) == -1
    assert books.show_the_truth(world)
    for host in world.hosts.values():
        for slot in host.machine.slots.by_id.values():
            slot.damaged = True
    assert not books.show_the_truth(world), "who has read it says so"


def test_a_node_without_ranks_and_memory_of_the_job_shows_nothing_of_it() -> None:
    """It was asked for what it held, its daemon had begun anew, and the next epoch opened without it: what it was told last stayed
    (seed 434309189156). One that holds something hears of the next epoch, and one with ranks is told."""
    world = World(SEED)
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 3)
    host = next(host for host in world.hosts.values() if host.record is not None and host.name in host.record.ranks)
    told = host.machine.levels.told
    newest = max(told)
    told[newest] = replace(told[newest], level=99)
    assert host.record is not None and host.machine.slots.sealed
    assert not books.show_the_truth(world)
    host.record = replace(host.record, ranks=("elsewhere",) * host.record.world)
    assert not books.show_the_truth(world), "it holds something"
    host.machine.slots.sealed.clear()
    assert books.show_the_truth(world)
