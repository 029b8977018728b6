"""Undoing a ``keep``: a checkpoint loses its mark. Where it is not on storage yet a note is left, for the first retention that
meets both.

The note is there before the second look for the checkpoint, and retention looks for notes after each commit: one of them sees the
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.persist.commits import list_all, list_pointers
from ckptd.persist.lineage import newest_record
from ckptd.persist.names import KEEP, released_dir, released_of, released_path, step_dir
from ckptd.persist.storage.base import NotFound, Storage
from ckptd.wire.rank import NO_SUCH_STEP, NOT_KEPT, RELEASED

NOTE_STALE_S = 86_400.0  # what is not on storage a day later will not be any more; where it is all the same, it is kept


def release(storage: Storage, job: str, step: int, record: EpochRecord | None, coming: Mapping[SnapshotId, bool]) -> str:
    """RELEASED; NOT_KEPT: there was nothing to undo; NO_SUCH_STEP: none that the job may still be restored from. Raises
    StorageError; CkptdError: ``record``, the epoch of whoever asks, is not the job's newest.

    coming: what memory holds of this step, with no grant, and whether it is to be kept.
    """
    line = _newest(storage, job, record)
    standing = _standing(storage, job, step, line)
    missing = {s: keep for s, keep in coming.items() if s not in standing and (line is None or line.is_candidate(s))}
    noted = False
    if missing:
        storage.begin(released_dir(job))
        for snapshot, keep in missing.items():
            noted |= storage.put_if_absent(released_path(job, snapshot), b"") and keep
        standing = _standing(storage, job, step, line)
    if not standing and not missing:
        return NO_SUCH_STEP
    had = [_unmark(storage, job, snapshot) for snapshot in standing]
    return RELEASED if noted or any(had) else NOT_KEPT


def apply_notes(storage: Storage, job: str, now_s: float) -> None:
    """To the checkpoints that are there by now. now_s: the storage's clock. Raises StorageError."""
    notes = storage.list(released_dir(job))
    there = {snapshot for snapshot, _ in list_pointers(storage, job)} if notes else set[SnapshotId]()
    for entry in notes:
        snapshot = released_of(entry.name)
        if snapshot in there:
            _unmark(storage, job, snapshot)
        elif snapshot is None or now_s - entry.mtime_s < NOTE_STALE_S:
            continue
        storage.delete(f"{released_dir(job)}/{entry.name}")


def _newest(storage: Storage, job: str, ours: EpochRecord | None) -> EpochRecord | None:
    """Storage may not have been told of ours yet."""
    claimed = newest_record(storage, job)
    if ours is None or claimed is None or claimed.number < ours.number:
        return ours or claimed
    if (claimed.number, claimed.nonce) != (ours.number, ours.nonce):
        hint = "ask a daemon on which the job runs now"
        raise CkptdError(f"epoch {claimed.number} of this job was opened elsewhere", where=job, hint=hint)
    return claimed


def _standing(storage: Storage, job: str, step: int, line: EpochRecord | None) -> list[SnapshotId]:
    """Also what retention has hidden: it may have to reveal it."""
    found = [info.snapshot for info in list_all(storage, job) if info.snapshot.step == step]
    return [snapshot for snapshot in found if line is None or line.is_candidate(snapshot)]


def _unmark(storage: Storage, job: str, snapshot: SnapshotId) -> bool:
    with suppress(NotFound):  # retention was faster
        return storage.unmark(step_dir(job, snapshot), KEEP)
    return False
