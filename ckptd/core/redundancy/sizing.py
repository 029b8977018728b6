"""How much memory a job needs per node, and what it sends, as plain arithmetic (P8).

T is one snapshot of the whole job, every logical tensor counted once; N nodes. Sharded state (FSDP, TP, PP) lives once:
a node holds its own generations, and copies or parity for others. What DDP replicates is captured f+1 times, balanced over
the nodes, and needs no peer memory. Of what is frozen a node holds one generation of each, however many snapshots there
are. After a loss of f failure domains fewer nodes hold what all held, while what they held before stays until the new
epoch's first snapshot is certified.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.policies import Redundancy, Replicas, attainable
from ckptd.core.redundancy.scheme import scheme

OWN_SLOTS_MIN = 2


@dataclass(frozen=True, slots=True)
class Sizing:
    """The question: ``state_bytes`` is T, ``frozen_bytes`` what of it never changes, ``nodes`` N, ``ranks_per_node``;
    ``replicated``: plain DDP. ``domains``: the failure domain of each node; empty: each node is its own."""

    state_bytes: int
    nodes: int
    ranks_per_node: int
    redundancy: Redundancy
    own_slots: int
    peer_sets: int
    replicated: bool = False
    frozen_bytes: int = 0
    domains: tuple[str, ...] = ()

    @property
    def where(self) -> tuple[str, ...]:
        return self.domains or tuple(str(number) for number in range(self.nodes))

    @property
    def tolerates(self) -> int:
        """Failure domains that may be lost at once."""
        return attainable(self.redundancy.tolerates, self.where)

    @property
    def left(self) -> tuple[str, ...]:
        """The nodes left, by domain, after the loss of the ``tolerates`` domains with most nodes."""
        lost = {domain for domain, _ in Counter(self.where).most_common(self.tolerates)}
        return tuple(domain for domain in self.where if domain not in lost)

    def share(self, where: tuple[str, ...]) -> float:
        """Live state of one of so many nodes, in bytes."""
        return (self.state_bytes - self.frozen_bytes) / len(where)

    def held(self, where: tuple[str, ...]) -> float:
        """What the node with the most holds for others per snapshot, in states of one node."""
        if self.replicated:
            return float(attainable(self.redundancy.tolerates, where))
        return most_held(where, self.redundancy)

    def own_bytes(self, where: tuple[str, ...]) -> float:
        captures = 1 + self.held(where) if self.replicated else 1
        return self.own_slots * captures * self.share(where) + self.frozen_bytes / len(where)

    def peer_bytes(self, where: tuple[str, ...]) -> float:
        held = self.held(where)
        sets = 0 if self.replicated else self.peer_sets
        return held * (sets * self.share(where) + self.frozen_bytes / len(where))

    def steady_bytes(self, where: tuple[str, ...]) -> float:
        """Of the fullest node, all generations full."""
        return self.own_bytes(where) + self.peer_bytes(where)

    def new_set_bytes(self) -> float:
        """One new snapshot with what protects it, on the nodes that are left."""
        return (1 + self.held(self.left)) * self.state_bytes / len(self.left)

    def after_loss_bytes(self) -> float:
        """Of the fullest node at the worst moment: old generations, and one new set on the nodes that are left."""
        return self.steady_bytes(self.where) + self.new_set_bytes()

    @property
    def needed_bytes(self) -> int:
        return int(max(self.steady_bytes(self.left), self.after_loss_bytes()))

    @property
    def slot_bytes(self) -> int:
        """One rank's slot, without what is frozen."""
        captures = 1 + self.held(self.where) if self.replicated else 1
        return int(captures * self.share(self.where) / self.ranks_per_node)

    @property
    def sent_bytes(self) -> float:
        """What the node that sends most puts on the wire per snapshot; what DDP replicates costs nothing."""
        return 0.0 if self.replicated else most_sent(self.where, self.redundancy) * self.share(self.where)

    def fallbacks(self) -> list[Sizing]:
        """What to degrade to, from what is asked for down to local only: fewer own generations, then survive fewer losses."""
        fewer_slots = [replace(self, own_slots=n) for n in range(self.own_slots - 1, OWN_SLOTS_MIN - 1, -1)]
        least = replace(self, own_slots=min(self.own_slots, OWN_SLOTS_MIN))
        fewer = range(self.redundancy.tolerates - 1, -1, -1)
        return fewer_slots + [replace(least, redundancy=Replicas(n)) for n in fewer]

    def fitting(self, budget_bytes: int) -> Sizing | None:
        """The first of these that fits."""
        return next((s for s in self.fallbacks() if s.needed_bytes <= budget_bytes), None)


@lru_cache(maxsize=256)
def most_held(where: tuple[str, ...], redundancy: Redundancy) -> float:
    """See ``Scheme.held``; where: the domain of each node."""
    return max(scheme(_nodes(where), redundancy).held().values(), default=0.0)


@lru_cache(maxsize=256)
def most_sent(where: tuple[str, ...], redundancy: Redundancy) -> float:
    """See ``Scheme.sent``."""
    return max(scheme(_nodes(where), redundancy).sent().values(), default=0.0)


def _nodes(where: tuple[str, ...]) -> list[NodeInfo]:
    return [NodeInfo(str(number), "", "", domain) for number, domain in enumerate(where)]
