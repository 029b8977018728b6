"""Parity that this node makes because the steward asked for it (design D8): at most one shard of a parity set at a time, the oldest
snapshot first, what failed after what did not. A snapshot that is gone leaves orders behind which nobody takes back: what has
failed too often is made when the steward, which repeats what it misses, asks once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.events import ParityFailed, ParityMade, ReplicaArrived
from ckptd.core.protocol.instructions import MakeParity
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.holdings import Holdings
from ckptd.core.protocol.machine.levels import Levels
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.messages import ParityOrder
from ckptd.core.redundancy.parity_sets import ParityShard

FIRST_RETRY_S = 0.1  # doubled up to replicate_retry_s
FAILURES_MAX = 16
ORDERS_MAX = 4096

Key = tuple[SnapshotId, ParityShard, bool]


@dataclass
class Order:
    message: ParityOrder
    failures: int = 0
    not_before: float = 0.0


class Encoding:
    def __init__(self, ctx: Context, slots: Slots, levels: Levels, holdings: Holdings) -> None:
        self._ctx, self._slots, self._levels, self._holdings = ctx, slots, levels, holdings
        self._orders: dict[Key, Order] = {}
        self._flying: set[Key] = set()

    def on_order(self, message: ParityOrder) -> None:
        """The newest order for a part names the sources that are there now."""
        key = (message.snapshot, message.shard, message.data)
        known = self._orders.get(key)
        if known is not None:
            known.message = message
        elif len(self._orders) < ORDERS_MAX:
            self._orders[key] = Order(message)
        self.act()

    def on_made(self, event: ParityMade) -> None:
        self._end(event.snapshot, event.shard, data=False)
        self._holdings.on_made(event)
        self.act()

    def on_arrived(self, event: ReplicaArrived) -> None:
        """A slot that parity brought back ends its order in this way, also when nobody wanted it any more."""
        found = [k for k in self._flying if k[2] and (k[0], k[1].member.rank) == (event.snapshot, event.rank)]
        self._flying.difference_update(found)
        self.act()

    def on_failed(self, event: ParityFailed) -> None:
        key = (event.snapshot, event.shard, event.data)
        self._flying.discard(key)
        order = self._orders.get(key)
        if order is not None:
            pause = FIRST_RETRY_S * 2.0 ** min(order.failures, 16)
            order.failures += 1
            order.not_before = self._ctx.now + min(pause, self._ctx.policy.replicate_retry_s)
            if order.failures >= FAILURES_MAX:
                del self._orders[key]
        self.act()

    def clear(self) -> None:
        """Another epoch: its steward asks anew; what the shell has under way still ends with a word."""
        self._orders.clear()
        self._flying.clear()

    def act(self) -> None:
        self._drop_done()
        busy = {self._place(key) for key in self._flying}
        for key in sorted(self._orders, key=lambda key: (self._orders[key].failures > 0, _age(key))):
            order, place = self._orders[key], self._place(key)
            if place in busy or self._ctx.now < order.not_before:
                continue
            if not data_or_alone(self._slots, key):
                continue
            if not self._holdings.refusal(key[0], place):
                busy.add(place)
                self._flying.add(key)
                message = order.message
                self._ctx.emit(MakeParity(message.snapshot, message.shard, message.sources, message.data))

    def _place(self, key: Key) -> int:
        """The number under which the result will be held; generations are counted by it."""
        _, shard, data = key
        return shard.member.rank if data else shard.parity_set.holding_rank

    def _drop_done(self) -> None:
        for key in list(self._orders):
            snapshot, shard, data = key
            if data:
                best = self._slots.best(snapshot, shard.member.rank)
                held = best is not None and best.fact is not None and best.fact.tier <= 1
            else:
                held = self._slots.shard(snapshot, shard) is not None
            if held or snapshot in self._slots.void or snapshot in self._levels.released:
                self._end(*key)

    def _end(self, snapshot: SnapshotId, shard: ParityShard, data: bool) -> None:
        self._orders.pop((snapshot, shard, data), None)
        self._flying.discard((snapshot, shard, data))


def data_or_alone(slots: Slots, key: Key) -> bool:
    """A node holds one shard of a parity set at most: parts are asked for by the parity set's number alone."""
    snapshot, shard, data = key
    return data or slots.best(snapshot, shard.parity_set.holding_rank) is None


def _age(key: Key) -> tuple[SnapshotId, int, int, bool]:
    snapshot, shard, data = key
    return snapshot, shard.parity_set.number, shard.position, not data
