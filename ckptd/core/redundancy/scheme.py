"""Who protects whom under a policy, and what it costs: groups with parity, copies for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.parity_groups import parity_groups
from ckptd.core.redundancy.placement import peers
from ckptd.core.redundancy.policies import Parity, Redundancy
from ckptd.core.redundancy.probability import Fatal


@dataclass(frozen=True, slots=True)
class Scheme:
    """groups: of nodes that share ``parity`` rows of parity. copies: each other node, and the nodes that hold its copies."""

    groups: tuple[tuple[str, ...], ...]
    parity: int
    copies: Mapping[str, tuple[str, ...]]

    @property
    def tolerates(self) -> int:
        """Failure domains that may be lost at once, whichever they are; 0 where a node has nobody."""
        rows = [self.parity] if self.groups else []
        return min([*rows, *(len(held) for held in self.copies.values())], default=0)

    def fatal_sets(self) -> tuple[Fatal, ...]:
        """The sets of nodes of which no more than some may be lost at once."""
        sets = [Fatal(group, self.parity) for group in self.groups]
        holders = {frozenset((node, *held)): (node, *held) for node, held in self.copies.items()}
        return (*sets, *(Fatal(tuple(sorted(who)), len(who) - 1) for who in holders.values()))

    def held(self) -> dict[str, float]:
        """Node -> what it holds for others per snapshot, in states of one node (all nodes' states alike)."""
        load = dict.fromkeys(self.copies, 0.0)
        for group in self.groups:
            load |= dict.fromkeys(group, self.parity / (len(group) - self.parity))
        for holders in self.copies.values():
            for holder in holders:
                load[holder] += 1
        return load

    def sent(self) -> dict[str, float]:
        """Node -> what it sends per snapshot, in states of one node: its chunks to each row's holder, or its copies."""
        sent = {node: float(len(held)) for node, held in self.copies.items()}
        return sent | {node: float(self.parity) for group in self.groups for node in group}


def scheme(
    nodes: Sequence[NodeInfo], redundancy: Redundancy, together: Mapping[str, str] | None = None
) -> Scheme:
    """Nodes that fit no group with parity are protected by copies that survive as many losses."""
    if not isinstance(redundancy, Parity):
        return Scheme((), 0, peers(nodes, redundancy.tolerates, together))
    groups = parity_groups(nodes, redundancy, together)
    grouped = {node for group in groups for node in group}
    if len(grouped) == len({node.node for node in nodes}):
        return Scheme(groups, redundancy.parity, {})
    chosen = peers(nodes, redundancy.tolerates, together)
    return Scheme(groups, redundancy.parity, {n: held for n, held in chosen.items() if n not in grouped})


def ring(nodes: Sequence[NodeInfo], copies: int) -> Scheme:
    """Each node's copies on the next ones in the list: what GEMINI compares its groups with."""
    names = [node.node for node in nodes]
    held = {
        name: tuple(names[(at + step) % len(names)] for step in range(1, min(copies, len(names) - 1) + 1))
        for at, name in enumerate(names)
    }
    return Scheme((), 0, held)
