"""How much memory a job needs per node, as arithmetic that is printed beside its result (P8).

T is one snapshot of the whole job, every logical tensor counted once; N nodes. Sharded state (FSDP, TP, PP)
lives once, so its copies travel: a node holds its own generations and those of the ranks it protects. What DDP
replicates is captured f+1 times, balanced over the nodes, and needs no peer memory. Of what is frozen a node holds one
generation of each, however many snapshots there are. After a loss of f nodes, N-f
nodes hold what N held, while what they held before stays until the new epoch's first snapshot is certified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptd.core.policy import Policy
from ckptd.units import format_bytes

OWN_SLOTS_MIN = 2


@dataclass(frozen=True, slots=True)
class Sizing:
    """The question: ``state_bytes`` is T, ``frozen_bytes`` what of it never changes, ``nodes`` N, ``ranks_per_node``;
    ``replicated``: plain DDP."""

    state_bytes: int
    nodes: int
    ranks_per_node: int
    replicas: int
    own_slots: int
    peer_sets: int
    replicated: bool = False
    frozen_bytes: int = 0

    @property
    def tolerates(self) -> int:
        """Nodes that may be lost at once: copies beyond the number of other nodes do not exist."""
        return min(self.replicas, self.nodes - 1)

    def steady_bytes(self, nodes: int) -> float:
        """Per node, all generations full."""
        share, frozen = (self.state_bytes - self.frozen_bytes) / nodes, self.frozen_bytes / nodes
        copies = min(self.replicas, nodes - 1)
        once = (copies + 1) * frozen
        if self.replicated:
            return self.own_slots * (copies + 1) * share + once
        return (self.own_slots + copies * self.peer_sets) * share + once

    def after_loss_bytes(self) -> float:
        """Per node, at the worst moment: old generations, and one new one with its copies, on N-f nodes."""
        left = self.nodes - self.tolerates
        copies = min(self.replicas, left - 1)
        return self.steady_bytes(self.nodes) + (1 + copies) * self.state_bytes / left

    @property
    def needed_bytes(self) -> int:
        left = self.nodes - self.tolerates
        return int(max(self.steady_bytes(left), self.after_loss_bytes()))

    @property
    def slot_bytes(self) -> int:
        """One rank's slot, without what is frozen."""
        copies = min(self.replicas, self.nodes - 1) + 1 if self.replicated else 1
        return int(copies * (self.state_bytes - self.frozen_bytes) / (self.nodes * self.ranks_per_node))

    def formula(self) -> str:
        left, copies = self.nodes - self.tolerates, min(self.replicas, self.nodes - 1)
        per_node = f"{self.own_slots} own + {copies} copies x {self.peer_sets} sets"
        if self.replicated:
            per_node = f"{self.own_slots} own x {copies + 1} captures"
        if self.frozen_bytes:
            per_node += f", frozen x {copies + 1}"
        return (
            f"max(steady on {left} nodes {format_bytes(self.steady_bytes(left))}, "
            f"steady on {self.nodes} ({per_node}) {format_bytes(self.steady_bytes(self.nodes))} "
            f"+ one new set on {left} {format_bytes(self.after_loss_bytes() - self.steady_bytes(self.nodes))})"
        )

    def fallbacks(self) -> list[Sizing]:
        """The ladder, from what is asked for down to local only: fewer own generations, then fewer copies."""
        fewer_slots = [replace(self, own_slots=n) for n in range(self.own_slots - 1, OWN_SLOTS_MIN - 1, -1)]
        least = replace(self, own_slots=min(self.own_slots, OWN_SLOTS_MIN))
        return fewer_slots + [replace(least, replicas=n) for n in range(self.replicas - 1, -1, -1)]

    def fitting(self, budget_bytes: int) -> Sizing | None:
        """The first of the ladder that fits."""
        return next((s for s in self.fallbacks() if s.needed_bytes <= budget_bytes), None)


def sizing(
    policy: Policy, state_bytes: int, nodes: int, ranks_per_node: int, *, replicated: bool, frozen_bytes: int = 0
) -> Sizing:
    return Sizing(
        state_bytes, nodes, ranks_per_node, policy.replicas, policy.own_slots, policy.peer_sets, replicated, frozen_bytes
    )
