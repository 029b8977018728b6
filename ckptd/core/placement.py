"""Which nodes hold whose replicas: GEMINI's mixed placement over failure domains (SOSP '23, section 4, algorithm 1).

With m = replicas + 1 holders of each slot, N/m groups whose members hold each other's slots have the fewest fatal
m-subsets of nodes; what does not divide by m forms a ring. Here a group takes each of its members
from another failure domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptd.core.ids import NodeInfo


def peers(nodes: Sequence[NodeInfo], replicas: int) -> dict[str, tuple[str, ...]]:
    """For each node the nodes that hold its replicas, the nearest first.

    Holders are in domains that differ from the node's own and from each other; there are min(replicas, domains - 1) of
    them. All daemons must pass the same nodes in the same order (the epoch's members).
    """
    members = _members(nodes)
    domains = {node.domain for node in members}
    holders = min(replicas + 1, len(domains))
    if holders < 2:
        return {node.node: () for node in members}
    groups, rest = _groups(members, holders)
    if groups and rest:
        tail = _sorted(members, (*groups[-1], *rest))
        if len({node.domain for node in tail}) == len(tail):
            return _in_order(members, _ring(groups[:-1], holders) | _ring([tail], holders))
    chosen = _ring(groups, holders)
    return _in_order(members, chosen | _least_loaded(members, rest, chosen, holders))


def alternatives(nodes: Sequence[NodeInfo], replicas: int) -> dict[str, tuple[str, ...]]:
    """For each node all other nodes outside its own domain that are not its ``peers``, in the order of preference.

    First those whose domain has none of its replicas, then by how little they hold already, then the next ones in the
    list: nodes that lost the same peer turn to different substitutes.
    """
    members = _members(nodes)
    chosen = peers(members, replicas)
    load = _loads(chosen)
    domain = {node.node: node.domain for node in members}
    result = {}
    for at, node in enumerate(members):
        used = {domain[peer] for peer in chosen[node.node]}
        others = [other for other in members[at + 1 :] + members[:at] if other.domain != node.domain]
        spare = [other for other in others if other.node not in chosen[node.node]]
        spare.sort(key=lambda other: (other.domain in used, load.get(other.node, 0)))
        result[node.node] = tuple(other.node for other in spare)
    return result


def _members(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    return list({node.node: node for node in nodes}.values())


def _sorted(members: list[NodeInfo], some: Iterable[NodeInfo]) -> list[NodeInfo]:
    names = {node.node for node in some}
    return [node for node in members if node.node in names]


def _in_order(members: list[NodeInfo], chosen: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {node.node: chosen[node.node] for node in members}


def _groups(members: list[NodeInfo], size: int) -> tuple[list[list[NodeInfo]], list[NodeInfo]]:
    """As many groups of ``size`` nodes in different domains as there can be, and the nodes left over.

    Taking from the largest remaining domains first yields the most groups; among equals, the given order.
    """
    waiting: dict[str, list[NodeInfo]] = {}
    for node in members:
        waiting.setdefault(node.domain, []).append(node)
    groups = []
    while len(waiting) >= size:
        largest = sorted(waiting, key=lambda domain: -len(waiting[domain]))[:size]
        group = [waiting[domain].pop(0) for domain in largest]
        groups.append(_sorted(members, group))
        waiting = {domain: left for domain, left in waiting.items() if left}
    rest = [node for left in waiting.values() for node in left]
    return groups, _sorted(members, rest)


def _ring(groups: list[list[NodeInfo]], holders: int) -> dict[str, tuple[str, ...]]:
    """Each node's replicas lie on the next ``holders - 1`` nodes of its group; a group of ``holders`` is all to all."""
    return {
        node.node: tuple(group[(at + step) % len(group)].node for step in range(1, holders))
        for group in groups
        for at, node in enumerate(group)
    }


def _least_loaded(
    members: list[NodeInfo], rest: list[NodeInfo], chosen: dict[str, tuple[str, ...]], holders: int
) -> dict[str, tuple[str, ...]]:
    """Nodes that fit no group (one domain is larger than the others together) go where the least is held."""
    load = _loads(chosen)
    extra = {}
    for node in rest:
        at = members.index(node)
        ahead = members[at + 1 :] + members[:at]
        picked: list[NodeInfo] = []
        taken = {node.domain}
        while len(picked) < holders - 1:
            free = [other for other in ahead if other.domain not in taken]
            best = min(free, key=lambda other: load.get(other.node, 0))
            picked.append(best)
            taken.add(best.domain)
            load[best.node] = load.get(best.node, 0) + 1
        extra[node.node] = tuple(other.node for other in picked)
    return extra


def _loads(chosen: dict[str, tuple[str, ...]]) -> dict[str, int]:
    load: dict[str, int] = {}
    for holders in chosen.values():
        for holder in holders:
            load[holder] = load.get(holder, 0) + 1
    return load
