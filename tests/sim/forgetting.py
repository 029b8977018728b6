"""A node that forgets a job of which nothing is left there, and lets go of what a job that is over could spare (D19)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core.life import revives

if TYPE_CHECKING:
    from tests.sim.host import Host


def bury(host: Host, do: ins.Bury) -> None:
    """Nothing of the job is left but slots with nothing in them. Until somebody has a reason there is no machine for it."""
    host.world.oracle.count("a job forgotten on a node")
    assert not any(mem.state == "sealed" for mem in host.memory.values()), "nothing is left"
    host.memory.clear()
    host.record = host.ran = None
    host.sealed, host.over, host.tombstone, host.buried = 0, ("", 0.0), do.tombstone, True
    host.write_epoch(host.life)
    host.forget_queued()
    host.machine = host.world.make_machine(host)
    host.world.net.forget_views(host.name)
    host.world.net.changed()
    host.feed(ev.Restarted(None, tombstone=do.tombstone))


def wakes(host: Host, event: ev.Event) -> bool:
    """As the shell does it: a word about the past makes no machine for a forgotten job."""
    if host.buried and isinstance(event, ev.Received):
        host.buried = not revives(event.message, host.tombstone)
        return not host.buried
    host.buried = host.buried and not isinstance(event, ev.RankJoined)
    return True


def spare(host: Host) -> None:
    """In worlds that forget, memory is always short while there are faults: what storage has, asked just now, goes."""
    world = host.world
    if world.calm or world.policy.job_linger_s >= world.policy.write_timeout_s:
        return
    asking = [order for order in host.machine.lifetime.orders() if order.asks_storage]
    if asking and not world.store.refuses(writes=False):
        world.oracle.may_go(world.store.commits)
        for order in asking:
            host.feed(ev.SpareAsked(order, tuple(sorted(world.store.commits))))
