"""Which nodes hold whose replicas: GEMINI's mixed placement over failure domains (SOSP '23, section 4, algorithm 1).

With m = replicas + 1 holders of each slot, N/m groups whose members hold each other's slots have the fewest fatal
m-subsets of nodes; what does not divide by m forms a ring. Here a group takes each of its members
from another failure domain.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from ckptd.core.ids import NodeInfo

Labels = Mapping[str, str]  # node -> tensor- or pipeline-parallel group, or whatever else fails as one


def peers(
    nodes: Sequence[NodeInfo], replicas: int, together: Labels | None = None
) -> dict[str, tuple[str, ...]]:
    """For each node the nodes that hold its replicas, the nearest first.

    Holders are in domains that differ from the node's own and from each other; there are min(replicas, domains - 1) of
    them. Nodes of one label in ``together`` (those of one model-parallel group) hold each other's only where domains
    leave no other choice. All daemons must pass the same nodes in the same order (the epoch's members).
    """
    members, labels = _members(nodes), together or {}
    holders = _holders(members, replicas)
    if holders < 2:
        return {node.node: () for node in members}
    groups, rest = _groups(members, holders, labels)
    if groups and rest:
        tail = _sorted(members, (*groups[-1], *rest))
        if len({node.domain for node in tail}) == len(tail):
            return _in_order(members, _ring(groups[:-1], holders) | _ring([tail], holders))
    chosen = _ring(groups, holders)
    return _in_order(members, chosen | _least_loaded(members, rest, chosen, holders, labels))


def alternatives(
    nodes: Sequence[NodeInfo], replicas: int, together: Labels | None = None
) -> dict[str, tuple[str, ...]]:
    """For each node all other nodes outside its own domain that are not its ``peers``, in the order of preference.

    First those whose domain has none of its replicas, then those without its label, then by how little they hold already,
    then the next ones in the list: nodes that lost the same peer turn to different substitutes.
    """
    members, labels = _members(nodes), together or {}
    chosen = peers(members, replicas, labels)
    load = _loads(chosen)
    return {node.node: _alternatives(at, members, chosen, load, labels) for at, node in enumerate(members)}


def preference(
    node: str, nodes: Sequence[NodeInfo], replicas: int, together: Labels | None = None
) -> tuple[str, ...]:
    """``peers`` and ``alternatives`` of one node: of all of them would be the square of the nodes for each."""
    members, labels = _members(nodes), together or {}
    chosen = peers(members, replicas, labels)
    at = next(index for index, member in enumerate(members) if member.node == node)
    return chosen[node] + _alternatives(at, members, chosen, _loads(chosen), labels)


def _alternatives(
    at: int,
    members: list[NodeInfo],
    chosen: Mapping[str, tuple[str, ...]],
    load: Mapping[str, int],
    labels: Labels,
) -> tuple[str, ...]:
    """Of the member at this place."""
    node = members[at]
    held = set(chosen[node.node])
    used = {member.domain for member in members if member.node in held}
    own = labels.get(node.node, "")
    others = [other for other in members[at + 1 :] + members[:at] if other.domain != node.domain]
    spare = [other for other in others if other.node not in held]
    spare.sort(key=lambda o: (o.domain in used, _alike(own, o, labels), load.get(o.node, 0)))
    return tuple(other.node for other in spare)


def positions(
    old: Sequence[NodeInfo], new: Sequence[NodeInfo], replicas: int, together: Labels | None = None
) -> tuple[NodeInfo, ...]:
    """The members of a new epoch in the order in which ``peers`` moves least of what ``old`` had placed.

    Groups that lost nobody stay; a newcomer takes the place of one who left, one of the same domain if there is one;
    groups that cannot be made full again go to the end with whoever is left over. Nodes that stay are taken from ``new``
    (their addresses may have changed). Without ``old``, ``new`` as it is.
    """
    coming = {node.node: node for node in new}
    before, labels = _members(old), together or {}
    holders = _holders(list(coming.values()), replicas)
    if holders < 2 or not before:
        return tuple(coming.values())
    groups, rest = _groups(before, holders, labels)
    known = {node.node: node.domain for node in before}
    if known == {node.node: node.domain for node in new}:
        return tuple(coming[name] for name in known)
    newcomers = [node for node in coming.values() if node.node not in known]
    spare = newcomers + [coming[node.node] for node in rest if node.node in coming]
    places = [_refilled(group, coming, spare) for group in groups]
    full = [group for group in places if len(group) == holders == len({node.domain for node in group})]
    broken = [node for group in places if group not in full for node in group]
    left = {node.node: node for node in spare if node.node in known}
    unseated = [node for node in spare if node.node not in known]
    last = _refilled(rest, left, unseated)
    return tuple(node for group in (*full, broken, last, unseated) for node in group)


def _refilled(group: list[NodeInfo], stay: Mapping[str, NodeInfo], spare: list[NodeInfo]) -> list[NodeInfo]:
    """Each who left replaced by one of ``spare`` in a domain the group does not have: of his own domain, if it can be."""
    taken = {stay[node.node].domain for node in group if node.node in stay}
    result = []
    for node in group:
        if node.node in stay:
            result.append(stay[node.node])
            continue
        fitting = [other for other in spare if other.domain not in taken]
        if fitting:
            best = min(fitting, key=lambda other: other.domain != node.domain)
            spare.remove(best)
            taken.add(best.domain)
            result.append(best)
    return result


def _holders(members: Sequence[NodeInfo], replicas: int) -> int:
    return min(replicas + 1, len({node.domain for node in members}))


def _alike(label: str, node: NodeInfo, labels: Labels) -> bool:
    return bool(label) and labels.get(node.node, "") == label


def _members(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    return list({node.node: node for node in nodes}.values())


def _sorted(members: list[NodeInfo], some: Iterable[NodeInfo]) -> list[NodeInfo]:
    names = {node.node for node in some}
    return [node for node in members if node.node in names]


def _by_place(members: list[NodeInfo], groups: list[list[NodeInfo]]) -> list[list[NodeInfo]]:
    at = {node.node: place for place, node in enumerate(members)}
    return [sorted(group, key=lambda node: at[node.node]) for group in groups]


def _in_order(members: list[NodeInfo], chosen: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {node.node: chosen[node.node] for node in members}


def _groups(
    members: list[NodeInfo], size: int, labels: Labels
) -> tuple[list[list[NodeInfo]], list[NodeInfo]]:
    """As many groups of ``size`` nodes in different domains as there can be, and the nodes left over.

    Neighbours in the given order that make a group as they are do so, if that costs no group and brings no more nodes
    of one label together: so an order can say what the groups are (``positions``).
    """
    chunks = [members[at : at + size] for at in range(0, len(members) - size + 1, size)]
    as_given = [chunk for chunk in chunks if len({node.domain for node in chunk}) == size]
    as_given = [chunk for chunk in as_given if not _conflicts([chunk], labels)]
    taken = {node.node for chunk in as_given for node in chunk}
    remain = [node for node in members if node.node not in taken]
    if len(as_given) == len(chunks):
        return as_given, remain
    most, rest = _dealt(members, size, labels)
    others, left = _dealt(remain, size, labels)
    kept = as_given + others
    if len(kept) < len(most) or _conflicts(kept, labels) > _conflicts(most, labels):
        return most, rest
    return kept, left


def _conflicts(groups: Iterable[list[NodeInfo]], labels: Labels) -> int:
    """Nodes that share a label with another of their group."""
    found = 0
    for group in groups:
        named = [labels[node.node] for node in group if labels.get(node.node)]
        found += len(named) - len(set(named))
    return found


def _dealt(members: list[NodeInfo], size: int, labels: Labels) -> tuple[list[list[NodeInfo]], list[NodeInfo]]:
    """Taking from the largest remaining domains first yields the most groups; among equals labels the group has not yet,
    the most frequent first, then the given order."""
    waiting: dict[str, list[NodeInfo]] = {}
    for node in members:
        waiting.setdefault(node.domain, []).append(node)
    groups = _novel(waiting, size, labels) if labels else _largest_first(waiting, size)
    taken = {node.node for group in groups for node in group}
    return _by_place(members, groups), [node for node in members if node.node not in taken]


def _largest_first(waiting: Mapping[str, Sequence[NodeInfo]], size: int) -> list[list[NodeInfo]]:
    runs = list(waiting.values())
    heap = [(-len(run), at) for at, run in enumerate(runs)]
    heapq.heapify(heap)
    groups = []
    while len(heap) >= size:
        largest = [heapq.heappop(heap) for _ in range(size)]
        groups.append(
            [runs[at][count] for count, at in largest]
        )  # the first that waits: counted from the end
        for count, at in largest:
            if count < -1:
                heapq.heappush(heap, (count + 1, at))
    return groups


def _novel(waiting: Mapping[str, Sequence[NodeInfo]], size: int, labels: Labels) -> list[list[NodeInfo]]:
    left = {domain: list(run) for domain, run in waiting.items()}
    groups = []
    while len(left) >= size:
        groups.append(_one_group(left, size, labels))
        for node in groups[-1]:
            left[node.domain].remove(node)
        left = {domain: run for domain, run in left.items() if run}
    return groups


def _one_group(waiting: Mapping[str, Sequence[NodeInfo]], size: int, labels: Labels) -> list[NodeInfo]:
    frequent: dict[str, int] = {}
    for run in waiting.values():
        for node in run:
            label = labels.get(node.node, "")
            frequent[label] = frequent.get(label, 0) + bool(label)
    group: list[NodeInfo] = []
    free = dict(waiting)
    for _ in range(size):
        met = {labels.get(node.node, "") for node in group} - {""}
        largest = max(map(len, free.values()))
        candidates = (node for run in free.values() if len(run) == largest for node in run)
        best = min(candidates, key=lambda n: _novelty(labels.get(n.node, ""), met, frequent))
        group.append(best)
        del free[best.domain]
    return group


def _novelty(label: str, met: set[str], frequent: Mapping[str, int]) -> tuple[bool, int]:
    return label in met, -frequent[label]


def _ring(groups: list[list[NodeInfo]], holders: int) -> dict[str, tuple[str, ...]]:
    """Each node's replicas lie on the next ``holders - 1`` nodes of its group; a group of ``holders`` is all to all."""
    return {
        node.node: tuple(group[(at + step) % len(group)].node for step in range(1, holders))
        for group in groups
        for at, node in enumerate(group)
    }


def _least_loaded(
    members: list[NodeInfo],
    rest: list[NodeInfo],
    chosen: dict[str, tuple[str, ...]],
    holders: int,
    labels: Labels,
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
            own = labels.get(node.node, "")
            best = min(free, key=lambda o: (_alike(own, o, labels), load.get(o.node, 0)))
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
