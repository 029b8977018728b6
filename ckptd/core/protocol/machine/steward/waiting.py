"""Why the steward grants no snapshot at the moment: one cause, a colon, and who or what it is (P15).

The cause goes into metrics, so there are few of them. Nodes hear it with the steward's acknowledgements (messages.Ack), ranks
with the daemon's news; nobody asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.protocol.events import NO_MEMORY
from ckptd.core.protocol.machine.steward.grants import FULL_S
from ckptd.core.protocol.machine.waiting import BUSY, FOR_A_PEER, FOR_A_RANK, FOR_STORAGE, shown

if TYPE_CHECKING:
    from ckptd.core.protocol.machine.steward.grants import Granted
    from ckptd.core.protocol.machine.steward.steward import Steward



def waits(steward: Steward) -> str:
    """"": every rank has a grant that it can take."""
    return _absent(steward) or _void(steward) or _no_room(steward) or _refused(steward)


def _absent(steward: Steward) -> str:
    record, grants = steward.record, steward.grants
    away = [node.node for node in record.nodes if not steward.sessions.live(node.node)]
    if away:
        return f"{FOR_A_PEER}: no answer from {shown(away)}"
    left = [rank for rank, state in sorted(grants.ranks.items()) if state.left]
    if left:
        return f"{FOR_A_RANK}: {_ranks(steward, left)} ended"
    unheard = sorted(set(range(record.world)) - grants.ranks.keys())
    return f"{FOR_A_RANK}: {_ranks(steward, unheard)} not heard of yet" if unheard else ""


def _void(steward: Steward) -> str:
    for grant in steward.grants.open.values():
        if grant.void:
            return f"{FOR_A_RANK}: {_ranks(steward, _lacking(steward, grant))} gives back what is void ({grant.void})"
    return ""


def _refused(steward: Steward) -> str:
    refused = steward.grants.refused
    return f"{FOR_A_RANK}: {_ranks(steward, [refused.rank])} could not take a grant ({refused.reason})" if refused else ""


def _lacking(steward: Steward, grant: Granted) -> list[int]:
    """Ranks that neither delivered nor gave it up."""
    return sorted(set(range(steward.record.world)) - grant.sealed - grant.missed)


def _no_room(steward: Steward) -> str:
    grants = steward.grants
    if any(not grant.sealed for grant in grants.open.values()):
        return ""  # ahead of every rank
    room = grants.rooms()
    rank = min(room, key=lambda rank: (room[rank], rank))
    if room[rank] > 0:
        return ""
    short = grants.ranks[rank].short
    if short:
        return f"{NO_MEMORY}: {_ranks(steward, [rank])}: {short}"
    return _held_up(steward, rank)


def _held_up(steward: Steward, rank: int) -> str:
    """What keeps the slots of this rank."""
    for grant in steward.grants.open.values():
        lacking = _lacking(steward, grant)
        if lacking and grant.step is not None:
            return f"{FOR_A_RANK}: {_ranks(steward, lacking)} has not delivered step {grant.step}"
    flush = steward.flushing.flush
    node = steward.record.ranks[rank]
    held = sorted(s for s, facts in steward.table.states.items() if node in facts.holders.get(rank, ()))
    steps = shown(snapshot.step for snapshot in held)
    if flush is not None and flush.snapshot in held:
        trouble = f"; the last try failed: {steward.flushing.trouble}" if steward.flushing.trouble else ""
        return f"{FOR_STORAGE}: step {flush.snapshot.step} is being written{trouble}"
    away = sorted(node for node in steward.sessions.by_node if not steward.sessions.live(node))
    parts = [s for s in held if s.epoch < steward.record.number and steward.table.states[s].level < 0]
    if away and parts:
        rest = f"the rest of step {shown(s.step for s in parts)}, which an earlier start left behind, may be on {shown(away)}"
        return f"{FOR_A_PEER}: {rest}; the oldest goes when that has kept every slot for {FULL_S:g} s"
    wanted = steward.certify.guards.wanted()
    behind = [s for s in held if steward.table.states[s].level < wanted]
    if behind:
        trouble = "".join(f"; {why}" for why in steward.degradation.shortages()[:1])
        return f"{FOR_A_PEER}: copies of step {shown(s.step for s in behind)} are under way{trouble}"
    return f"{BUSY}: the slots of {_ranks(steward, [rank])} {f'hold step {steps}' if held else 'are being made'}"


def _ranks(steward: Steward, ranks: list[int]) -> str:
    where = {rank: steward.record.ranks[rank] for rank in ranks}
    return f"rank {shown(f'{rank} on {node}' for rank, node in where.items())}"
