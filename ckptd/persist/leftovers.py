"""What of a job could go: left by the dead, or not needed by the rules of retention. Looks only; ``retention.sweep`` deletes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.core.policy import Policy
from ckptd.core.retention import Standing
from ckptd.persist.commits import list_all, list_epochs, list_pointers
from ckptd.persist.lease import leased
from ckptd.persist.lineage import forgotten_epoch, newest_record
from ckptd.persist.names import epoch_dir, is_aside, is_attempt, step_dir
from ckptd.persist.retention import dead_attempts
from ckptd.persist.storage.base import Sight, Storage

ATTEMPT, DELETING, FORGOTTEN = "dead attempt", "half deleted", "of a forgotten job"  # nobody can need it
HIDDEN, MAY_GO = "hidden by retention", "retention may delete"  # a pass of retention looks again before it decides


@dataclass(frozen=True)
class Leftover:
    """goes: without a look at any policy."""

    job: str
    path: str
    kind: str
    nbytes: int

    @property
    def goes(self) -> bool:
        return self.kind in (ATTEMPT, DELETING, FORGOTTEN)


def leftovers(storage: Storage, job: str, policy: Policy, now_s: float, attempt_stale_s: float) -> Iterator[Leftover]:
    """now_s: the storage's clock. Raises StorageError, FileDamage."""

    def left(path: str, kind: str) -> Leftover:
        return Leftover(job, storage.locate(path), kind, sum(entry.size for entry in storage.list(path)))

    dead = set(dead_attempts(storage, job, now_s - attempt_stale_s))
    forgotten = forgotten_epoch(storage, job)
    for epoch in list_epochs(storage, job):
        directory = epoch_dir(job, epoch)
        for entry in storage.list(directory):
            path = f"{directory}/{entry.name}"
            if is_aside(entry.name) and not is_attempt(entry.name):
                yield left(path, DELETING)
            elif epoch < forgotten:
                yield left(path, FORGOTTEN)
            elif path in dead:
                yield left(path, ATTEMPT)
    fresh = leased(storage, job, now_s, drop=False)
    may_go = Standing(newest_record(storage, job), list_all(storage, job), fresh).may_go(policy)
    for snapshot, found in list_pointers(storage, job):
        path = step_dir(job, snapshot)
        if snapshot.epoch < forgotten:
            continue
        if found.sight is Sight.DROPPED:
            yield left(path, DELETING)
        elif found.sight is Sight.HIDDEN:
            yield left(path, HIDDEN)
        elif snapshot in may_go:
            yield left(path, MAY_GO)
