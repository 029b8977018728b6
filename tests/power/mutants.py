"""Deliberate mistakes on the way to durable storage. The power cuts must find each: a harness that never fails proves nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptd.core import retention as core_retention
from ckptd.daemon import state
from ckptd.persist import commit, commits, lineage, retention
from ckptd.persist.names import DATA, MANIFEST, PART
from ckptd.persist.storage import posix, posix_file
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
    PosixStorage.secure = _nothing  # type: ignore[method-assign]


@mutant
def acknowledge_before_the_commit() -> None:
    """The rename happens after the caller was told, as by a background thread."""
    real, above, mark = PosixStorage.move_dir, PosixStorage.secure, PosixStorage.mark
    late: list[tuple[PosixStorage, str, str]] = []

    def move_dir(self: PosixStorage, source: str, target: str) -> bool:
        for one in late:
            real(*one)
            above(self, os.path.dirname(target))
        late[:] = [(self, source, target)]
        return True

    def mark_later(self: PosixStorage, *rest: Any) -> None:
        with suppress(NotFound):  # the mark of one that is not there yet
            mark(self, *rest)

    PosixStorage.move_dir = move_dir  # type: ignore[method-assign]
    PosixStorage.discard = _nothing  # type: ignore[method-assign]
    PosixStorage.delete_tree = _nothing  # type: ignore[method-assign]
    PosixStorage.mark = mark_later  # type: ignore[method-assign]
    PosixStorage.secure = _nothing  # type: ignore[method-assign]


@mutant
def rename_before_the_manifest() -> None:
    """The directory gets its name first, the manifest is put into it afterwards."""
    put, real = PosixStorage._put_small, PosixStorage.commit_if_absent

    def put_small(self: PosixStorage, path: str, data: bytes) -> bool:
        return path.endswith(f"{PART}/{MANIFEST}") or put(self, path, data)

    def late(self: PosixStorage, attempt: str, pointer: str, names: Any, beside: Any) -> bool:
        done = False
        with suppress(StorageError):  # beside another attempt
            done = real(self, attempt, pointer, names, beside)
        put(self, f"{pointer}/{MANIFEST}", beside[MANIFEST])
        return done

    PosixStorage._put_small = put_small  # type: ignore[method-assign]
    PosixStorage.commit_if_absent = late  # type: ignore[method-assign]


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
    real = PosixStorage.commit_if_absent

    def late(self: PosixStorage, attempt: str, pointer: str, *rest: Any) -> bool:
        above = os.path.dirname(pointer)
        for found in self.pointers(above):
            self.hide(f"{above}/{found.name}")
        return real(self, attempt, pointer, *rest)

    PosixStorage.commit_if_absent = late  # type: ignore[method-assign]


def _other_keep(other: Callable[..., Any]) -> None:
    """``other`` gets the real one first."""
    wrong = partial(other, core_retention.keep)
    core_retention.keep = retention.keep = commits.keep = wrong  # type: ignore[assignment]


@mutant
def keep_one_fewer() -> None:
    """As if one that is still being written counted among the last."""
    _other_keep(lambda real, found, policy, record: real(found, replace(policy, keep_last=1), record))


@mutant
def retention_ignores_marks() -> None:
    _other_keep(lambda real, found, *rest: real([replace(info, keep=False) for info in found], *rest))


@mutant
def no_sync_of_a_claim() -> None:
    """Told before its directory entry is durable."""
    real = lineage.claim_epoch

    def put_if_absent(storage: PosixStorage, path: str, data: bytes) -> bool:
        place = Path(storage.locate(path))
        if place.exists():
            return False
        place.write_bytes(data)
        return True

    def claim(storage: PosixStorage, *rest: Any) -> Any:
        storage.sync_dir = _nothing  # type: ignore[method-assign]
        storage.put_if_absent = partial(put_if_absent, storage)  # type: ignore[method-assign]
        try:
            return real(storage, *rest)
        finally:
            del storage.sync_dir, storage.put_if_absent

    from tests.power import life

    lineage.claim_epoch = life.claim_epoch = claim


@mutant
def a_claim_replaces_another() -> None:
    """The later claim of a number gets it."""
    real = PosixStorage.put_if_absent

    def put_if_absent(self: PosixStorage, path: str, data: bytes) -> bool:
        if os.path.basename(os.path.dirname(path)) != "epochs":
            return real(self, path, data)
        fresh = Path(self.locate(f"{path}.{secrets.token_hex(4)}{PART}"))
        fresh.write_bytes(data)
        os.replace(fresh, self.locate(path))
        return True

    PosixStorage.put_if_absent = put_if_absent  # type: ignore[method-assign]
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
