"""A job that is over, and that nobody starts again: its nodes go and come back, and what is left stays safe and is said as it is.

The end of a life in the other worlds is a new start, which looks at everything. Here nobody looks: whatever one node has forgotten
by itself, the others have to keep (P2, P3, P14).
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim import books
from tests.sim.moments import DAEMON, KEEPER, NODE, REBOOT

if TYPE_CHECKING:
    from tests.sim.world import World

LOSSES = 2  # one after the other, each when all is well
OVER_S = 5.0  # longer than a node keeps what it knows of a job of which it has nothing (shape.FORGETS_S)


def aftermath(world: World) -> None:
    """After everything has become protected. Raises Broken."""
    rng = Random(f"aftermath {world.seed}")
    for proc in world.started.procs:
        proc.die()
    for _ in range(LOSSES):
        world.clock.run(world.clock.now + OVER_S)
        hosts = [host for host in world.hosts.values() if host.alive]
        stewards = [host for host in hosts if host.machine.steward.active]
        victim = rng.choice(stewards if stewards and rng.random() < 0.5 else hosts)
        world.faults.kill(victim, rng.choice([REBOOT, REBOOT, NODE, KEEPER, DAEMON]))
        world.clock.run(world.clock.now + OVER_S)
        world.wait("what is shown of a job that is over comes to be true", partial(books.show_the_truth, world))
        world.wait("a job that is over becomes protected again", world.protected)
        world.oracle.count("a loss after the end")
