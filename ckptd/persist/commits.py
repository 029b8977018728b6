"""Which checkpoints of a job are committed: the directories that carry the final name."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import CommitInfo, keep
from ckptd.persist.lineage import newest_record
from ckptd.persist.names import (
    HIDDEN_MANIFEST,
    KEEP,
    MANIFEST,
    VERIFIED,
    check_job,
    epoch_dir,
    epoch_of_dir,
    step_dir,
    step_of_dir,
)
from ckptd.persist.pointer import reveal
from ckptd.persist.storage.base import Storage, list_or_empty, sync_above


def list_commits(storage: Storage, job: str) -> list[CommitInfo]:
    """Oldest first. Reads directories only; opening a checkpoint checks it. Raises StorageError."""
    return [info for info in list_all(storage, job) if not info.hidden]


def list_all(storage: Storage, job: str) -> list[CommitInfo]:
    """The hidden ones, too."""
    epochs = [epoch_of_dir(entry.name) for entry in list_or_empty(storage, check_job(job)) if entry.is_dir]
    found = [info for epoch in epochs if epoch is not None for info in _of_epoch(storage, job, epoch)]
    return sorted(found, key=lambda info: info.snapshot)


def list_durable(storage: Storage, job: str, policy: Policy) -> list[CommitInfo]:
    """What a restore may count on. A power cut takes none of it back: a committer may have died between making one visible
    and syncing its directory (P4). A retention that died between hiding one and looking who needs it is made up for.
    Raises StorageError."""
    commits = list_all(storage, job)
    if any(info.hidden for info in commits):
        kept, _ = keep(commits, policy, newest_record(storage, job))
        for info in kept:
            if info.hidden:
                reveal(storage, step_dir(job, info.snapshot))
        commits = list_all(storage, job)
    for epoch in sorted({info.snapshot.epoch for info in commits}):
        storage.sync_dir(epoch_dir(job, epoch))
    if commits:
        sync_above(storage, job)
    return [info for info in commits if not info.hidden]


def _of_epoch(storage: Storage, job: str, epoch: int) -> list[CommitInfo]:
    directory = epoch_dir(job, epoch)
    found: list[CommitInfo] = []
    for entry in list_or_empty(storage, directory):
        step = step_of_dir(entry.name)
        if step is None or not entry.is_dir:
            continue
        names = {inner.name for inner in list_or_empty(storage, f"{directory}/{entry.name}")}
        if not names.isdisjoint((MANIFEST, HIDDEN_MANIFEST)):
            hidden = MANIFEST not in names
            found.append(CommitInfo(SnapshotId(epoch, step), KEEP in names, VERIFIED in names, hidden))
    return found
