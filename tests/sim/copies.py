"""Replicas between simulated daemons: an offer, the bytes in two halves, sums that are checked on arrival (P1, P10)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.messages import HoldingFact
from ckptd.core.state_map.layout import Layout
from tests.sim.state import Mem, prefix

if TYPE_CHECKING:
    from tests.sim.host import Host

CONNECT_S = 1.0  # until a connection that cannot be made is given up


class Copies:
    def __init__(self, host: Host) -> None:
        self.host = host

    def send(self, do: ins.Replicate) -> None:
        world = self.host.world
        held = world.net.links.wait(self.host.name, do.to, world.clock.now)
        world.clock.after(held + world.net.latency(), self._offer, self.host.life, do)

    def _offer(self, life: int, do: ins.Replicate) -> None:
        host, net = self.host, self.host.world.net
        peer = host.world.hosts[do.to]
        mem = host.memory.get(do.slot)
        reason = ""
        if life != host.life:
            return
        if not host.reaches(do.to):
            reason = "unreachable"
        elif mem is None or mem.snapshot != do.snapshot:
            reason = "slot is gone"
        else:
            reason = peer.machine.admits_replica(do.snapshot, do.rank) or (
                "no memory" if peer.squeezed or "copies" in peer.no_room_for else ""
            )
        if reason:
            host.world.oracle.count("offer refused: " + reason)
            delay = CONNECT_S if reason == "unreachable" else 2 * net.latency()
            host.later(delay, _sent(do, reason))
            return
        assert mem is not None and mem.payload is not None and mem.layout is not None and mem.fact is not None
        sums = prefix(mem.layout, do.tier, mem.sums)
        first_half = mem.payload[: len(sums) // 2]
        seconds = net.bulk(host.name, do.to, len(sums))
        host.world.clock.after(seconds, self._transferred, (life, peer.life), do, mem, sums, first_half)

    def _transferred(
        self, lives: tuple[int, int], do: ins.Replicate, mem: Mem, sums: bytes, first: bytes
    ) -> None:
        """Half of the bytes were read at the beginning, half now: a slot that was reused meanwhile gives a mixture."""
        host = self.host
        peer = host.world.hosts[do.to]
        if peer.life != lives[1] or not host.world.net.reaches(host.name, do.to) or host.life != lives[0]:
            host.world.clock.after(CONNECT_S, host.feed_if, lives[0], _sent(do, "the connection broke"))
            return
        mixed = first + (mem.payload or b"")[len(first) : len(sums)]
        if mixed != sums and not host.world.mutant("no verify"):
            if mem.snapshot == do.snapshot and not mem.intact:
                host.feed(ev.SlotDamaged(mem.id, "found while sending"))
            host.later(0.0, _sent(do, "damage"))
            return
        if mem.layout is None or mem.fact is None:
            return
        peer.copies.take(replace(mem.fact, tier=do.tier), mem.layout, mixed, sums)
        host.later(host.world.net.latency(), _sent(do, ""))

    def take(self, fact: HoldingFact, layout: Layout, payload: bytes, sums: bytes) -> None:
        host = self.host
        mem = host.new_mem(fact.rank, own=False)
        mem.state, mem.payload, mem.sums, mem.fact, mem.layout = "sealed", payload, sums, fact, layout
        host.world.oracle.held(host, mem)
        host.feed(ev.ReplicaArrived(fact.snapshot, fact.rank, fact.tier, mem.id, layout, fact.digests, fact.keep))


def _sent(do: ins.Replicate, reason: str) -> ev.ReplicaSent:
    return ev.ReplicaSent(do.snapshot, do.rank, do.tier, do.to, not reason, reason)
