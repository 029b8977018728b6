"""A steward of one parity set of parity, its spare nodes, and what it orders."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.redundancy.parity_sets import ParityShard, shard_layout
from ckptd.core.redundancy.policies import Parity
from tests.core.machines import EPOCH, Steward, at, layout, member, record_of

PATIENCE_S = 4.0
XOR = Parity(2, 1)
Ordered = set[tuple[str, int, bool]]  # (to, position, data)


def steward(
    ranks: str = "abc", spare: str = "d", parity: Parity = XOR, durable: bool = False, rack: str = "", **more: float
) -> Steward:
    """Nodes of one rank each, all of one parity set; ``spare`` ones have none. rack: these are one failure domain."""
    record = record_of(ranks)
    nodes = (*record.nodes, *map(member, spare))
    record = replace(record, nodes=tuple(replace(n, domain="rack") if n.node in rack else n for n in nodes))
    policy = Policy(redundancy=parity, durable=durable, steward_timeout_s=PATIENCE_S, **more)  # type: ignore[arg-type]
    return Steward(record, policy).train()


def orders(node: Steward, since: int = 0, step: int = 7) -> list[tuple[str, msg.ParityOrder]]:
    """As they were sent, the last of each."""
    names = [member.node for member in node.record.nodes]
    found = {
        (to, order.shard, order.data): (to, order)
        for to in names for order in node.said(msg.ParityOrder, to, since) if order.snapshot == at(step)
    }  # fmt: skip
    return list(found.values())


def ordered(node: Steward, since: int = 0, step: int = 7) -> Ordered:
    return {(to, order.shard.position, order.data) for to, order in orders(node, since, step)}


def shard_fact(shard: ParityShard, step: int = 7) -> msg.HoldingFact:
    made = shard_layout(shard.parity_set, 64)
    return msg.HoldingFact(at(step), shard.parity_set.holding_rank, 0, made.layout_id, shard=shard)


def make(node: Steward, to: str, shard: ParityShard, step: int = 7) -> None:
    """The node holds this part now."""
    if to == "a":
        made = shard_layout(shard.parity_set, 64)
        layouts = tuple(layout(m.rank, shard.parity_set.world) for m in shard.parity_set.members)
        node.feed(ev.ParityMade(at(step), shard, 2000 + 10 * step + shard.parity_set.number, made, (), layouts))
    else:
        node.others[to].held(shard_fact(shard, step))


def protected(node: Steward, step: int = 7, *, keep: bool = False) -> Steward:
    node.capture(step, keep=keep)
    for to, order in orders(node, step=step):
        assert not order.data
        make(node, to, order.shard, step)
    return node


def lose(node: Steward, *names: str) -> int:
    mark = node.mark
    node.feed(*map(ev.NodeDown, names))
    return mark


def leaves(node: Steward, name: str, yes: bool = True) -> int:
    mark = node.mark
    node.others[name].tell(msg.Leaving(EPOCH, yes))
    return mark
