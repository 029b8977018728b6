"""Deleting old checkpoints, and what aborted attempts left: only what a newer, read-back checkpoint replaces (P12, D13).

A pass may take an hour, since it reads checkpoints back. Before each step that takes something away it looks anew at what
stands on storage: claims, leases, checkpoints. It hides before it looks; a restore leaves its claim, or a lease, before it
opens a checkpoint: one of them sees the other. What was hidden in error is revealed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import Standing, doubted, keep, lasting
from ckptd.persist.commits import list_all, list_epochs, list_pointers
from ckptd.persist.forget import delete_forgotten
from ckptd.persist.keeping import apply_notes
from ckptd.persist.lease import LEASE_STALE_S, leased
from ckptd.persist.lineage import newest_record
from ckptd.persist.manifest_file import MANIFEST_BYTES_MAX
from ckptd.persist.names import (
    DATA,
    ENCODED,
    MANIFEST,
    READ,
    SIDE,
    VERIFIED,
    check_job,
    epoch_dir,
    epochs_dir,
    is_attempt,
    released_dir,
    step_dir,
    writer_of,
)
from ckptd.persist.storage.base import FULL, Sight, Storage, StorageError, read_file
from ckptd.persist.sums import digest
from ckptd.persist.verify import FILES_AT_ONCE, mark_report, verify_at

READER_GRACE_S = 60.0  # between hiding and deleting, for readers that could not leave a lease
ATTEMPT_STALE_S = 3600.0  # without a write for so long an attempt is dead (write_timeout_s is minutes)
CLOCK = "clock"  # of files that earlier versions wrote to learn the storage's time


@dataclass
class Retained:
    """What one pass did. problems: damage found by reading back; those checkpoints do not count as restorable. ended: why it
    stopped before its end. waiting: something is hidden whose grace is not over; a later pass deletes it. unread: as long as
    writers read back what they wrote, a later pass decides. lasting: what stays for good, and has no whole tensors beside it."""

    kept: list[SnapshotId] = field(default_factory=list)
    hidden: list[SnapshotId] = field(default_factory=list)
    revealed: list[SnapshotId] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    verified: list[SnapshotId] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ended: str = ""
    waiting: bool = False
    lasting: list[SnapshotId] = field(default_factory=list)
    unread: bool = False  # by those who wrote it, and they may still be at it


class Superseded(CkptdError):
    """The epoch that this pass decides for is not, or not any more, the newest claimed one."""


def retain(
    storage: Storage,
    job: str,
    policy: Policy,
    *,
    epoch: EpochRecord | None = None,
    grace_s: float = READER_GRACE_S,
    stale_s: float = LEASE_STALE_S,
    attempt_stale_s: float = ATTEMPT_STALE_S,
    writers_s: float = 0.0,
    waits_for: Callable[[str], bool] = lambda writer: True,
    cancelled: threading.Event | None = None,
    at_once: int = FILES_AT_ONCE,
) -> Retained:
    """One pass; call it after every commit. Hides what is doomed, and deletes what an earlier pass (or, with a grace of 0,
    this one) hid and nobody reads any more. Reads back what it needs to count on first. Raises StorageError, also when it was
    called off; what it has not looked at by then stays.

    writers_s: for so long after a commit its writers are left to read back their own files; what they have not read by then is read
    here, and at once what is of writers that are not to be waited for. epoch: on whose behalf; only the newest one that is claimed
    on storage may delete. None: whichever that is now. at_once: so many files are read back side by side; 1: by this thread alone.
    """
    done = Retained()
    if storage.list(check_job(job)):
        done.deleted += delete_forgotten(storage, job)
        now_s = storage.clock_s(job)
        apply_notes(storage, job, now_s)
        epoch = epoch or newest_record(storage, job)
        run = _Pass(storage, job, policy, epoch, now_s, stale_s, done, cancelled or threading.Event())
        run.writers_s, run.waits_for, run.at_once = writers_s, waits_for, at_once
        try:
            run.hide_and_reveal()
            run.drop_hidden((storage.clock_s(job) if done.hidden else now_s) - grace_s)
        except Superseded as error:
            done.ended = str(error)
        run.sweep(now_s - attempt_stale_s)
    return done


class _Pass:
    def __init__(
        self,
        storage: Storage,
        job: str,
        policy: Policy,
        epoch: EpochRecord | None,
        now_s: float,
        stale_s: float,
        done: Retained,
        cancelled: threading.Event,
    ) -> None:
        self._storage, self._job, self._policy, self._epoch = storage, job, policy, epoch
        self._now_s, self._stale_s = now_s, stale_s  # the storage's clock, as the pass began
        self._done, self._cancelled = done, cancelled
        self.writers_s, self.waits_for, self.at_once = 0.0, (lambda writer: True), FILES_AT_ONCE

    def hide_and_reveal(self) -> None:
        standing = self._read_back(self._look())
        may_go = standing.may_go(self._policy)
        self._done.lasting = lasting(standing, self._policy)
        self._done.kept = [info.snapshot for info in standing.commits if info.snapshot not in may_go]
        self._reveal(
            info.snapshot for info in standing.commits if info.hidden and info.snapshot not in may_go
        )
        for info in standing.commits:
            if info.snapshot in may_go and not info.hidden and self._may_go(info.snapshot):
                self._hide(info.snapshot)

    def drop_hidden(self, before_s: float) -> None:
        """Those whose grace is over. What a reader without a lease opened before it was hidden is read by then."""
        for snapshot, found in list_pointers(self._storage, self._job):
            self._stop_if_cancelled()
            pointer = step_dir(self._job, snapshot)
            if found.sight is Sight.HIDDEN:
                if found.hidden_s is not None and found.hidden_s > before_s:
                    self._done.waiting = True
                    continue
                if not self._may_go(snapshot):
                    continue
            if found.sight is not Sight.SHOWN and self._storage.drop(pointer):
                self._done.deleted.append(self._storage.locate(pointer))

    def sweep(self, before_s: float, *, dropped: bool = False) -> None:
        """What died in the middle of something, with its process or with the power. dropped: also what ``drop_hidden`` left."""
        storage, directories = (
            self._storage,
            [epoch_dir(self._job, epoch) for epoch in list_epochs(self._storage, self._job)],
        )
        for entry in storage.list(self._job):
            if entry.name.startswith(f"{CLOCK}-") and not entry.is_dir and entry.mtime_s <= before_s:
                storage.delete(f"{self._job}/{entry.name}")
        for path in dead_attempts(storage, self._job, before_s):
            self._stop_if_cancelled()
            storage.discard(path)
            self._done.deleted.append(storage.locate(path))
        for snapshot, found in list_pointers(storage, self._job) if dropped else ():
            if found.sight is Sight.DROPPED and storage.drop(pointer := step_dir(self._job, snapshot)):
                self._done.deleted.append(storage.locate(pointer))
        pointers = [step_dir(self._job, snapshot) for snapshot, _ in list_pointers(storage, self._job)]
        for path in (self._job, epochs_dir(self._job), released_dir(self._job), *directories, *pointers):
            storage.sweep(path, before_s)

    # --- deciding -----------------------------------------------------------------------------------------------
    def _look(self) -> Standing:
        """Raises Superseded."""
        self._stop_if_cancelled()
        record = newest_record(self._storage, self._job)
        if _name(record) != _name(self._epoch):
            raise Superseded(_ended(self._epoch, record), where=self._job)
        fresh = leased(self._storage, self._job, self._now_s, self._stale_s)
        commits = list_all(self._storage, self._job)
        read_back = self._done.verified  # also where there was no room for the mark
        return Standing(record, [replace(c, verified=c.verified or c.snapshot in read_back) for c in commits], fresh)

    def _may_go(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._look().may_go(self._policy)

    def _hide(self, snapshot: SnapshotId) -> None:
        pointer, stays = step_dir(self._job, snapshot), True
        if not self._storage.hide(pointer):  # somebody else retains this job, too
            return
        try:
            failpoint("persist.retain.hidden")
            stays = not self._may_go(snapshot)
        finally:
            if stays:
                self._reveal((snapshot,))
            else:
                self._done.hidden.append(snapshot)

    def _reveal(self, snapshots: Iterable[SnapshotId]) -> None:
        self._done.revealed += [s for s in snapshots if self._storage.reveal(step_dir(self._job, s))]

    # --- reading back -------------------------------------------------------------------------------------------
    def _read_back(self, standing: Standing) -> Standing:
        """With as many checkpoints read back, newest first, as ``keep`` needs to doom any; none when none could be doomed."""
        hopeful = [replace(info, verified=True) for info in standing.commits]
        if not keep(hopeful, self._policy, standing.record)[1]:
            return standing
        found = {info.snapshot: info for info in standing.commits}
        good = 0
        for info in reversed(standing.commits):
            if info.hidden or (
                standing.record is not None and not standing.record.is_candidate(info.snapshot)
            ):
                continue
            trusted = {of for of in info.of if of in found and found[of].verified} - doubted(standing.commits)
            if not (info.verified or info.damaged) and self._verify(info.snapshot, trusted):
                found[info.snapshot] = replace(info, verified=True)
            good += found[info.snapshot].verified
            if good >= max(self._policy.keep_last, 1):
                break
        return replace(standing, commits=list(found.values()))

    def _verify(self, snapshot: SnapshotId, trusted: set[SnapshotId]) -> bool:
        storage, directory = self._storage, step_dir(self._job, snapshot)
        there = {entry.name: entry.mtime_s for entry in storage.list(directory)}
        known = {name.removeprefix(READ) for name in there if name.startswith(READ)}
        left = {writer_of(name) for name in there if name.endswith((DATA, ENCODED, SIDE))} - known
        if any(map(self.waits_for, left)) and self._now_s - there.get(MANIFEST, self._now_s) < self.writers_s:
            self._done.unread = True
            return False
        report = verify_at(storage, directory, cancelled=self._cancelled, known=known, at_once=self.at_once, trusted=trusted)
        self._stop_if_cancelled()
        if not report.ok:
            self._done.problems += [f"{report.path}: {problem}" for problem in report.problems]
            mark_report(storage, directory, report)
            return False
        # Its committer may not have come to that yet, or never will: nothing may go for what a power cut would still take back.
        storage.secure(epoch_dir(self._job, snapshot.epoch))
        manifest = read_file(storage, f"{directory}/{MANIFEST}", MANIFEST_BYTES_MAX)
        try:
            storage.mark(directory, VERIFIED, digest(manifest).hex().encode())
        except StorageError as error:
            if error.errno not in FULL:  # there will be when this pass is over; without the mark the next one reads it again
                raise
        failpoint("persist.retain.verified")
        self._done.verified.append(snapshot)
        return True

    def _stop_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise StorageError("retention was called off", where=self._job)


def _name(record: EpochRecord | None) -> tuple[int, str]:
    return (record.number, record.nonce) if record is not None else (0, "")


def _ended(ours: EpochRecord | None, newest: EpochRecord | None) -> str:
    number, other = _name(ours)[0], _name(newest)[0]
    why = f"epoch {other} was claimed" if other > number else "storage has no claim of this start"
    return f"retention of epoch {number} ends: {why}"


def dead_attempts(storage: Storage, job: str, before_s: float) -> Iterator[str]:
    """Paths of those that nobody wrote to since then. before_s: on the storage's clock."""
    for directory in [epoch_dir(job, epoch) for epoch in list_epochs(storage, job)]:
        for entry in storage.list(directory):
            path = f"{directory}/{entry.name}"
            if is_attempt(entry.name) and _newest(storage, path, entry.mtime_s) <= before_s:
                yield path


def sweep(storage: Storage, job: str, before_s: float) -> list[str]:
    """Delete what died in the middle of something, with its process or with the power, and what is left of a job that was
    forgotten: nobody can need it, whatever the policy. The places. before_s: an attempt that was not written to since then is
    dead. Raises StorageError."""
    done = Retained(deleted=delete_forgotten(storage, job))
    _Pass(storage, job, Policy(), None, before_s, 0.0, done, threading.Event()).sweep(before_s, dropped=True)
    return done.deleted


def _newest(storage: Storage, path: str, own_s: float) -> float:
    return max((entry.mtime_s for entry in storage.list(path)), default=own_s)
