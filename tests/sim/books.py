"""What is true when all has been quiet for a while: the steward's books name all that memory holds, and nothing is shown that is
not there (P2, P14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import audience, is_told

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World


def name_all(world: World) -> bool:
    """A slot that the steward does not know is released by nobody. A node that the newest epoch does not concern may never have
    heard of it, and goes on with an older one, whose books are its own."""
    there = [host for host in world.hosts.values() if host.alive]
    stewards = [host for host in there if host.machine.steward.active]
    newest = max((host.record for host in stewards if host.record is not None), key=lambda record: record.number, default=None)
    if newest is None or sum(host.name in audience(newest) for host in stewards) != 1:
        return not any(host.machine.slots.sealed for host in there)
    known = {host.record: host.machine.steward.table.states for host in stewards}
    looked_after = (host for host in there if host.record in known)
    return all(snapshot in known[host.record] for host in looked_after for snapshot in host.machine.slots.sealed)


def show_the_truth(world: World) -> bool:
    return all(_shows_the_truth(host) for host in world.hosts.values() if host.alive)


def _shows_the_truth(host: Host) -> bool:
    """A node that nobody tells anything shows nothing (seed 434309189156)."""
    if host.record is None or not is_told(host.record, host.name, holds=bool(host.machine.slots.sealed)):
        return True
    levels, ctx, oracle = host.machine.levels, host.machine.ctx, host.world.oracle
    shown = {s: said.level for s, said in levels.told.items() if s not in levels.released and ctx.is_candidate(s)}
    return all(
        level < 0 or level <= oracle.truth(s) or oracle.forgotten(s) or _unread(host.world, s, level) for s, level in shown.items()
    )


def _unread(world: World, snapshot: SnapshotId, level: int) -> bool:
    """Is it so but for bits that flipped in slots which nobody has read since? Nobody can know of them (seed 434309123995)."""
    flipped = [(host, mem) for host, mem in world.oracle.slots_of(snapshot) if not mem.intact]
    slots = [host.machine.slots.by_id.get(mem.id) for host, mem in flipped]
    unknown = any(slot is not None and not slot.damaged for slot in slots)
    return unknown and level <= world.oracle.truth(snapshot, graves=world.clock.now)
