"""A node that forgets a job, by itself or by the operator's order, and lets go of what a job that is over could spare (D19)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import revives

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World


def order(world: World) -> bool:
    """`ckptd forget`: all are asked before any of them forgets; who is down or stopped does not answer. False: it is not over."""
    there = [host for host in world.hosts.values() if host.alive and not host.paused]
    epoch = max((host.record.number for host in there if host.record is not None), default=0)
    if not epoch or any(host.machine.lifetime.refusal()[0] for host in there):
        return False
    world.oracle.forgets(epoch)
    for host in there:
        host.feed(ev.ForgetOrdered(epoch))
    return True


def bury(host: Host, do: ins.Bury) -> None:
    """Nothing of the job is left but slots with nothing in them, or that was the order. Until somebody has a reason there is no
    machine for it."""
    sealed = [mem for mem in host.memory.values() if mem.state == "sealed"]
    host.world.oracle.count("a job forgotten on a node")
    assert not sealed or do.tombstone.ordered == do.tombstone.epoch, "nothing is left"
    host.memory.clear()
    for mem in sealed:
        host.world.oracle.gives_up(host, mem, replace(mem))
    host.record = host.ran = None
    host.sealed, host.over, host.tombstone, host.buried = 0, ("", 0.0), do.tombstone, True
    host.write_epoch(host.life)
    host.forget_queued()
    host.machine = host.world.make_machine(host)
    host.world.net.forget_views(host.name)
    host.world.net.changed()
    host.feed(ev.Restarted(None, tombstone=do.tombstone))
    host.read_again()


def wakes(host: Host, event: ev.Event) -> bool:
    """As the shell does it: a word about the past makes no machine for a forgotten job, but a rank does, or memory of it. Who still
    knows it is told of an order."""
    if host.buried and isinstance(event, ev.Received):
        host.buried = not revives(event.message, host.tombstone)
        stone, told = host.tombstone, isinstance(event.message, msg.Inventory) and event.message.forgotten
        if host.buried and stone.ordered and not told:
            host.world.net.send(host.name, event.sender, msg.Inventory("", None, (), buried=stone.epoch, forgotten=stone.ordered))
        return not host.buried
    host.buried = host.buried and not isinstance(event, ev.RankJoined | ev.ReplicaArrived | ev.HoldingFound)
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
