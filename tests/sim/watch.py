"""Counts what the core's machines do, from outside: a machine is compared with what it was before each event.

No counter is in the core. What must be counted at least so often is in transitions.py.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.context import succession
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.protocol.machine.slots import FILLING, SEALED, Slot

if TYPE_CHECKING:
    from tests.sim.host import Host


class Now(NamedTuple):
    """Of one machine: everything that has states, as plain values."""

    slots: dict[int, str]
    snapshots: dict[SnapshotId, str]
    durable: frozenset[SnapshotId]
    epoch: tuple[str, int, int]  # (phase, number, round)
    session: tuple[str, str]  # (steward, session)
    office: str
    members: dict[str, tuple[str, str]]  # node -> (session, state)
    restore: tuple[str, str, int]  # (state, attempt, epoch's number)
    grants: dict[int, str]
    flush: tuple[str, str]  # (state, attempt)


class Watch:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._was: dict[int, Now] = {}  # by machine

    def before(self, host: Host, event: ev.Event) -> None:
        if isinstance(event, ev.Restarted):
            self._was[id(host)] = now_of(host.machine)

    def after(self, host: Host, event: ev.Event, done: list[ins.Instruction]) -> None:
        seen = self.seen
        seen[f"event {type(event).__name__}"] += 1
        for detail in _of_event(event):
            seen[detail] += 1
        for do in done:
            for detail in _of_instruction(do):
                seen[detail] += 1
        was, now = self._was[id(host)], now_of(host.machine)
        if was != now:
            self._was[id(host)] = now
            seen.update(_changes(was, now, event))


# --- what a machine is ----------------------------------------------------------------------------------------------
def now_of(machine: JobMachine) -> Now:
    steward, uplink = machine.steward, machine.uplink
    told = machine.levels.told
    snapshots = {
        s: "protected" if t.level >= t.wanted else "sealed" if t.level >= 0 else "fallen"
        for s, t in told.items()
    }
    snapshots.update(dict.fromkeys(machine.slots.void, "void"))
    return Now(
        {slot.id: _slot(slot) for slot in machine.slots.by_id.values()},
        snapshots,
        frozenset(s for s, t in told.items() if t.durable),
        _epoch(machine),
        (uplink.steward, uplink.session),
        _office(machine),
        {
            node: (session.id, "established" if session.established else "invited")
            for node, session in steward.sessions.by_node.items()
        },
        _restore(machine),
        {n: "void" if grant.void else "open" for n, grant in steward.grants.open.items()}
        if steward.active
        else {},
        _flush(machine),
    )


def _slot(slot: Slot) -> str:
    kind = "own" if slot.own else "replica"
    if slot.state == FILLING:
        return f"{kind} {'DOOMED' if slot.doomed else 'FILLING'}"
    if slot.state == SEALED:
        return f"{kind} {'DAMAGED' if slot.damaged else 'RELEASED' if slot.released else 'SEALED'}"
    return f"{kind} FREE"


def _epoch(machine: JobMachine) -> tuple[str, int, int]:
    opening, number = machine.opening, machine.ctx.number
    if opening.open is not None:
        phase = "loading" if opening._went else "fetching" if opening._prepared else "open"
        return phase, number, opening.open.round
    if machine.joining.join is not None:
        return "joining", number, 0
    return ("running" if machine.ctx.done else "idle"), number, 0


def _office(machine: JobMachine) -> str:
    record = machine.ctx.record
    if not machine.steward.active or record is None:
        return "none"
    return "first" if succession(record)[0] == machine.ctx.me.node else "successor"


def _restore(machine: JobMachine) -> tuple[str, str, int]:
    restoring = machine.steward.restoring
    gather = restoring.gathering.gather
    if gather is None:
        return "none", "", 0
    if restoring.restore is not None:
        return "opened", gather.attempt, restoring.restore.record.number
    claiming = restoring._claiming
    if claiming is not None and claiming.record is not None:
        return "claiming", gather.attempt, claiming.record.number
    return ("joining" if gather.asking_since is None else "asking"), gather.attempt, 0


def _flush(machine: JobMachine) -> tuple[str, str]:
    flush = machine.steward.flushing.flush
    if flush is None:
        return "none", ""
    return ("committing" if flush.committing else "writing"), flush.attempt


# --- what became of it ----------------------------------------------------------------------------------------------
def _changes(was: Now, now: Now, event: ev.Event) -> list[str]:
    return [
        *_of_slots(was.slots, now.slots),
        *(f"snapshot {was.snapshots.get(s, 'unknown')} -> {state}" for s, state in now.snapshots.items()
          if was.snapshots.get(s) != state),
        *("snapshot -> durable" for _ in now.durable - was.durable),
        *_of_epoch(was.epoch, now.epoch),
        *_of_sessions(was, now),
        *_of_restore(was.restore, now.restore, event),
        *_of_grants(was.grants, now.grants, now.office),
        *_of_flush(was.flush, now.flush, event),
    ]  # fmt: skip


def _of_slots(was: dict[int, str], now: dict[int, str]) -> list[str]:
    if was == now:
        return []
    found = []
    for slot in was.keys() | now.keys():
        a, b = was.get(slot), now.get(slot)
        if a != b:
            kind = (a or b or "").split()[0]
            found.append(f"slot {kind} {a.split()[1] if a else 'none'} -> {b.split()[1] if b else 'none'}")
    return found


def _of_epoch(was: tuple[str, int, int], now: tuple[str, int, int]) -> list[str]:
    found = []
    if was[0] != now[0]:
        found.append(f"epoch {was[0]} -> {now[0]}")
    if was[1] != now[1]:
        found.append(f"epoch superseded while {was[0]}" if was[1] else "epoch known for the first time")
    if was[2] and now[2] and was[2] != now[2]:
        found.append("epoch round n+1")
    return found


def _of_sessions(was: Now, now: Now) -> list[str]:
    found = []
    if was.session != now.session:
        (old, _), (new, _) = was.session, now.session
        found.append("session " + ("opened" if not old else "closed" if not new else "renewed" if old == new
                                   else "taken over by another steward"))  # fmt: skip
    if was.office != now.office:
        found.append(f"office {was.office} -> {now.office}")
    if was.members != now.members:
        for node, (session, state) in now.members.items():
            old, before = was.members.get(node, ("", "none"))
            if before != state:
                found.append(f"member {before} -> {state}")
            elif old != session:
                found.append("member begun anew")
    return found


def _of_restore(was: tuple[str, str, int], now: tuple[str, str, int], event: ev.Event) -> list[str]:
    if was == now:
        return []
    if was[0] == now[0]:
        return [f"restore another attempt while {was[0]}"]
    if (was[0], now[0]) == ("claiming", "opened"):
        sure = isinstance(event, ev.EpochClaimed) and not event.reason
        return [f"restore claiming -> opened{'' if sure else ' without its claim'}"]
    return [f"restore {was[0]} -> {now[0]}"]


def _of_grants(was: dict[int, str], now: dict[int, str], office: str) -> list[str]:
    if was == now or office == "none":
        return []
    found = [f"grant {was.get(n, 'none')} -> {state}" for n, state in now.items() if was.get(n) != state]
    return found + [f"grant {state} -> {'complete' if state == 'open' else 'settled'}" for n, state in was.items()
                    if n not in now]  # fmt: skip


def _of_flush(was: tuple[str, str], now: tuple[str, str], event: ev.Event) -> list[str]:
    if was == now:
        return []
    if now[0] == "none":
        done = isinstance(event, ev.CommitDone) and event.ok
        return [f"flush {was[0]} -> {'durable' if done else 'given up'}"]
    return [f"flush {was[0]} -> {now[0]}"]


# --- what was said --------------------------------------------------------------------------------------------------
def _of_event(event: ev.Event) -> list[str]:
    if isinstance(event, ev.Received):
        return [f"received {type(event.message).__name__}"]
    if isinstance(event, ev.RankLeft):
        return ["event RankLeft " + ("clean" if event.clean else "died")]
    if isinstance(event, (ev.EpochClaimed, ev.DurableRead, ev.FilesWritten, ev.CommitDone, ev.RankFetched, ev.RankLoaded,
                          ev.ReplicaSent)):  # fmt: skip
        return [f"event {type(event).__name__} {'ok' if event.ok else 'failed'}"]
    return []


def _of_instruction(do: ins.Instruction) -> list[str]:
    found: list[str] = [f"do {type(do).__name__}"]
    if isinstance(do, ins.Send):
        found.append(f"sent {type(do.message).__name__}")
        found += _of_message(do.message)
    elif isinstance(do, (ins.FailJoin, ins.FailRestore)):
        found.append(f"{type(do).__name__}: {do.code}")
    elif isinstance(do, ins.Alarm):
        found.append(f"alarm: {do.kind}")
    return found


def _of_message(message: Any) -> list[str]:
    if isinstance(message, (msg.JoinRefused, msg.RestoreAbort)):
        return [f"{type(message).__name__}: {message.code}"]
    if isinstance(message, msg.Vote):
        return [f"Vote {message.phase} {'ok' if message.ok else message.code}"]
    if isinstance(message, msg.Missed):
        return [f"Missed: {message.reason}"]
    if isinstance(message, msg.Held):
        return ["Held: lost" if message.lost else "Held: here"]
    if isinstance(message, msg.Holders):
        return ["Holders: a shared slice" if message.tier >= 0 else "Holders: a rank"]
    if isinstance(message, msg.Certificate) and message.releases:
        return ["Certificate: releases"]
    return []
