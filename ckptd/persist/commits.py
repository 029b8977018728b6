"""Which checkpoints of a job are committed: the directories that carry the final name."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.retention import CommitInfo
from ckptd.persist.names import KEEP, MANIFEST, VERIFIED, check_job, epoch_dir, epoch_of_dir, step_of_dir
from ckptd.persist.storage.base import Storage, list_or_empty, sync_above


def list_commits(storage: Storage, job: str) -> list[CommitInfo]:
    """Oldest first. Reads directories only; opening a checkpoint checks it. Raises StorageError."""
    epochs = [epoch_of_dir(entry.name) for entry in list_or_empty(storage, check_job(job)) if entry.is_dir]
    found = [info for epoch in epochs if epoch is not None for info in _of_epoch(storage, job, epoch)]
    return sorted(found, key=lambda info: info.snapshot)


def list_durable(storage: Storage, job: str) -> list[CommitInfo]:
    """The same, and a power cut takes none of them back: a committer may have died between making one visible and syncing
    its directory (P4). Raises StorageError."""
    commits = list_commits(storage, job)
    for epoch in sorted({info.snapshot.epoch for info in commits}):
        storage.sync_dir(epoch_dir(job, epoch))
    if commits:
        sync_above(storage, job)
    return commits


def _of_epoch(storage: Storage, job: str, epoch: int) -> list[CommitInfo]:
    directory = epoch_dir(job, epoch)
    found: list[CommitInfo] = []
    for entry in list_or_empty(storage, directory):
        step = step_of_dir(entry.name)
        if step is None or not entry.is_dir:
            continue
        names = {inner.name for inner in list_or_empty(storage, f"{directory}/{entry.name}")}
        if MANIFEST in names:
            found.append(CommitInfo(SnapshotId(epoch, step), KEEP in names, VERIFIED in names))
    return found
