"""Deliberate mistakes on the way to durable storage. The power cuts must find each: a harness that never fails proves nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptd.core.ids import SnapshotId
from ckptd.daemon import state
from ckptd.persist import commit, lineage, retention
from ckptd.persist.names import DATA, MANIFEST, PART, step_dir
from ckptd.persist.storage import base, posix, posix_file
from ckptd.persist.storage.base import NotFound, StorageError
from ckptd.persist.storage.posix import PosixStorage

MUTANTS: dict[str, Callable[[], None]] = {}
# Where the mistake is small against all there is, half of the cuts are aimed at points with this in their name.
NEAR: dict[str, str] = {}


def mutant(apply: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[apply.__name__] = apply
    return apply


def _nothing(*_: Any, **__: Any) -> None:
    pass


@mutant
def no_fsync() -> None:
    no_file_fsync()
    no_directory_fsync()


@mutant
def no_file_fsync() -> None:
    posix_file.sync = _nothing


@mutant
def no_data_fsync() -> None:
    """The manifest is durable before what it names."""
    real = posix_file.sync
    posix_file.sync = lambda fd, where: None if where.endswith(DATA + PART) else real(fd, where)


@mutant
def no_directory_fsync() -> None:
    posix.sync_entries = _nothing


@mutant
def no_sync_after_the_rename() -> None:
    commit.sync_above = _nothing


@mutant
def acknowledge_before_the_commit() -> None:
    """The rename happens after the caller was told, as by a background thread."""
    real, above = PosixStorage.move_dir, commit.sync_above
    late: list[tuple[PosixStorage, str, str]] = []

    def move_dir(self: PosixStorage, source: str, target: str) -> bool:
        for one in late:
            real(*one)
            above(self, os.path.dirname(target))
        late[:] = [(self, source, target)]
        return True

    def put_file(storage: Any, path: str, data: bytes) -> bool:
        with suppress(NotFound):  # the mark of one that is not there yet
            return base.put_file(storage, path, data)
        return False

    PosixStorage.move_dir = move_dir  # type: ignore[method-assign]
    PosixStorage.delete_tree = _nothing  # type: ignore[method-assign]
    commit.put_file = put_file
    commit.sync_above = _nothing


@mutant
def rename_before_the_manifest() -> None:
    """The directory gets its name first, the manifest is put into it afterwards."""
    real = commit.put_file
    held: list[bytes] = []

    def put_file(storage: Any, path: str, data: bytes) -> bool:
        if path.endswith(MANIFEST):
            held[:] = [data]
            return True
        return real(storage, path, data)

    publish = commit._publish

    def late(storage: Any, job: str, snapshot: SnapshotId, *rest: Any) -> None:
        with suppress(StorageError):  # beside another attempt
            publish(storage, job, snapshot, *rest)
        real(storage, f"{step_dir(job, snapshot)}/{MANIFEST}", held[0])

    commit.put_file, commit._publish = put_file, late


@mutant
def the_last_attempt_wins() -> None:
    """A late attempt takes the place of the one that was committed."""
    real = PosixStorage.move_dir

    def move_dir(self: PosixStorage, source: str, target: str) -> bool:
        if "." not in os.path.basename(target):
            PosixStorage.delete_tree(self, target)
        return real(self, source, target)

    PosixStorage.move_dir = move_dir  # type: ignore[method-assign]
    commit._committed = lambda *_: False


@mutant
def delete_before_the_new_one_is_there() -> None:
    """Room is made first."""
    real = commit._publish

    def late(storage: Any, job: str, *rest: Any) -> None:
        for info in retention.list_commits(storage, job):
            retention._hide(storage, job, info.snapshot, retention.Retained())
        real(storage, job, *rest)

    commit._publish = late


@mutant
def keep_one_fewer() -> None:
    """As if one that is still being written counted among the last."""
    real = retention.keep

    def keep(commits: Any, policy: Any, record: Any) -> Any:
        return real(commits, replace(policy, keep_last=1), record)

    retention.keep = keep


@mutant
def retention_ignores_marks() -> None:
    real = retention.keep
    retention.keep = lambda commits, *rest: real([replace(info, keep=False) for info in commits], *rest)


@mutant
def no_sync_of_a_claim() -> None:
    """Told before its directory entry is durable."""

    def put_file(storage: PosixStorage, path: str, data: bytes) -> bool:
        return _in_place(Path(storage.locate(path)), data)

    lineage.put_file = put_file
    _unsynced_directories(lineage)


def _in_place(path: Path, data: bytes) -> bool:
    if path.exists():
        return False
    path.write_bytes(data)
    return True


def _unsynced_directories(module: Any) -> None:
    real = module.claim_epoch

    def claim(storage: PosixStorage, *rest: Any) -> Any:
        storage.sync_dir = _nothing  # type: ignore[method-assign]
        try:
            return real(storage, *rest)
        finally:
            del storage.sync_dir

    module.claim_epoch = claim
    from tests.power import life

    life.claim_epoch = claim


@mutant
def a_claim_replaces_another() -> None:
    """The later claim of a number gets it."""

    def put_file(storage: PosixStorage, path: str, data: bytes) -> bool:
        fresh = Path(storage.locate(f"{path}.{secrets.token_hex(4)}{PART}"))
        fresh.write_bytes(data)
        os.replace(fresh, storage.locate(path))
        return True

    lineage.put_file = put_file
    lineage._claimed = lambda *_: False


@mutant
def state_without_fsync() -> None:
    def write(self: state.StateDir, name: str, body: bytes) -> None:
        path = self.path / name
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(body)
        os.replace(temporary, path)

    state.StateDir.write = write  # type: ignore[method-assign]


@mutant
def state_written_in_place() -> None:
    def write(self: state.StateDir, name: str, body: bytes) -> None:
        with open(self.path / name, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())

    state.StateDir.write = write  # type: ignore[method-assign]


@mutant
def state_without_directory_fsync() -> None:
    real = state.StateDir.write

    def write(self: state.StateDir, name: str, body: bytes) -> None:
        fsync = os.fsync
        os.fsync = lambda fd: None if os.path.isdir(f"/proc/self/fd/{fd}") else fsync(fd)
        try:
            real(self, name, body)
        finally:
            os.fsync = fsync

    state.StateDir.write = write  # type: ignore[method-assign]


NEAR |= {
    "no_sync_after_the_rename": "acknowledged committed",
    "rename_before_the_manifest": "manifest",
    "no_sync_of_a_claim": "acknowledged claimed",
    "state_written_in_place": "before fsync state",
    "state_without_directory_fsync": "acknowledged persisted",
}
