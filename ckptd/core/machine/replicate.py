"""Copies of what this node holds on other nodes: copy t is the tier-t prefix, each in another failure domain (design D8).

A rank's oldest snapshot goes first: two at once would halve the speed of both, and the peer keeps few generations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from ckptd.core.events import ReplicaSent
from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.instructions import Replicate
from ckptd.core.machine.context import Context
from ckptd.core.machine.slots import Slot, Slots
from ckptd.core.messages import Held, Holders
from ckptd.core.placement import alternatives, peers

REFUSALS_MAX = 4  # in a row, before another node is asked instead
FIRST_RETRY_S = 0.1  # doubled up to replicate_retry_s
EXTRA = 1000  # more than there are replicas
EXTRAS_MAX = 8
RECHECK_S = 3.0  # a copy we made, but the steward does not know of after this long, is made again


@dataclass
class Copies:
    """Copies are numbered: t is the usual one of tier t; from EXTRA on they were asked for by the steward."""

    slot: Slot
    waits: bool  # found after a restart: the steward says first which copies there are
    extra: dict[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)  # number -> (tier, nodes to avoid)
    done: dict[int, tuple[str, float]] = field(default_factory=dict)  # number -> (node, since)
    flying: dict[int, str] = field(default_factory=dict)
    refused: dict[str, tuple[int, float]] = field(default_factory=dict)  # node -> (times, not before)


class Replication:
    def __init__(self, ctx: Context, slots: Slots) -> None:
        self._ctx, self._slots = ctx, slots
        self._copies: dict[int, Copies] = {}  # by slot id

    def on_held(self, slot: Slot, *, found: bool = False) -> None:
        """A slot that this node has to protect."""
        self._copies[slot.id] = Copies(slot, found)
        self.act()

    def on_sent(self, event: ReplicaSent) -> None:
        for copies in self._copies.values():
            fact = copies.slot.fact
            if fact is None or (fact.snapshot, fact.rank) != (event.snapshot, event.rank):
                continue
            number = next((n for n, to in copies.flying.items() if to == event.to), None)
            if number is not None:
                del copies.flying[number]
                self._count(copies, number, event)
            elif event.ok and event.tier:  # given up too early: it arrived all the same
                copies.done.setdefault(event.tier, (event.to, self._ctx.now))
        self.act()

    def _count(self, copies: Copies, number: int, event: ReplicaSent) -> None:
        if event.ok:
            copies.done[number] = (event.to, self._ctx.now)
            copies.refused.pop(event.to, None)
            return
        times = copies.refused.get(event.to, (0, 0.0))[0] + 1
        pause = min(FIRST_RETRY_S * 2 ** min(times - 1, 16), self._ctx.policy.replicate_retry_s)
        copies.refused[event.to] = (times, self._ctx.now + pause)

    def on_holders(self, message: Holders) -> None:
        """The steward misses copies. Whoever gets this is responsible for them, owner or not."""
        slot = self._slots.best(message.snapshot, message.rank)
        if slot is None or slot.released:
            return
        copies = self._copies.setdefault(slot.id, Copies(slot, False))
        copies.waits = False
        if message.tier >= 0:
            self._add_extra(copies, message)
            return
        known = {tier: node for node, tier in message.nodes if node != self._ctx.me.node}
        fresh = {t: made for t, made in copies.done.items() if self._ctx.now - made[1] < RECHECK_S}
        extras = {n: made for n, made in copies.done.items() if n >= EXTRA}
        copies.done = {**{t: (node, 0.0) for t, node in known.items() if t > 0}, **extras, **fresh}
        self.act()

    def _add_extra(self, copies: Copies, message: Holders) -> None:
        """At most one of them is under way at a time: the steward asks again as long as it misses one."""
        number = EXTRA + len(copies.extra)
        waiting = any(n not in copies.done for n in copies.extra)
        made = any(self._ctx.now - copies.done[n][1] < RECHECK_S for n in copies.extra if n in copies.done)
        if not waiting and not made and len(copies.extra) < EXTRAS_MAX:
            copies.extra[number] = (message.tier, tuple(node for node, _ in message.nodes))
            self.act()

    def on_peer_lost(self, node: str, message: Held) -> None:
        """The holder of a copy says that it is damaged."""
        for copies in self._copies.values():
            fact = copies.slot.fact
            if fact is not None and (fact.snapshot, fact.rank) == (message.fact.snapshot, message.fact.rank):
                copies.done = {tier: made for tier, made in copies.done.items() if made[0] != node}
        self.act()

    def on_down(self, node: str) -> None:
        """What was on its way there is not any more; what arrived counts until the node is lost for good."""
        for copies in self._copies.values():
            copies.flying = {tier: to for tier, to in copies.flying.items() if to != node}
        self.act()

    def act(self) -> None:
        """Start what can be started: for each rank the oldest snapshot that still lacks a copy which can be made."""
        self._drop_gone()
        busy: set[int] = {copies.slot.rank for copies in self._copies.values() if copies.flying}
        for copies in sorted(self._copies.values(), key=_age):
            rank = copies.slot.rank
            if (copies.waits or rank in busy) and not copies.flying:
                continue
            if self._start(copies):
                busy.add(rank)

    def forget_flights(self) -> None:
        """Another epoch: the shell may have dropped what was under way."""
        for copies in self._copies.values():
            copies.flying.clear()
            copies.refused.clear()

    def _drop_gone(self) -> None:
        gone = [i for i, copies in self._copies.items() if copies.slot.fact is None or copies.slot.released]
        for slot_id in gone:
            del self._copies[slot_id]
        for copies in self._copies.values():
            copies.done = {n: made for n, made in copies.done.items() if not self._ctx.lost(made[0])}
            copies.extra = {n: need for n, need in copies.extra.items() if n in copies.done or n in copies.flying
                            or not any(map(self._ctx.lost, need[1]))}  # fmt: skip

    def _start(self, copies: Copies) -> bool:
        """True when something of it is on its way, or waits for a node that was only refused for now."""
        fact, ctx = copies.slot.fact, self._ctx
        assert fact is not None, "slots without content were dropped"
        under_way = bool(copies.flying)
        if ctx.record is None or not ctx.is_candidate(fact.snapshot):
            return under_way
        usual = {tier: (tier, ()) for tier in range(max(1, fact.tier), ctx.policy.replicas + 1)}
        for number, (tier, avoid) in {**usual, **copies.extra}.items():
            if number in copies.done or number in copies.flying or tier < fact.tier:
                continue
            to, wait = self._target(copies, avoid)
            under_way |= wait or to is not None
            if to is not None:
                copies.flying[number] = to
                ctx.emit(Replicate(fact.snapshot, fact.rank, copies.slot.id, tier, to))
        return under_way

    def _target(self, copies: Copies, avoid: tuple[str, ...]) -> tuple[str | None, bool]:
        """The node for the next copy; or none, and whether one will do later."""
        ctx = self._ctx
        used = avoid or [*(node for node, _ in copies.done.values()), *copies.flying.values()]
        domains = {ctx.domain(node) for node in (*used, ctx.me.node)}
        waiting = False
        for node in preference(ctx.record, ctx.me, ctx.policy.replicas) if ctx.record is not None else ():
            if not ctx.is_up(node) or ctx.domain(node) in domains:
                continue
            times, not_before = copies.refused.get(node, (0, 0.0))
            if ctx.now >= not_before:
                return node, True
            waiting = True
            if times < REFUSALS_MAX:
                return None, True
        return None, waiting


def _age(copies: Copies) -> tuple[int, int, int]:
    fact = copies.slot.fact
    assert fact is not None, "slots without content were dropped"
    return fact.snapshot.epoch, fact.snapshot.step, fact.rank


@lru_cache(maxsize=64)
def preference(record: EpochRecord, me: NodeInfo, replicas: int) -> tuple[str, ...]:
    """Where this node's copies go, best first. A daemon outside the epoch protects what it holds among the members."""
    inside = any(node.node == me.node for node in record.nodes)
    nodes = record.nodes if inside else (*record.nodes, me)
    return peers(nodes, replicas)[me.node] + alternatives(nodes, replicas)[me.node]
