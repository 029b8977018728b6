"""A machine seen from outside: plain values for status, and the invariants that tests check after every event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.slots import FILLING, FREE, SEALED, Slot
from ckptd.core.redundancy.degradation import levels

if TYPE_CHECKING:
    from ckptd.core.protocol.machine.machine import JobMachine


def view(machine: JobMachine) -> dict[str, Any]:
    ctx, levels = machine.ctx, machine.levels.told
    steps = [rank.step for rank in machine.ranks.here.values() if not rank.left]
    candidates = [s for s, told in levels.items() if told.level >= 0 and ctx.is_candidate(s)]
    newest = max((s.step for s in candidates), default=-1)
    return {
        "epoch": ctx.number,
        "phase": phase(machine),
        "done": ctx.done,
        "steward": machine.uplink.steward,
        "is_steward": machine.steward.active,
        "ranks": {r.rank: {"step": r.step, "left": r.left} for r in machine.ranks.here.values()},
        "slots": dict(Counter(slot.state for slot in machine.slots.by_id.values() if slot.own)),
        "replicas": sum(1 for slot in machine.slots.by_id.values() if not slot.own),
        "snapshots": [
            {
                "epoch": s.epoch,
                "step": s.step,
                "level": told.level,
                "wanted": told.wanted,
                "durable": told.durable,
            }
            for s, told in sorted(levels.items())
        ],
        "lag": max(steps, default=newest) - newest if newest >= 0 else -1,
        "margin": machine.steward.grants.margin.steps,
        "down": sorted(ctx.down),
        "redundancy": ctx.redundancy.text,
        "degradation": _degradation(ctx),
        "drain": machine.leaving.view(),
    }


def _degradation(ctx: Context) -> int:
    """How far protection is degraded (P8); 0: what the policy wants."""
    found = levels(ctx.policy.redundancy, ctx.record.nodes) if ctx.record is not None else ()
    return found.index(ctx.redundancy) if ctx.redundancy in found else 0


def progress(machine: JobMachine) -> dict[int, int]:
    """Rank -> newest step for which snapshot() was called, of all ranks of the job; empty where the steward is not."""
    if not machine.steward.active:
        return {}
    return {rank: state.step for rank, state in machine.steward.grants.ranks.items() if not state.left}


def own_values(machine: JobMachine, snapshot: SnapshotId) -> tuple[str, ...]:
    """"t:key" and "o:name" whose values were each rank's own in this snapshot; empty where the steward is not."""
    state = machine.steward.table.states.get(snapshot) if machine.steward.active else None
    return state.agreement.per_rank if state is not None and state.agreement is not None else ()


def phase(machine: JobMachine) -> str:
    if machine.opening.open is not None:
        return "restoring"
    if machine.joining.join is not None:
        return "joining"
    return "running" if machine.ctx.done else "idle"


def waits(machine: JobMachine) -> str:
    """Why no snapshot is granted at the moment, as far as this node knows; "": one is, or none is expected: the job is over, or
    at a restore, and what was said of the run before holds no more."""
    return machine.uplink.waits() if phase(machine) == "running" and not machine.lifetime.life.over else ""


def validate(machine: JobMachine) -> None:
    """Slots: each state has what belongs to it, and nothing is held twice."""
    slots = machine.slots
    for slot_id, slot in slots.by_id.items():
        assert slot.id == slot_id, "a slot is filed under its id"
        _validate_slot(slot)
    held = [slot for found in slots.sealed.values() for slot in found]
    assert len({slot.id for slot in held}) == len(held), "a slot holds one snapshot"
    assert {s.id for s in held} == {s.id for s in slots.by_id.values() if s.state == SEALED}, (
        "sealed slots are indexed"
    )
    for snapshot, found in slots.sealed.items():
        assert found, "no empty entries"
        assert all(slot.fact is not None and slot.fact.snapshot == snapshot for slot in found)
    for message in list(machine.uplink._outbox):
        assert message.session == machine.uplink.session, "nothing of an old session is repeated"


def _validate_slot(slot: Slot) -> None:
    assert slot.state in (FREE, FILLING, SEALED)
    assert (slot.fact is not None) == (slot.state == SEALED), "only a sealed slot has content"
    assert not slot.doomed or slot.state == FILLING, "only what is being filled can be doomed"
    assert slot.own or slot.state == SEALED, "a replica is sealed or gone"
