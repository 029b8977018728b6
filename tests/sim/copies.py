"""Replicas between simulated daemons: an offer, the bytes in two halves, sums that are checked on arrival (P1, P10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core.ids import SnapshotId
from ckptd.core.messages import HoldingFact
from tests.sim.state import DAMAGE, Mem, digests_of

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
        assert mem is not None and mem.content is not None and mem.layout is not None and mem.fact is not None
        first_half = list(mem.content)
        seconds = net.bulk(host.name, do.to)
        host.world.clock.after(seconds, self._transferred, (life, peer.life), do, mem, mem.sums, first_half)

    def _transferred(
        self, lives: tuple[int, int], do: ins.Replicate, mem: Mem, sums: Any, first: Any
    ) -> None:
        """Half of the bytes were read at the beginning, half now: a slot that was reused meanwhile gives a mixture."""
        host = self.host
        peer = host.world.hosts[do.to]
        if peer.life != lives[1] or not host.world.net.reaches(host.name, do.to) or host.life != lives[0]:
            host.world.clock.after(CONNECT_S, host.feed_if, lives[0], _sent(do, "the connection broke"))
            return
        now = mem.content or [DAMAGE] * len(first)
        mixed = [
            a if i % 2 else b for i, (a, b) in enumerate(zip(first, [*now, *first[len(now) :]], strict=False))
        ]
        if tuple(mixed) != sums and not host.world.mutant("no verify"):
            if mem.snapshot == do.snapshot and not mem.intact:
                host.feed(ev.SlotDamaged(mem.id, "found while sending"))
            host.later(0.0, _sent(do, "damage"))
            return
        if mem.layout is None:
            return
        peer.copies.take(do.snapshot, do.rank, do.tier, mem, mixed, sums)
        host.later(host.world.net.latency(), _sent(do, ""))

    def take(self, snapshot: SnapshotId, rank: int, tier: int, source: Mem, content: Any, sums: Any) -> None:
        assert source.layout is not None
        host, layout = self.host, source.layout
        digests = digests_of(layout, sums)
        keep = source.fact.keep if source.fact is not None else False
        fact = HoldingFact(snapshot, rank, tier, layout.layout_id, digests, keep)
        mem = host.new_mem(rank, own=False)
        mem.state, mem.content, mem.sums, mem.fact, mem.layout = (
            "sealed",
            list(content),
            tuple(sums),
            fact,
            layout,
        )
        host.world.oracle.held(mem)
        host.feed(ev.ReplicaArrived(snapshot, rank, tier, mem.id, layout, digests, keep))


def _sent(do: ins.Replicate, reason: str) -> ev.ReplicaSent:
    return ev.ReplicaSent(do.snapshot, do.rank, do.tier, do.to, not reason, reason)
