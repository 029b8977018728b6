"""Durable storage shared by all nodes: exclusive claims, first commit wins, outages. Checks itself (P1, P12)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.core.box import Box
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import CommitInfo, keep
from tests.sim.state import Token


class Broken(AssertionError):
    """A promise was broken. The first word is its number."""


@dataclass
class Committed:
    snapshot: SnapshotId
    attempt: str
    keep: bool
    tensors: dict[str, dict[Box, Token]] = field(default_factory=dict)
    objects: dict[int, Token] = field(default_factory=dict)


class Store:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.up = True
        self.claims: dict[int, EpochRecord] = {}
        self.commits: dict[SnapshotId, Committed] = {}
        self.ever: set[SnapshotId] = set()
        self.files: dict[str, dict[str, list[tuple[object, ...]]]] = {}  # attempt -> node -> written

    def claim(self, record: EpochRecord) -> tuple[bool, int]:
        """As persist does: the number is this attempt's alone, and there is none above it."""
        highest = max(self.claims, default=0)
        if highest > record.number:
            return False, highest
        ok = self.claims.setdefault(record.number, record).nonce == record.nonce
        return ok, max(self.claims)

    def newest(self) -> EpochRecord | None:
        return self.claims[max(self.claims)] if self.claims else None

    def commit(self, done: Committed, record: EpochRecord) -> None:
        before = self.commits.get(done.snapshot)
        if before is not None:
            if before.tensors != done.tensors:
                raise Broken(f"P12 {done.snapshot} was committed with two contents")
            return  # first commit wins
        ok, taken = self.claim(record)
        if not ok and taken >= record.number:
            raise PermissionError(f"epoch {record.number} is claimed by another start")
        self.commits[done.snapshot] = done
        self.ever.add(done.snapshot)
        self._retain(record)

    def _retain(self, record: EpochRecord) -> None:
        before = [CommitInfo(s, c.keep, True) for s, c in sorted(self.commits.items())]
        _, doomed = keep(before, self.policy, self.newest())
        lineage = self.newest() or record
        for gone in doomed:
            del self.commits[gone.snapshot]
        if any(lineage.is_candidate(info.snapshot) for info in before) and not any(
            lineage.is_candidate(snapshot) for snapshot in self.commits
        ):
            raise Broken("P12 retention deleted the last restorable checkpoint")
