"""Durable storage shared by all nodes: exclusive claims, first commit wins. Checks itself (P1, P4, P11, P12).

It may be away, full, slow, failing now and then, or lose its power: what was not synced is lost or torn then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ckptd.core.box import Box
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import CommitInfo, keep
from tests.sim.broken import Broken
from tests.sim.disk import Unsynced

SLOW_S = 6.0  # at most, of one operation while storage is slow
FAILS_OF = 0.3  # of the operations while storage is failing
WRONG_OF = 0.3  # of the others: done, and the answer is an error

Rows = list[tuple[object, ...]]


@dataclass
class Committed:
    snapshot: SnapshotId
    attempt: str
    keep: bool
    tensors: dict[str, dict[Box, bytes]] = field(default_factory=dict)
    objects: dict[int, bytes] = field(default_factory=dict)


class Store:
    def __init__(self, policy: Policy, rng: Random) -> None:
        self.policy, self.rng = policy, rng
        self.up = True
        self.full = self.slow = self.failing = False
        self.claims: dict[int, EpochRecord] = {}
        self.commits: dict[SnapshotId, Committed] = {}
        self.ever: set[SnapshotId] = set()
        self.files: dict[str, dict[str, Rows]] = {}  # attempt -> node -> written
        self.tainted: set[tuple[str, str]] = set()  # (attempt, node): a sync failed
        self.when_written: Callable[[], None] | None = None  # called once, between a write and its sync
        self._unsynced = Unsynced()
        self._manifests: dict[SnapshotId, int] = {}  # not synced yet -> token
        self._acknowledged: set[SnapshotId] = set()  # and not deleted by retention

    def calm(self) -> None:
        self.up, self.full, self.slow, self.failing = True, False, False, False

    # --- what one operation meets -------------------------------------------------------------------------------
    def wait(self) -> float:
        return self.rng.uniform(0.5, SLOW_S) if self.slow else 0.0

    def refuses(self, *, writes: bool = True) -> str:
        """The error of an operation that does not happen; "": it happens."""
        if not self.up:
            return "storage is gone"
        if self.full and writes:
            return "ENOSPC"
        return "EIO" if self.failing and self.rng.random() < FAILS_OF else ""

    def answers_wrongly(self) -> bool:
        """It happened, and the caller is told that it failed."""
        return self.failing and self.rng.random() < WRONG_OF

    def power_cut(self) -> int:
        """Raises Broken when something acknowledged is lost (P4)."""
        lost = self._unsynced.power_cut(self.rng)
        self._manifests.clear()
        gone = sorted(self._acknowledged - set(self.commits))
        if gone:
            raise Broken(f"P4 {gone[0]} was acknowledged as durable, and a power cut took it")
        return lost

    # --- claims -------------------------------------------------------------------------------------------------
    def claim(self, record: EpochRecord) -> tuple[bool, int]:
        """As persist does: the number is this attempt's alone, and there is none above it."""
        highest = max(self.claims, default=0)
        if highest > record.number:
            return False, highest
        ok = self.claims.setdefault(record.number, record).nonce == record.nonce
        return ok, max(self.claims)

    def newest(self) -> EpochRecord | None:
        return self.claims[max(self.claims)] if self.claims else None

    # --- files --------------------------------------------------------------------------------------------------
    def write(self, attempt: str, node: str, rows: Rows) -> int:
        """Not synced. A power cut leaves the first half of it, or nothing."""
        files = self.files.setdefault(attempt, {})
        files[node] = rows

        def torn() -> None:
            files[node] = rows[: len(rows) // 2]

        return self._wrote(torn)

    def sync_file(self, attempt: str, node: str, token: int) -> bool:
        """P11: once it failed, this attempt's file is never acknowledged."""
        ok = self._unsynced.sync(token) and not self.refuses()
        if not ok:
            self.tainted.add((attempt, node))
        return ok

    # --- commits ------------------------------------------------------------------------------------------------
    def publish(self, done: Committed, record: EpochRecord) -> None:
        """The manifest is visible, not synced. First commit wins. Raises PermissionError: the epoch is another start's."""
        before = self.commits.get(done.snapshot)
        if before is not None:
            if before.tensors != done.tensors:
                raise Broken(f"P12 {done.snapshot} was committed with two contents")
            return
        ok, taken = self.claim(record)
        if not ok and taken >= record.number:
            raise PermissionError(f"epoch {record.number} is claimed by another start")
        self.commits[done.snapshot] = done
        self._manifests[done.snapshot] = self._wrote(lambda: self._vanish(done.snapshot))

    def _wrote(self, undo: Callable[[], None]) -> int:
        call, self.when_written = self.when_written, None
        if call is not None:
            call()
        return self._unsynced.wrote(undo)

    def _vanish(self, snapshot: SnapshotId) -> None:
        self.commits.pop(snapshot, None)

    def sync_manifest(self, snapshot: SnapshotId) -> bool:
        """By whoever finds it there: the directories on the way. False: it is not there any more, or its sync failed."""
        if self.refuses() or snapshot not in self.commits:
            return False
        token = self._manifests.pop(snapshot, None)
        return token is None or self._unsynced.sync(token)

    def acknowledge(self, snapshot: SnapshotId, record: EpochRecord) -> None:
        self.ever.add(snapshot)
        self._acknowledged.add(snapshot)
        self._retain(record)

    def _retain(self, record: EpochRecord) -> None:
        before = [CommitInfo(s, c.keep, True) for s, c in sorted(self.commits.items())]
        _, doomed = keep(before, self.policy, self.newest())
        lineage = self.newest() or record
        for gone in doomed:
            del self.commits[gone.snapshot]
            self._acknowledged.discard(gone.snapshot)
        if any(lineage.is_candidate(info.snapshot) for info in before) and not any(
            lineage.is_candidate(snapshot) for snapshot in self.commits
        ):
            raise Broken("P12 retention deleted the last restorable checkpoint")
