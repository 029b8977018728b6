"""Which checkpoints of a job are committed: the directories that carry the final name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import CommitInfo, keep
from ckptd.persist.lineage import forgotten_epoch, newest_record
from ckptd.persist.names import (
    DAMAGED,
    KEEP,
    LOSSY,
    VERIFIED,
    WHOLE,
    WITHOUT,
    check_job,
    epoch_dir,
    epoch_of_dir,
    grant_of,
    is_job,
    of_marks,
    step_dir,
    step_of_dir,
)
from ckptd.persist.storage.base import Pointer, Sight, Storage


def list_jobs(storage: Storage) -> list[str]:
    """Those that storage has a place for, by name: at ``{uid}/{name}``. Whatever else is there is not ours."""
    uids = [entry.name for entry in storage.list("") if entry.is_dir and entry.name.isdigit()]
    names = [f"{uid}/{entry.name}" for uid in uids for entry in storage.list(uid) if entry.is_dir]
    return sorted(filter(is_job, names))


def list_stored(storage: Storage, wanted: Callable[[str], bool]) -> tuple[list[Any], list[str]]:
    """The checkpoints of these jobs, as lists show them, the newest of each first; and what could not be read. Without the record
    that says what was left behind they are shown all the same. Raises StorageError."""
    rows: list[Any] = []
    errors: list[str] = []
    for job in filter(wanted, list_jobs(storage)):
        record = None
        try:
            record = newest_record(storage, job)
        except (CkptdError, OSError) as error:
            errors.append(f"{job}: {error}")
        try:
            found = _all(storage, job)
            commits = [info for info, _ in found if not info.hidden]
            needed, lossy = needed_by(commits), {info.snapshot for info, pointer in found if LOSSY in pointer.marks}
            rows += [
                {
                    "job": job, "epoch": info.snapshot.epoch, "step": info.snapshot.step, "durable": True, "keep": info.keep,
                    "abandoned": record is not None and record.abandons(info.snapshot), "where": ["storage"],
                    "without": info.without, "damaged": info.damaged, "of": shown_of(info), "needed_by": needed[info.snapshot],
                    "whole": info.whole, "lossy": info.snapshot in lossy,
                }
                for info in reversed(commits)
            ]  # fmt: skip
        except (CkptdError, OSError) as error:
            errors.append(f"{job}: {error}")
    return rows, errors


def shown_of(info: CommitInfo) -> list[str]:
    """The older checkpoints that hold files of it, in words."""
    own = info.snapshot.epoch
    return [f"step {of.step}" if of.epoch == own else str(of) for of in sorted(info.of)]


def needed_by(commits: Sequence[CommitInfo]) -> Counter[SnapshotId]:
    """How many of them have files in which others."""
    return Counter(of for info in commits for of in info.of)


def list_commits(storage: Storage, job: str) -> list[CommitInfo]:
    """Oldest first. Reads directories only; opening a checkpoint checks it. Raises StorageError."""
    return [info for info in list_all(storage, job) if not info.hidden]


def list_all(storage: Storage, job: str) -> list[CommitInfo]:
    """The hidden ones, too; not what is left of a job that was forgotten."""
    return [info for info, _ in _all(storage, job)]


def _all(storage: Storage, job: str) -> list[tuple[CommitInfo, Pointer]]:
    forgotten = forgotten_epoch(storage, job)
    found = [
        (snapshot, pointer)
        for snapshot, pointer in list_pointers(storage, job)
        if pointer.sight is not Sight.DROPPED and snapshot.epoch > forgotten
    ]
    here = {snapshot for snapshot, _ in found}
    return [(_info(snapshot, pointer, here), pointer) for snapshot, pointer in found]


def _info(snapshot: SnapshotId, pointer: Pointer, here: Collection[SnapshotId]) -> CommitInfo:
    """here: all checkpoints of the job. Without one that holds files of it this one is not whole: somebody deleted that by hand."""
    marks, of, hidden = pointer.marks, of_marks(pointer.marks), pointer.sight is Sight.HIDDEN
    damaged = DAMAGED in marks or not of <= set(here)
    verified = VERIFIED in marks and not damaged
    more = grant_of(marks), damaged, of, WHOLE in marks
    return CommitInfo(snapshot, KEEP in marks, verified, hidden, WITHOUT in marks, *more)


def list_durable(storage: Storage, job: str, policy: Policy) -> list[CommitInfo]:
    """What a restore may count on. A power cut takes none of it back: a committer may have died between making one visible
    and syncing its directory (P4). A retention that died between hiding one and looking who needs it is made up for.
    Raises StorageError."""
    commits = list_all(storage, job)
    if any(info.hidden for info in commits):
        kept, _ = keep(commits, policy, newest_record(storage, job))
        for info in kept:
            if info.hidden:
                storage.reveal(step_dir(job, info.snapshot))
        commits = list_all(storage, job)
    if commits:
        storage.secure(*{epoch_dir(job, info.snapshot.epoch) for info in commits})
    return [info for info in commits if not info.hidden]


def list_pointers(storage: Storage, job: str) -> list[tuple[SnapshotId, Pointer]]:
    """Oldest first."""
    found: list[tuple[SnapshotId, Pointer]] = []
    for epoch in list_epochs(storage, job):
        for pointer in storage.pointers(epoch_dir(job, epoch)):
            step = step_of_dir(pointer.name)
            if step is not None:
                found.append((SnapshotId(epoch, step), pointer))
    return sorted(found, key=lambda item: item[0])


def list_epochs(storage: Storage, job: str) -> list[int]:
    """Those that something was written for."""
    found = [epoch_of_dir(entry.name) for entry in storage.list(check_job(job)) if entry.is_dir]
    return [epoch for epoch in found if epoch is not None]
