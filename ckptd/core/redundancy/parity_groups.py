"""Which nodes share parity, and who of them holds which part of it (REFT's rotation, arXiv 2310.12670; RAID-5 and -6).

A group has n positions and m parity rows, and as many stripes as positions. Stripe s has its parity rows j = 0..m-1 at the
positions (s + j) % n and one chunk of data of each other position. So every position holds n - m chunks of its own and m
chunks of parity, in which nothing of its own is mixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.policies import Parity

CHUNK_ALIGN_BYTES = (
    64 << 10
)  # chunks begin on pages, whatever the page size, and whole vectors of any instruction set


def parity_groups(
    nodes: Sequence[NodeInfo], parity: Parity, together: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], ...]:
    """Node ids of each group, in the order of their positions; groups in the order of their first members.

    Members of a group are in different failure domains. Groups have parity + 1 to data + parity members, their sizes
    differ by at most one, and there are as few of them as take in all nodes; who fits no group (his domain has more nodes
    than there can be groups, or there are too few domains) is left out. together: node -> label; nodes of one label
    (ranks of one tensor- or pipeline-parallel group) are spread over the groups as far as domains and sizes let them.
    """
    members = list({node.node: node for node in nodes}.values())
    runs = _by_domain(members)
    count, places = _count(list(map(len, runs)), parity)
    if count == 0:
        return ()
    labels = together or {}
    chosen = _trimmed(runs, count, places)
    groups = _dealt(_in_dealing_order(chosen, labels), count, labels)
    at = {node.node: index for index, node in enumerate(members)}
    in_order = [tuple(sorted(group, key=at.__getitem__)) for group in groups]
    return tuple(sorted(in_order, key=lambda group: at[group[0]]))


def parity_members(old: Sequence[NodeInfo], new: Sequence[NodeInfo]) -> tuple[NodeInfo, ...]:
    """The members of a new epoch in the order in which ``parity_groups`` changes fewest groups of ``old``.

    A newcomer takes the place of one who left, one of the same domain if there is one; then the last ones fill what is
    free. So groups keep their members as long as their number stays, which it does until a group is full or must dissolve.
    Nodes that stay are taken from ``new``. Without ``old``, ``new`` as it is.
    """
    coming = {node.node: node for node in new}
    known = {node.node for node in old}
    spare = [node for node in coming.values() if node.node not in known]
    positions: list[NodeInfo | None] = []
    for node in {node.node: node for node in old}.values():
        if node.node in coming:
            positions.append(coming[node.node])
            continue
        same = next((other for other in spare if other.domain == node.domain), spare[0] if spare else None)
        positions.append(same)
        if same is not None:
            spare.remove(same)
    while None in positions:
        last = positions.pop()
        if last is not None:
            positions[positions.index(None)] = last
    return (*(node for node in positions if node is not None), *spare)


def _by_domain(members: Sequence[NodeInfo]) -> list[list[NodeInfo]]:
    runs: dict[str, list[NodeInfo]] = {}
    for node in members:
        runs.setdefault(node.domain, []).append(node)
    return list(runs.values())


def _count(sizes: Sequence[int], parity: Parity) -> tuple[int, int]:
    """(groups, nodes in them): most nodes, then fewest groups. sizes: nodes of each domain, of which each group takes one."""
    best = (0, 0)
    alike = Counter(sizes)
    for groups in range(1, sum(sizes) // (parity.parity + 1) + 1):
        available = sum(min(size, groups) * domains for size, domains in alike.items())
        if available < groups * (parity.parity + 1):
            break  # it only gets worse: a further group finds no more domains than these do
        if best[1] == sum(sizes):
            break
        places = min(available, groups * parity.group)
        if places > best[1]:
            best = (groups, places)
    return best


def _trimmed(runs: list[list[NodeInfo]], groups: int, places: int) -> list[list[NodeInfo]]:
    """Without the last nodes of the largest domains, until each group can take one of a domain and all find a place."""
    kept = [run[:groups] for run in runs]
    for _ in range(sum(map(len, kept)) - places):
        max(reversed(kept), key=len).pop()
    return [run for run in kept if run]


def _in_dealing_order(runs: list[list[NodeInfo]], labels: Mapping[str, str]) -> list[NodeInfo]:
    """The largest domains first, and one domain's nodes in a row; nodes alone in their domain by label."""
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    for run in runs:
        for node in run:
            label = labels.get(node.node, "")
            counts[label] = counts.get(label, 0) + bool(label)
            first.setdefault(label, len(first))

    def key(run: list[NodeInfo]) -> tuple[int, int, int]:
        label = labels.get(run[0].node, "") if len(run) == 1 else ""
        return (-len(run), -counts.get(label, 0), first.get(label, -1) if label else -1)

    return [node for run in sorted(runs, key=key) for node in run]


def _dealt(order: Sequence[NodeInfo], count: int, labels: Mapping[str, str]) -> list[list[str]]:
    """Each node to a smallest group that its domain is not in yet, if it can be one without its label."""
    if not labels:  # a domain's nodes are in a row, and no more than there are groups: the same, at once
        return [[node.node for node in order[at::count]] for at in range(count)]
    groups: list[list[str]] = [[] for _ in range(count)]
    domains: list[set[str]] = [set() for _ in range(count)]
    met: list[dict[str, int]] = [{} for _ in range(count)]
    for node in order:
        label = labels.get(node.node, "")
        free = [g for g in range(count) if node.domain not in domains[g]]
        best = min(free, key=lambda g: (len(groups[g]), met[g].get(label, 0) if label else 0, g))
        groups[best].append(node.node)
        domains[best].add(node.domain)
        met[best][label] = met[best].get(label, 0) + 1
    return groups


# --- one group's stripes ------------------------------------------------------------------------------------------
def parity_positions(n: int, m: int, stripe: int) -> tuple[int, ...]:
    """The position of each of the m parity rows of ``stripe``; all others have data there."""
    return tuple((stripe + row) % n for row in range(m))


def stripes_held(n: int, m: int, position: int) -> tuple[tuple[int, int], ...]:
    """(stripe, row) of each of the m chunks of parity that ``position`` holds, by stripe."""
    return tuple(sorted(((position - row) % n, row) for row in range(m)))


def data_stripes(n: int, m: int, position: int) -> tuple[int, ...]:
    """The n - m stripes with data of ``position``: its chunk i is in the i-th of them."""
    held = {stripe for stripe, _ in stripes_held(n, m, position)}
    return tuple(stripe for stripe in range(n) if stripe not in held)


def data_index(n: int, m: int, stripe: int, position: int) -> int:
    """The data column (0..n-m-1) of ``position`` in the code of ``stripe``: by position. Raises ValueError for parity."""
    parity = parity_positions(n, m, stripe)
    if position in parity:
        raise ValueError(f"position {position} of {n} holds parity of stripe {stripe}, not data")
    return sum(1 for other in range(position) if other not in parity)


def chunk_bytes(longest_member_bytes: int, n: int, m: int) -> int:
    """Length of each chunk of a group whose longest member has so many bytes: its n - m-th part, rounded up to 64 KiB.

    Shorter members, and the last chunk, count as if zeros followed. Raises ValueError unless n > m.
    """
    if n <= m:
        raise ValueError(f"a group of {n} has no room for {m} rows of parity and data")
    part = -(-longest_member_bytes // (n - m))
    return -(-part // CHUNK_ALIGN_BYTES) * CHUNK_ALIGN_BYTES
