"""A machine that breaks, as after an assertion of ours, and is made anew in the same process (daemon/supervisor.py).

Its session, its numbers and its incarnation are those of the first one's; what happens until it is there nobody hears.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.protocol import events as ev
from ckptd.core.protocol.instructions import Instruction

if TYPE_CHECKING:
    from tests.sim.host import Host

PAUSE_S = 0.5


def break_down(host: Host) -> None:
    _hang_up(host)
    host.world.broken[host.name] = partial(_nobody, host, host.life, host.world.clock.now + PAUSE_S)


def _nobody(host: Host, life: int, due: float, event: ev.Event, now: float) -> list[Instruction]:
    if isinstance(event, ev.Tick) and host.world.clock.now >= due and life == host.life:
        _hang_up(host)
        _begin(host)
    return []


def _hang_up(host: Host) -> None:
    """On all ranks, also on those that have come since."""
    host.forget_queued()
    host.fetching.drop()
    for proc in (*host.procs.values(), *host.arriving):
        proc.disconnected()
    host.procs.clear()
    host.arriving.clear()
    host.standing.clear()


def _begin(host: Host) -> None:
    """With what the process knows, and what its links have told."""
    world, (state, since) = host.world, host.over
    host.machine = world.make_machine(host)
    host.feed(ev.Restarted(host.record, host.ran, state, world.clock.now - since if state else 0.0, host.tombstone, host.sealed))
    for node in world.net.told_gone(host.name):
        host.feed(ev.NodeDown(node))
    for mem in list(host.memory.values()):
        host.adopt(mem)
