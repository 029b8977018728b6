"""The contract with durable storage: a file system can keep it, and so can an object store with conditional PUT (design D22).

Paths are relative, ``/``-separated, of validated components; ``""`` is the root. Files of one try to write a checkpoint lie below
its *attempt*, a path of its own. A commit makes the attempt's files readable below the *pointer*, the checkpoint's path: a
directory that got another name, or a small object that names the attempt. All methods block and may be called from any thread;
what they did survives a power cut when they return. A backend is one file beside this one and one class in
tests/node/test_persist_storage.py, which runs the conformance suite (tests/node/storage_conformance.py).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ckptd.core.errors import CkptdError

NAME_CHARS_MAX = 200  # of one path component
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]*")

AWAY = errno.ENODEV  # the root is not there, or is another one
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # numbers of errors that more room would mend
_FEWER = "keep fewer checkpoints if keep_last is above 1"
_HINTS = {
    errno.ENOSPC: f"free space on the storage, or {_FEWER}",
    errno.EDQUOT: f"raise the quota, or {_FEWER}",
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


def is_name(name: str) -> bool:
    """May it be a component of a path?"""
    return len(name) <= NAME_CHARS_MAX and _NAME.fullmatch(name) is not None


def split_path(path: str) -> list[str]:
    """The components of a relative path. Raises StorageError on anything that could leave the root."""
    if path == "":
        return []
    names = path.split("/")
    for name in names:
        if not is_name(name):
            raise StorageError(
                f"unsafe name {name!r}", where=path, hint="job, node and attempt names are [A-Za-z0-9._-]"
            )
    return names


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands below a path; a directory (``is_dir``) is a common beginning of paths. ``mtime_s`` is the storage's own
    clock; compare it with other entries' only."""

    name: str
    is_dir: bool
    size: int
    mtime_s: float


class Sight(Enum):
    """What readers see of a commit."""

    SHOWN = "shown"
    HIDDEN = "hidden"  # no reader opens it any more; it may be revealed, or dropped
    DROPPED = "dropped"  # it cannot come back; what is left of it shall be deleted


@dataclass(frozen=True, slots=True)
class Pointer:
    """A commit. marks: small files put beside its own, such as ``keep``. hidden_s: when it was hidden, on the storage's clock, or
    when something was put beside it since; None: it is shown."""

    name: str
    sight: Sight
    marks: frozenset[str] = frozenset()
    hidden_s: float | None = None


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
        """Make it durable under its name and close it; the size in bytes. Raises SyncFailed: it must not be used (P11)."""

    def abort(self) -> None:
        """Close without any promise; the caller deletes the name."""


class FileReader(Protocol):
    """``at_once``: so many bytes are best asked for in one call, where so many are wanted."""

    at_once: int

    @property
    def size(self) -> int:
        """Bytes at the time of opening."""

    def read_into(self, at: int, dest: memoryview) -> None:
        """Fill ``dest`` from byte ``at``. Raises StorageError when the file ends before."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Every method raises StorageError; NotFound when what it names is not there. ``identity``: what tells it from another one in
    its place, once it was reached; "": nothing does. ``needs``: what must hold where it lies, for whoever has to choose."""

    identity: str
    needs: str

    def locate(self, path: str) -> str:
        """``path`` as the operator knows it, for messages."""

    def free_bytes(self) -> int:
        """Bytes this user may still write."""

    def clock_s(self, path: str) -> float:
        """The time that what is put below ``path``, where something is, would get now. Takes no room."""

    # --- small files and what is there --------------------------------------------------------------------------
    def begin(self, path: str) -> None:
        """Files may be put below ``path`` from now on. An attempt is begun by each of its writers."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """A small file that appears whole, for one of those who ask at the same time: a claim, a lease. False: the name was
        taken."""

    def list(self, path: str) -> list[Entry]:
        """By name; [] when nothing is there. A committed attempt is listed as its pointer only; what others put there under a name
        that no path of ours can have is not."""

    def open(self, path: str) -> FileReader:
        """A file for reading ranges: below a pointer, or below an attempt (then only one whose writer has finished it)."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def discard(self, path: str) -> None:
        """Remove all below ``path``, an attempt for example. A committed attempt is left alone, a missing one is fine."""

    def secure(self, *paths: str) -> None:
        """What stands below these paths survives a power cut from now on: whoever made it may have died before it did."""

    def sweep(self, path: str, before_s: float) -> None:
        """Delete what the storage's own methods left directly below ``path`` when they died before ``before_s``."""

    # --- a checkpoint -------------------------------------------------------------------------------------------
    def put(self, path: str) -> FileWriter:
        """A new file of an attempt, not visible to readers before its commit. StorageError (EEXIST): the name is taken."""

    def commit_if_absent(
        self, attempt: str, pointer: str, names: Collection[str], beside: Mapping[str, bytes]
    ) -> bool:
        """The attempt's files of these names appear below ``pointer`` in one step, with small files ``beside`` them (MANIFEST among
        them); others of the attempt are deleted. False: another commit, or a hidden one, stands there. NotFound: the attempt, or
        one of the files, is not there; another committer of the same attempt may have been faster."""

    def place(self, pointer: str) -> str:
        """The path below which more may be put that belongs to a commit, and goes with it. NotFound: it is gone."""

    def pointers(self, path: str) -> Sequence[Pointer]:
        """The commits directly below ``path``, by name."""

    def mark(self, pointer: str, name: str, data: bytes) -> None:
        """Put a small file beside the commit's own, if it has none of that name. NotFound: it is gone."""

    def unmark(self, pointer: str, name: str) -> bool:
        """Remove one that ``mark`` or the commit put there, for ever. False: it had none of that name. NotFound: it is gone."""

    def hide(self, pointer: str) -> bool:
        """No reader opens it any more; those who have it open read on. False: it is not shown. Takes no room."""

    def reveal(self, pointer: str) -> bool:
        """The opposite. False: it is not hidden."""

    def drop(self, pointer: str) -> bool:
        """Delete a hidden commit, for ever. Of ``drop`` and ``reveal`` one wins. False: it is not hidden. After a death in its
        middle it is repeated."""


def read_file(storage: Storage, path: str, bytes_max: int) -> bytes:
    """The whole of a small file. Raises StorageError when it is longer than ``bytes_max``."""
    reader = storage.open(path)
    try:
        if reader.size > bytes_max:
            raise StorageError(
                f"{reader.size} bytes where at most {bytes_max} make sense", where=storage.locate(path)
            )
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return bytes(data)
    finally:
        reader.close()
