"""The narrow contract with durable storage: what a POSIX directory can do and an object store can imitate (design D13).

Paths are relative, ``/``-separated, of validated components; ``""`` is the root. One conformance suite
(tests/node/storage_conformance.py) holds for every implementation. All methods block and may be called from any thread.
"""

from __future__ import annotations

import errno
import re
import secrets
from dataclasses import dataclass
from typing import Protocol

from ckptd.core.errors import CkptdError

NAME_CHARS_MAX = 200  # of one path component
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]*")

_HINTS = {
    errno.ENOSPC: "free space on the storage, or lower keep_last",
    errno.EDQUOT: "raise the quota, or lower keep_last",
    errno.EACCES: "the daemon's user needs read and write rights there",
    errno.EPERM: "the daemon's user needs read and write rights there",
    errno.EROFS: "the file system is mounted read-only; look for disk errors in the kernel log",
    errno.EIO: "the device failed; look for disk errors in the kernel log",
    errno.ELOOP: "a symbolic link stands where ckptd expects its own file or directory",
    errno.ENOTDIR: "a symbolic link or file stands where ckptd expects its own directory",
    errno.ESTALE: "the network file system was exported anew; mount it again",
}


class StorageError(CkptdError):
    """The storage refused or failed. ``errno`` is the system's number, 0 when there is none."""

    def __init__(self, what: str, *, where: str = "", hint: str = "", errno: int = 0) -> None:
        super().__init__(what, where=where, hint=hint)
        self.errno = errno


class NotFound(StorageError):
    """No such file or directory below the (present) root."""


class SyncFailed(StorageError):
    """fsync failed: whatever the file holds may be lost, a second fsync would lie (P11)."""


def storage_error(error: OSError, what: str, where: str) -> StorageError:
    """The one place where an OSError becomes ours."""
    number = error.errno or 0
    kind = NotFound if number == errno.ENOENT else StorageError
    reason = error.strerror or str(error)
    return kind(f"{what}: {reason}", where=where, hint=_HINTS.get(number, ""), errno=number)


def split_path(path: str) -> list[str]:
    """The components of a relative path. Raises StorageError on anything that could leave the root."""
    if path == "":
        return []
    names = path.split("/")
    for name in names:
        if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
            raise StorageError(
                f"unsafe name {name!r}", where=path, hint="job, node and attempt names are [A-Za-z0-9._-]"
            )
    return names


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory entry. ``mtime_s`` is the storage's own clock; compare it with other entries' only."""

    name: str
    is_dir: bool
    size: int
    mtime_s: float


class FileWriter(Protocol):
    """One file, written once from its first byte to its last."""

    @property
    def position(self) -> int:
        """Bytes written so far."""

    def space(self) -> memoryview:
        """Room (>= 1 byte) for the next bytes, to be filled in place and then passed to ``advance``."""

    def advance(self, nbytes: int) -> None:
        """The first ``nbytes`` of ``space()`` are the file's next bytes."""

    def write(self, data: bytes | memoryview) -> None:
        """Append a copy of ``data``."""

    def finish(self) -> int:
        """Make it durable and close it; the size in bytes. Raises SyncFailed: the file must not be used (P11)."""

    def abort(self) -> None:
        """Close without any promise; the caller deletes the name."""


class FileReader(Protocol):
    @property
    def size(self) -> int:
        """Bytes at the time of opening."""

    def read_into(self, at: int, dest: memoryview) -> None:
        """Fill ``dest`` from byte ``at``. Raises StorageError when the file ends before."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Every method raises StorageError; NotFound when what it names is not there."""

    def locate(self, path: str) -> str:
        """``path`` as the operator knows it, for messages."""

    def make_dir(self, path: str) -> None:
        """Create it and its parents, each durable in its own parent. Existing ones are fine."""

    def create(self, path: str) -> FileWriter:
        """A new file in an existing directory. StorageError (EEXIST) when the name is taken."""

    def publish(self, source: str, target: str) -> bool:
        """Give a finished file its final name, exclusively, and drop the old name. False: the name was taken."""

    def move_file(self, source: str, target: str) -> None:
        """Rename a file in one step; what had that name is gone. Nothing happens when both names are one file's."""

    def move_dir(self, source: str, target: str) -> bool:
        """Rename a directory in one step. False: a directory that is not empty has that name already."""

    def sync_dir(self, path: str) -> None:
        """Make the directory's entries durable. Raises SyncFailed."""

    def open(self, path: str) -> FileReader: ...

    def list(self, path: str) -> list[Entry]:
        """Entries by name."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def delete_tree(self, path: str) -> None:
        """Remove a directory and all below it; a missing one is fine."""

    def free_bytes(self) -> int:
        """Bytes this user may still write."""


def read_file(storage: Storage, path: str, bytes_max: int) -> bytearray:
    """The whole of a small file. Raises StorageError when it is longer than ``bytes_max``."""
    reader = storage.open(path)
    try:
        if reader.size > bytes_max:
            raise StorageError(
                f"{reader.size} bytes where at most {bytes_max} make sense", where=storage.locate(path)
            )
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return data
    finally:
        reader.close()


def write_file(storage: Storage, path: str, data: bytes) -> None:
    """A small file under this name, durable but for its directory entry. Nothing stays behind on failure."""
    writer = storage.create(path)
    try:
        writer.write(data)
        writer.finish()
    except BaseException:
        writer.abort()
        storage.delete(path)
        raise


def put_file(storage: Storage, path: str, data: bytes) -> bool:
    """A small durable file that appears whole under its name. False: the name was taken, nothing changed."""
    part = f"{path}.{secrets.token_hex(8)}.part"
    write_file(storage, part, data)
    if storage.publish(part, path):
        return True
    storage.delete(part)
    return False


def sync_above(storage: Storage, path: str) -> None:
    """The directory ``path`` and all above it, whoever made them: what lies there is durable only if its way is (P4)."""
    while path:
        storage.sync_dir(path)
        path = path.rpartition("/")[0]
    storage.sync_dir("")


def list_or_empty(storage: Storage, path: str) -> list[Entry]:
    try:
        return storage.list(path)
    except NotFound:
        return []
