"""What a failure would meet now, as this node knows it (P2): exactly where the steward is, by certified levels elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.messages import Certificate
from ckptd.core.redundancy.outlook import Point, Situation, critical, fatal_places
from ckptd.core.redundancy.policies import Parity

if TYPE_CHECKING:
    from ckptd.core.protocol.machine.machine import JobMachine


def situation(machine: JobMachine) -> Situation:
    """Empty without an epoch."""
    ctx, record = machine.ctx, machine.ctx.record
    if record is None:
        return Situation((), -1)
    points = _by_books(machine) if _books_hold(machine) else by_levels(machine)
    domains = {node.node: ctx.domain(node.node) for node in record.nodes if ctx.is_up(node.node)}
    return Situation(points, trained(machine, points), record.ranks, domains, _rank_bytes(machine, points))


def trained(machine: JobMachine, points: list[Point]) -> int:
    """The newest step that any rank called. Also of ranks that are gone by now: what they had trained is what is lost."""
    record = machine.ctx.record
    here = [rank.step for rank in machine.ranks.here.values()]
    told = [state.step for state in machine.steward.grants.ranks.values()] if machine.steward.active else []
    parent = [record.parent.step] if record is not None and record.parent is not None else []
    return max([-1, *here, *told, *parent, *(point.snapshot.step for point in points)])


# --- by the steward's books ----------------------------------------------------------------------------------------------
def _books_hold(machine: JobMachine) -> bool:
    """Not those of a steward that has just begun: what it has not been told, or cannot read yet, has not fallen (P2)."""
    steward, table = machine.steward, machine.steward.table
    if not steward.active or not steward.sessions.settled():
        return False
    known = [table.states[snapshot] for snapshot in machine.levels.told if snapshot in table.states]
    return not any(state.certificate is None and table.unread(state) for state in known)


def _by_books(machine: JobMachine) -> list[Point]:
    """Newest first. Who holds what is looked at down to the first that survives any loss: nothing older is come back to."""
    ctx, table = machine.ctx, machine.steward.table
    points = [Point(s, -1, True) for s in table.durable.values() if ctx.is_candidate(s) and s not in table.states]
    nodes = {node: node for node in machine.steward.sessions.by_node if machine.steward.sessions.live(node)}
    domains = {node: ctx.domain(node) for node in nodes}
    safe = False
    for snapshot in sorted(table.states, reverse=True):
        state = table.states[snapshot]
        if state.void or not ctx.is_candidate(snapshot):
            continue
        said = state.certificate  # without one a rank may still say that it missed this step
        level = state.level if said is not None and said.level >= 0 else -1
        lost: list[frozenset[str] | None] = [None, None]
        if level == 0 and not safe:
            lost[0] = _critical(state, nodes)
            lost[1] = lost[0] if nodes == domains else _critical(state, domains)
        if level >= 0 or state.durable:
            points.append(Point(snapshot, level, state.durable, bool(state.shards), *lost))
        safe = safe or level >= 1
    return points


def _critical(state: SnapshotState, places: Mapping[str, str]) -> frozenset[str]:
    """places: of the nodes that count."""
    holders = {
        rank: [(places[node], tier) for node, tier in nodes.items() if node in places]
        for rank, nodes in state.holders.items()
    }
    spared: dict[int, frozenset[str]] = {}
    for parity_set, held in state.shards.items():
        data = {
            at: frozenset(where for where, tier in holders.get(rank, ()) if tier <= 1)
            for rank, at in parity_set.ranks().items()
        }
        shards = {at: frozenset(places[node] for node in nodes if node in places) for at, nodes in held.items()}
        fatal = fatal_places(parity_set, data, shards)
        if fatal is not None:
            spared.update((rank, fatal & spared.get(rank, fatal)) for rank in parity_set.ranks())
    assert state.classes is not None, "what has a level has classes"
    return critical(state.classes, holders, spared)


# --- by levels -----------------------------------------------------------------------------------------------------------
def by_levels(machine: JobMachine) -> list[Point]:
    """What certificates say, on any node; takes no time worth mentioning."""
    ctx, levels = machine.ctx, machine.levels
    gone, parity = _gone_domains(machine), isinstance(ctx.redundancy, Parity)
    points = []
    for snapshot, told in levels.told.items():
        if not ctx.is_candidate(snapshot) or snapshot in machine.slots.void:
            continue
        level = -1 if snapshot in levels.released else told.level
        if level >= 0 and not _is_fresh(machine, told):
            level = max(-1, level - gone)
        if level >= 0 or told.durable:
            points.append(Point(snapshot, level, told.durable, parity))
    return points


def _is_fresh(machine: JobMachine, told: Certificate) -> bool:
    """Does a steward stand behind it now? Until the successor of a lost one has said it again, what is down may not have been
    counted."""
    uplink = machine.uplink
    return bool(uplink.session) and told.session == uplink.session and machine.ctx.is_up(uplink.steward)


def _gone_domains(machine: JobMachine) -> int:
    ctx = machine.ctx
    if ctx.record is None:
        return 0
    return len({ctx.domain(node.node) for node in ctx.record.nodes if not ctx.is_up(node.node)})


def _rank_bytes(machine: JobMachine, points: list[Point]) -> dict[int, int]:
    """Of the newest snapshot whose layouts are known here."""
    table = machine.steward.table
    for snapshot in sorted((point.snapshot for point in points), reverse=True):
        state = table.states.get(snapshot) if machine.steward.active else None
        if state is not None and table.knows_layouts(state):
            return {rank: layout.payload_bytes for rank, layout in table.layouts_of(state).items()}
        found = _held_bytes(machine, snapshot)
        if found:
            return found
    return {}


def _held_bytes(machine: JobMachine, snapshot: SnapshotId) -> dict[int, int]:
    held = machine.slots.sealed.get(snapshot, ())
    return {slot.rank: slot.layout.payload_bytes for slot in held if slot.layout is not None and slot.own}
