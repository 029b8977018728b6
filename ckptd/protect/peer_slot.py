"""A slot for what belongs to a peer's rank: the same for replicas, frozen parts and parity."""

from __future__ import annotations

from ckptd.arena.arena import Arena, Slot, Tenant

DAMAGE = "damage"  # the reason, between daemons too: it does not match the sums of its seal
PACED_STREAMS = 1  # of a push that has a rate to keep


def allocate(arena: Arena, job: str, rank: int, nbytes: int, record_bytes: int) -> Slot:
    """In a thread: memory is touched for the first time. ``record_bytes``: core.state_map.record_size. Raises NoMemory."""
    uid = int(job.split("/", 1)[0])
    return arena.allocate(Tenant(job, uid, "peer", rank), nbytes, record_bytes)
