"""A reader's claim on a checkpoint, so that retention does not delete it under the reader's hands (D13).

A lease is a small file beside the job's checkpoints; its age on the storage's own clock counts. The reader leaves it
first and looks for the manifest afterwards; retention hides the manifest first and looks for leases afterwards: one of
them always sees the other. Readers without the right to write get a grace time instead (retention.READER_GRACE_S).
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from contextlib import suppress

from ckptd.core.ids import SnapshotId
from ckptd.persist.names import lease_of, lease_prefix, leases_dir
from ckptd.persist.storage.base import Storage, StorageError

LEASE_STALE_S = 900.0  # an older lease belongs to a dead reader
LEASE_REFRESH_S = 120.0
_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


class Lease:
    def __init__(self, storage: Storage, job: str, snapshot: SnapshotId) -> None:
        self._storage = storage
        self._stem = f"{leases_dir(job)}/{lease_prefix(snapshot)}"
        self._lock = threading.Lock()
        self._path = ""
        self._taken_at = 0.0

    @staticmethod
    def take(storage: Storage, job: str, snapshot: SnapshotId) -> Lease:
        """Never fails for want of rights or space. A job that is not there gets no directory."""
        lease = Lease(storage, job, snapshot)
        if not storage.list(job):
            return lease
        try:
            storage.begin(leases_dir(job))
            lease._renew()
        except StorageError as error:
            if error.errno not in _NO_RIGHT:
                raise
        return lease

    def refresh(self) -> None:
        """Called on every read; renews a lease that is getting old. Where that fails the old one counts, and the next read tries
        again: what is to be read may be readable all the same, and says so itself if it is not."""
        if not self._path or time.monotonic() - self._taken_at < LEASE_REFRESH_S:
            return
        with self._lock, suppress(StorageError):
            old = self._path
            if time.monotonic() - self._taken_at >= LEASE_REFRESH_S:
                self._renew()
                self._storage.delete(old)

    def drop(self) -> None:
        """One that cannot be deleted runs out."""
        path, self._path = self._path, ""
        if path:
            with suppress(StorageError):
                self._storage.delete(path)

    def _renew(self) -> None:
        path = f"{self._stem}{secrets.token_hex(8)}"
        self._storage.put_if_absent(path, b"")
        self._path, self._taken_at = path, time.monotonic()


def leased(
    storage: Storage, job: str, now_s: float, stale_s: float = LEASE_STALE_S, *, drop: bool = True
) -> frozenset[SnapshotId]:
    """What is being read, or about to be. now_s: the storage's clock. Drops the stale leases, unless it is only to look."""
    fresh: set[SnapshotId] = set()
    for entry in storage.list(leases_dir(job)):
        snapshot = lease_of(entry.name)
        if now_s - entry.mtime_s >= stale_s:
            if drop:
                storage.delete(f"{leases_dir(job)}/{entry.name}")
        elif snapshot is not None:
            fresh.add(snapshot)
    return frozenset(fresh)
