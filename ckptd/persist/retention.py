"""Deleting old checkpoints, and what aborted attempts left: only what a newer, read-back checkpoint replaces (P12, D13)."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field, replace

from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import CommitInfo, keep
from ckptd.persist.commits import list_commits
from ckptd.persist.lease import LEASE_STALE_S, leased
from ckptd.persist.lineage import newest_record
from ckptd.persist.manifest import MANIFEST_BYTES_MAX
from ckptd.persist.names import (
    MANIFEST,
    PART,
    VERIFIED,
    check_job,
    epoch_dir,
    epoch_of_dir,
    epochs_dir,
    hidden_dir,
    is_attempt,
    is_hidden,
    lease_prefix,
    step_dir,
    step_of_dir,
)
from ckptd.persist.storage.base import (
    NotFound,
    Storage,
    StorageError,
    list_or_empty,
    put_file,
    read_file,
    sync_above,
)
from ckptd.persist.sums import digest
from ckptd.persist.verify import verify_at

READER_GRACE_S = 60.0  # between hiding and deleting, for readers that could not leave a lease
ATTEMPT_STALE_S = 3600.0  # without a write for so long an attempt is dead (write_timeout_s is minutes)
RETIRED = "retired"
HIDDEN_MANIFEST = "manifest.gone"
CLOCK = "clock"  # a file written to learn the storage's time


@dataclass
class Retained:
    """What one pass did. problems: damage found by reading back; those checkpoints do not count as restorable."""

    kept: list[SnapshotId] = field(default_factory=list)
    hidden: list[SnapshotId] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    verified: list[SnapshotId] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def retain(
    storage: Storage,
    job: str,
    policy: Policy,
    *,
    grace_s: float = READER_GRACE_S,
    stale_s: float = LEASE_STALE_S,
    attempt_stale_s: float = ATTEMPT_STALE_S,
    cancelled: threading.Event | None = None,
) -> Retained:
    """One pass; call it after every commit. Hides what is doomed, and deletes what an earlier pass (or, with a grace of 0,
    this one) hid and nobody reads any more. Reads back what it needs to count on first. Raises StorageError, also when it was
    called off; what it has not looked at by then stays."""
    record = newest_record(storage, check_job(job))
    done = Retained()
    commits = _proven(storage, job, list_commits(storage, job), policy, record, done, cancelled)
    kept, doomed = keep(commits, policy, record)
    done.kept = [info.snapshot for info in kept]
    if list_or_empty(storage, job):
        for info in doomed:
            _stop_if(cancelled, job)
            _hide(storage, job, info.snapshot, done)
        now_s = _storage_clock(storage, job)
        _sweep(storage, job, now_s, grace_s, stale_s, attempt_stale_s, done, cancelled)
    return done


def _proven(
    storage: Storage,
    job: str,
    commits: list[CommitInfo],
    policy: Policy,
    record: EpochRecord | None,
    done: Retained,
    cancelled: threading.Event | None,
) -> list[CommitInfo]:
    """Read back, newest first, as many checkpoints as ``keep`` needs to doom any; none when none could be doomed."""
    hopeful = [replace(info, verified=True) for info in commits]
    if not keep(hopeful, policy, record)[1]:
        return commits
    found = {info.snapshot: info for info in commits}
    good = 0
    for info in sorted(commits, key=lambda info: info.snapshot, reverse=True):
        if record is not None and not record.is_candidate(info.snapshot):
            continue
        if not info.verified and _read_back(storage, job, info.snapshot, done, cancelled):
            found[info.snapshot] = replace(info, verified=True)
        good += found[info.snapshot].verified
        if good >= max(policy.keep_last, 1):
            break
    return list(found.values())


def _read_back(
    storage: Storage, job: str, snapshot: SnapshotId, done: Retained, cancelled: threading.Event | None
) -> bool:
    directory = step_dir(job, snapshot)
    report = verify_at(storage, directory, cancelled=cancelled)
    _stop_if(cancelled, job)
    if not report.ok:
        done.problems += [f"{report.path}: {problem}" for problem in report.problems]
        return False
    failpoint("persist.retain.verified")
    # Its committer may not have come to that yet, or never will: nothing may go for what a power cut would still take back.
    sync_above(storage, epoch_dir(job, snapshot.epoch))
    manifest = read_file(storage, f"{directory}/{MANIFEST}", MANIFEST_BYTES_MAX)
    put_file(storage, f"{directory}/{VERIFIED}", digest(manifest).hex().encode())
    storage.sync_dir(directory)
    done.verified.append(snapshot)
    return True


def _hide(storage: Storage, job: str, snapshot: SnapshotId, done: Retained) -> None:
    """Without its manifest it is no checkpoint to any reader of ours; those who read already go on."""
    directory = step_dir(job, snapshot)
    try:
        storage.delete(f"{directory}/{RETIRED}")  # of a pass that died before it hid the manifest
        put_file(storage, f"{directory}/{RETIRED}", b"")  # its age is the grace time
        if not storage.publish(f"{directory}/{MANIFEST}", f"{directory}/{HIDDEN_MANIFEST}"):
            storage.delete(f"{directory}/{MANIFEST}")  # a pass died between link and unlink
        storage.sync_dir(directory)
    except NotFound:  # somebody else retains this job, too
        return
    failpoint("persist.retain.hidden")
    done.hidden.append(snapshot)


def _sweep(
    storage: Storage,
    job: str,
    now_s: float,
    grace_s: float,
    stale_s: float,
    attempt_stale_s: float,
    done: Retained,
    cancelled: threading.Event | None,
) -> None:
    fresh = leased(storage, job, now_s, stale_s)
    for directory in (job, epochs_dir(job)):
        _drop_litter(storage, directory, now_s - attempt_stale_s)
    for top in list_or_empty(storage, job):
        epoch = epoch_of_dir(top.name) if top.is_dir else None
        if epoch is None:
            continue
        directory = epoch_dir(job, epoch)
        for entry in list_or_empty(storage, directory):
            _stop_if(cancelled, job)
            path = f"{directory}/{entry.name}"
            step = step_of_dir(entry.name)
            if step is not None:
                _drop_litter(storage, path, now_s - attempt_stale_s)
                _delete_retired(storage, job, SnapshotId(epoch, step), now_s - grace_s, fresh, done)
            elif is_hidden(entry.name) or (
                is_attempt(entry.name) and _newest(storage, path, entry.mtime_s) <= now_s - attempt_stale_s
            ):
                storage.delete_tree(path)
                done.deleted.append(storage.locate(path))


def _drop_litter(storage: Storage, directory: str, before_s: float) -> None:
    """Small files that died, with their process or with the power, before they got their name or could be deleted."""
    for entry in list_or_empty(storage, directory):
        ours = entry.name.startswith(f"{CLOCK}-") or entry.name.endswith(PART)
        if ours and not entry.is_dir and entry.mtime_s <= before_s:
            storage.delete(f"{directory}/{entry.name}")


def _delete_retired(
    storage: Storage, job: str, snapshot: SnapshotId, before_s: float, fresh: list[str], done: Retained
) -> None:
    directory = step_dir(job, snapshot)
    entries = {entry.name: entry for entry in list_or_empty(storage, directory)}
    if MANIFEST in entries or HIDDEN_MANIFEST not in entries:
        return
    if RETIRED not in entries:  # lost with the power: the grace time begins anew
        put_file(storage, f"{directory}/{RETIRED}", b"")
        return
    if entries[RETIRED].mtime_s > before_s:
        return
    if any(name.startswith(lease_prefix(snapshot)) for name in fresh):
        return
    hidden = hidden_dir(job, snapshot, secrets.token_hex(4))
    if storage.move_dir(directory, hidden):  # in one step, so that no stock reader meets half of it
        storage.sync_dir(epoch_dir(job, snapshot.epoch))
        failpoint("persist.retain.moved")
        storage.delete_tree(hidden)
        done.deleted.append(storage.locate(directory))


def _stop_if(cancelled: threading.Event | None, job: str) -> None:
    if cancelled is not None and cancelled.is_set():
        raise StorageError("retention was called off", where=job)


def _newest(storage: Storage, path: str, own_s: float) -> float:
    return max((entry.mtime_s for entry in list_or_empty(storage, path)), default=own_s)


def _storage_clock(storage: Storage, job: str) -> float:
    """The time as the storage stamps it: leases and grace times are compared on one clock only."""
    name = f"{CLOCK}-{secrets.token_hex(4)}"
    put_file(storage, f"{job}/{name}", b"")
    try:
        return next(entry.mtime_s for entry in storage.list(job) if entry.name == name)
    finally:
        storage.delete(f"{job}/{name}")
