"""Who and when: snapshots, nodes, epochs and their lineage (design D9, D10). Pure values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """One capture of one training step of one epoch of a job. Orders by (epoch, step, grant).

    ``grant``: under which all ranks captured it. A step whose capture became void may be captured anew: that is another snapshot,
    and no word about the one is about the other. 0: written before captures were told apart.
    """

    epoch: int
    step: int
    grant: int = 0

    @property
    def at(self) -> tuple[int, int]:
        """(epoch, step), whichever capture it is: storage has one of each."""
        return self.epoch, self.step

    def __str__(self) -> str:
        return f"step {self.step} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A daemon as others reach it. ``domain`` is its failure domain (rack, switch, PDU), ``parallel_group`` the tensor- or
    pipeline-parallel group of its ranks; "": it says nothing of that."""

    node: str
    control: str  # "tcp://ip:port", the ROUTER of the control link
    bulk: str  # "ip:port", the bulk listener
    domain: str
    incarnation: str = ""  # changes with every start of the process
    parallel_group: str = ""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One start of the job: which rank lives on which node, and what it continued from.

    ``ancestry`` holds the forks, newest first: the snapshot this epoch restored, then the snapshot that
    epoch had restored, and so on. Empty: a proven fresh start.
    """

    number: int
    nonce: str
    ranks: tuple[str, ...]  # node id of rank i
    nodes: tuple[NodeInfo, ...]  # the members, in the order of their positions (core.redundancy.placement.positions)
    ancestry: tuple[SnapshotId, ...] = ()
    holders: tuple[NodeInfo, ...] = ()  # other daemons that may still hold memory of an ancestor
    # Number and ancestry that count if this epoch never ran. 0: not known; -1: proven that there was nothing before.
    before: tuple[int, tuple[SnapshotId, ...]] = (0, ())

    def __hash__(self) -> int:
        """Not of all nodes: it is looked up in caches for every message, and there may be thousands of them."""
        return self.number

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def parent(self) -> SnapshotId | None:
        return self.ancestry[0] if self.ancestry else None

    def is_candidate(self, snapshot: SnapshotId) -> bool:
        """May ``snapshot`` be restored after this epoch? Its own steps, and ancestors up to each fork."""
        if snapshot.epoch == self.number:
            return True
        return any(snapshot.epoch == fork.epoch and snapshot.step <= fork.step for fork in self.ancestry)

    def abandons(self, snapshot: SnapshotId) -> bool:
        """Is it of an earlier epoch, and beyond what this one continued from? It is not restored any more."""
        return snapshot.epoch < self.number and not self.is_candidate(snapshot)


def parallel_groups(nodes: Iterable[NodeInfo]) -> dict[str, str]:
    """node -> label, of those that have one: placement's ``together``."""
    return {node.node: node.parallel_group for node in nodes if node.parallel_group}
