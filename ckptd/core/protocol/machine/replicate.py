"""Copies of what this node holds on other nodes: copy t is the tier-t prefix, each in another failure domain (design D8).

A rank's oldest snapshot goes first: two at once would halve the speed of both, and the peer keeps few generations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId, parallel_groups
from ckptd.core.protocol.events import ReplicaSent
from ckptd.core.protocol.instructions import Replicate
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.slots import Slot, Slots
from ckptd.core.protocol.messages import Held, Holders
from ckptd.core.redundancy import placement
from ckptd.core.redundancy.parity_sets import replicated_ranks
from ckptd.core.redundancy.policies import Parity

REFUSALS_MAX = 4  # in a row, before another node is asked instead
FIRST_RETRY_S = 0.02  # doubled up to replicate_retry_s
VOID = "void"  # a peer's answer (Holdings.refusal)
NEVER = float("inf")
EXTRA = 1000  # more than there are replicas
EXTRAS_MAX = 8
RECHECK_S = 3.0  # a copy we made, but the steward does not know of after this long, is made again


@dataclass
class Copies:
    """Copies are numbered: t is the usual one of tier t, or of all that the slot has, if that is less; from EXTRA on they were
    asked for by the steward."""

    slot: Slot
    waits: bool  # found after a restart: the steward says first which copies there are
    asked: bool = False  # by the steward, whatever the policy says of this rank
    extra: dict[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)  # number -> (tier, nodes to avoid)
    done: dict[int, tuple[str, float]] = field(default_factory=dict)  # number -> (node, since)
    flying: dict[int, str] = field(default_factory=dict)
    refused: dict[str, tuple[int, float]] = field(default_factory=dict)  # node -> (times, not before)

    def tier_of(self, number: int) -> int:
        """Of a usual copy. What outlived the fuller holders is copied as often as they were."""
        assert self.slot.fact is not None, "slots without content were dropped"
        return max(number, self.slot.fact.tier)


class Replication:
    def __init__(self, ctx: Context, slots: Slots) -> None:
        self._ctx, self._slots = ctx, slots
        self._copies: dict[int, Copies] = {}  # by slot id
        self._degradation = ctx.policy.redundancy.text

    def on_held(self, slot: Slot, *, found: bool = False) -> None:
        """A slot that this node has to protect."""
        self._copies[slot.id] = Copies(slot, found)
        self.act()

    def on_sent(self, event: ReplicaSent) -> bool:
        """False: it was one more than there usually are, which no lower level of degradation would do without (Holders)."""
        usual = True
        for copies in self._copies.values():
            fact = copies.slot.fact
            if fact is None or (fact.snapshot, fact.rank) != (event.snapshot, event.rank):
                continue
            number = next((n for n, to in copies.flying.items() if to == event.to), None)
            if number is not None:
                usual &= number < EXTRA
                del copies.flying[number]
                self._count(copies, number, event)
            elif event.ok and event.tier:  # given up too early: it arrived all the same
                self._arrived_late(copies, event)
        self.act()
        return usual

    def _count(self, copies: Copies, number: int, event: ReplicaSent) -> None:
        if event.ok:
            copies.done[number] = (event.to, self._ctx.now)
            copies.refused.pop(event.to, None)
            return
        times = copies.refused.get(event.to, (0, 0.0))[0] + 1
        if event.reason == VOID:  # it was told so, and will not take it; newer snapshots must not wait behind this one
            copies.refused[event.to] = (times, NEVER)
            return
        pause = min(FIRST_RETRY_S * 2 ** min(times - 1, 16), self._ctx.policy.replicate_retry_s)
        copies.refused[event.to] = (times, self._ctx.now + pause)

    def _arrived_late(self, copies: Copies, event: ReplicaSent) -> None:
        alike = (n for n in range(1, event.tier + 1) if copies.tier_of(n) == event.tier)
        number = next((n for n in alike if n not in copies.done), None)
        if number is not None:
            copies.done[number] = event.to, self._ctx.now

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
        copies.asked = True
        known = {node for node, _ in message.nodes}
        fresh = {t: made for t, made in copies.done.items() if self._ctx.now - made[1] < RECHECK_S}
        extras = {n: made for n, made in copies.done.items() if n >= EXTRA and made[0] in known}  # a node may have lost it since
        copies.done = {**extras, **fresh}
        copies.extra = {n: need for n, need in copies.extra.items() if n in copies.done or n in copies.flying}
        self._count_known(copies, message)
        self.act()

    def _count_known(self, copies: Copies, message: Holders) -> None:
        """Copies that there are, whoever made them: one of each domain, the fullest under the lowest number."""
        domain = self._ctx.domain
        met = {domain(node) for number, (node, _) in copies.done.items() if number < EXTRA} | {self._ctx.me.domain}
        for node, tier in sorted(message.nodes, key=lambda held: held[1]):
            free = [n for n in range(1, self._wanted(copies) + 1) if n not in copies.done and n not in copies.flying]
            number = next((n for n in free if copies.tier_of(n) >= tier), None)
            if number is not None and domain(node) not in met:
                met.add(domain(node))
                copies.done[number] = node, 0.0

    def _add_extra(self, copies: Copies, message: Holders) -> None:
        """At most one of them is under way at a time: the steward asks again as long as it misses one. One that has not begun
        gives way: what it was for may have come about otherwise, and then there is no place for it, ever."""
        copies.extra = {n: need for n, need in copies.extra.items() if n in copies.done or n in copies.flying}
        number = max(copies.extra, default=EXTRA - 1) + 1
        flying = any(n not in copies.done for n in copies.extra)
        made = any(self._ctx.now - copies.done[n][1] < RECHECK_S for n in copies.extra if n in copies.done)
        if not flying and not made and len(copies.extra) < EXTRAS_MAX:
            copies.extra[number] = (message.tier, tuple(node for node, _ in message.nodes))
            self.act()

    def on_degradation(self, text: str) -> None:
        """What the steward had asked for under another level of degradation is asked for anew, if it still wants it."""
        if text != self._degradation:
            self._degradation = text
            for copies in self._copies.values():
                copies.asked = False
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
        if gone:
            self.places_are_free()
        for copies in self._copies.values() if self._ctx.down else ():  # else nobody is lost
            copies.done = {n: made for n, made in copies.done.items() if not self._ctx.lost(made[0])}
            copies.extra = {n: need for n, need in copies.extra.items() if n in copies.done or n in copies.flying
                            or not any(map(self._ctx.lost, need[1]))}  # fmt: skip

    def _full(self, node: str, copies: Copies) -> bool:
        """It holds as many older generations of this rank as it takes, from us. Their release is what to wait for; asking, and
        another node after some refusals, would only spread the copies."""
        fact = copies.slot.fact
        assert fact is not None, "slots without content were dropped"
        older = [
            other.slot.fact.snapshot for other in self._copies.values()
            if other.slot.fact is not None and other.slot.rank == copies.slot.rank
            and other.slot.fact.snapshot < fact.snapshot and any(to == node for to, _ in other.done.values())
        ]  # fmt: skip
        return len(set(older)) >= self._ctx.policy.peer_sets

    def places_are_free(self) -> None:
        """What was released here is released on the peers, too: whoever was full a moment ago is asked again."""
        for copies in self._copies.values():
            for node, (times, not_before) in copies.refused.items():
                copies.refused[node] = (times, min(not_before, self._ctx.now) if not_before != NEVER else NEVER)

    def _start(self, copies: Copies) -> bool:
        """True when something of it is on its way, or waits for a node that was only refused for now."""
        fact, ctx = copies.slot.fact, self._ctx
        assert fact is not None, "slots without content were dropped"
        under_way = bool(copies.flying)
        if ctx.record is None or not ctx.is_candidate(fact.snapshot):
            return under_way
        usual = {number: (copies.tier_of(number), ()) for number in range(1, self._wanted(copies) + 1)}
        for number, (tier, avoid) in {**usual, **copies.extra}.items():
            if number in copies.done or number in copies.flying or tier < fact.tier:
                continue
            to, wait = self._target(copies, avoid, number >= EXTRA)
            under_way |= wait or to is not None
            if to is not None:
                copies.flying[number] = to
                ctx.emit(Replicate(fact.snapshot, fact.rank, copies.slot.id, tier, to))
        return under_way

    def _wanted(self, copies: Copies) -> int:
        """Copies in other failure domains. What shares parity with others needs none, unless the steward asks for them."""
        ctx, fact = self._ctx, copies.slot.fact
        assert ctx.record is not None and fact is not None, "looked at before"
        policy = ctx.redundancy
        if isinstance(policy, Parity) and not copies.asked:
            alone = replicated_ranks(ctx.record, policy) if fact.snapshot.epoch == ctx.number else frozenset()
            return policy.tolerates if fact.rank in alone else 0
        return policy.tolerates

    def _target(self, copies: Copies, avoid: tuple[str, ...], extra: bool) -> tuple[str | None, bool]:
        """The node for the next copy; or none, and whether one will do later. What is about to go is a last resort; for an extra
        copy elsewhere it is as good as gone already, and its domain is free."""
        ctx = self._ctx
        if ctx.record is None:
            return None, False
        flying = list(copies.flying.values())
        used = [*avoid, *flying] if avoid else [*(node for node, _ in copies.done.values()), *flying]
        gone = ctx.leaving if extra else frozenset()
        domains = {ctx.domain(node) for node in (*used, ctx.me.node)}
        stays = {ctx.domain(node) for node in (*used, ctx.me.node) if node not in gone}
        found = preference(ctx.record, ctx.me, ctx.redundancy.tolerates)  # of hundreds the first will do, as a rule
        staying = (n for n in found if ctx.is_up(n) and n not in ctx.leaving and ctx.domain(n) not in stays)
        to, waits = self._first(copies, staying)
        if to is not None or waits:
            return to, waits
        return self._first(copies, (n for n in found if ctx.is_up(n) and n in ctx.leaving and ctx.domain(n) not in domains))

    def _first(self, copies: Copies, nodes: Iterable[str]) -> tuple[str | None, bool]:
        waiting = False
        for node in nodes:
            if self._full(node, copies):
                return None, True
            times, not_before = copies.refused.get(node, (0, 0.0))
            if not_before == NEVER:
                continue
            if self._ctx.now >= not_before:
                return node, True
            waiting = True
            if times < REFUSALS_MAX:
                return None, True
        return None, waiting


def _age(copies: Copies) -> tuple[SnapshotId, int]:
    fact = copies.slot.fact
    assert fact is not None, "slots without content were dropped"
    return fact.snapshot, fact.rank


@lru_cache(maxsize=64)
def preference(record: EpochRecord, me: NodeInfo, replicas: int) -> tuple[str, ...]:
    """Where this node's copies go, best first. A daemon outside the epoch protects what it holds among the members."""
    inside = any(node.node == me.node for node in record.nodes)
    nodes = record.nodes if inside else (*record.nodes, me)
    return placement.preference(me.node, nodes, replicas, parallel_groups(nodes))
