"""Where an export is written until it is whole: beside its destination, under a name of its own. What a killed one left there is
looked at byte by byte, and what is right is not written again."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from ckptd.choices import Share
from ckptd.core.errors import CkptdError
from ckptd.directory import sync_path
from ckptd.export.journal import Journal
from ckptd.persist.names import MANIFEST, epoch_of_dir
from ckptd.persist.storage.base import FULL
from ckptd.units import format_bytes

SUFFIX = ".exporting"
READ_BYTES = 8 << 20  # at a time, of what is looked at again
Pieces = Callable[[], Iterator[memoryview]]
Progress = Callable[[int], None]  # so many bytes more are there


class Staging:
    """``content``: the file or directory that is to become ``dest``. ``plan``: names all that decides what is written; what was
    written by another plan is thrown away. As a context manager it puts a full disk into words, and lets go of its lock."""

    def __init__(
        self, dest: Path, plan: str, nbytes: int, progress: Progress, *, goes_on: bool = True, share: Share | None = None
    ) -> None:
        """goes_on: the same command finds what this one left. share: this process writes a part of it, others beside it the rest,
        and whoever comes after them without a share finishes it. Raises CkptdError as ``check`` does, and where somebody else
        writes it."""
        check(dest)
        self._goes_on, self.share, self._at = goes_on, share, 0
        self.dest, self._nbytes, self._progress = dest, nbytes, progress
        self._folder = dest.with_name(dest.name + SUFFIX)
        self.content = self._folder / "content"
        self.written = self.reused = 0
        self._frames: dict[Path, Path] = {}
        self._places: dict[Path, list[tuple[int, int]]] = {}
        with self:
            self._folder.mkdir(exist_ok=True)
            self._journal = Journal(self._folder, plan, share, self._forget)
            self._done = self._journal.rows

    def _forget(self) -> None:
        shutil.rmtree(self.content, ignore_errors=True)
        self.content.unlink(missing_ok=True) if self.content.is_file() else None

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return
        if hasattr(self, "_journal") and not self._journal.closed:  # it has the lock
            if not self._goes_on:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._journal.close()
        cause = _os_error(error)
        if cause is not None:
            raise self._in_words(cause) from error

    def _in_words(self, error: OSError) -> CkptdError:
        where = str(error.filename or self.dest)
        if error.errno in (*FULL, errno.EFBIG):
            hint = f"{format_bytes(self._nbytes)} are needed in all"
            hint += "; the same command goes on from what is written" if self._goes_on else ""
            return CkptdError(f"the disk is full: {os.strerror(error.errno or 0)}", where=where, hint=hint)
        return CkptdError(f"cannot be written: {error.strerror or error}", where=where, hint="is there a right to write there?")

    # --- parts --------------------------------------------------------------------------------------------------
    def file(self, name: str, make: Callable[[Path], None]) -> Path:
        """A file below ``content`` ("": itself) in which only the places of tensors are left to be written. What an earlier try has
        left of it is used again, the places alone: all around them is as it is made now."""
        path = self.content / name if name else self.content
        part = f"made {name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = self._frames[path] = self._aside(path.name)
        make(frame)
        if path.is_file() and path.stat().st_size == frame.stat().st_size and (part in self._done or self.share is not None):
            return path
        self._journal.note({"part": part})  # before it is there: what is there and not noted would be made anew, and what is in it
        whole = self._aside(path.name)  # a copy would fill the places, too
        make(whole)
        if self.share is None:
            for key in [key for key in self._done if key.startswith(f"{name}@")]:
                del self._done[key]
            os.replace(whole, path)
        else:
            with suppress(FileExistsError):  # others make the same, and the first one's counts
                os.link(whole, path)
        shutil.rmtree(whole.parent)
        return path

    def _aside(self, name: str) -> Path:
        folder = self._folder / f"making-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder / name

    def frame(self, path: Path) -> Path:
        """What ``file`` has made there, without what lies in its places."""
        return self._frames[path]

    def _mend(self, path: Path, frame: Path) -> None:
        """Nobody knows the sum of what lies around the places, so it is written anew."""
        at, size = 0, frame.stat().st_size
        with open(frame, "rb", buffering=0) as made, open(path, "r+b", buffering=0) as file:
            for start, nbytes in [*sorted(self._places.get(path, ())), (size, 0)]:
                while at < start:
                    data = os.pread(made.fileno(), min(READ_BYTES, start - at), at)
                    if os.pread(file.fileno(), len(data), at) != data:
                        _write(file.fileno(), memoryview(data), at)
                    at += len(data)
                at = max(at, start + nbytes)

    def _is_mine(self, nbytes: int) -> bool:
        at, self._at = self._at, self._at + nbytes
        return self.share is None or self.share.has(at, nbytes, self._nbytes)

    def region(self, path: Path, name: str, at: int, nbytes: int, pieces: Pieces) -> None:
        """Of such a file, unless it holds it already. Zeros are left out: the place holds them."""
        self._places.setdefault(path, []).append((at, nbytes))
        if not self._is_mine(nbytes):
            return
        part = f"{name}@{at}"
        known = self._done.get(part)
        with open(path, "r+b", buffering=0) as file:
            if known is not None and _sum(file.fileno(), at, nbytes) == known["sum"]:
                self.reused += nbytes
                self._progress(nbytes)
                return
            total, place = xxhash.xxh3_128(), at
            for piece in pieces():
                total.update(piece)
                if known is not None or _any(piece):
                    _write(file.fileno(), piece, place)
                place += len(piece)
                self._progress(len(piece))
            assert place == at + nbytes, f"{place - at} bytes of {nbytes}"
        self.written += nbytes
        self._journal.note({"part": part, "sum": total.hexdigest()})

    def whole(self, name: str, nbytes: int, make: Callable[[Path], Any]) -> Any:
        """A file that somebody else's code writes, and what that said of it (JSON); None: it is for another share."""
        if not self._is_mine(nbytes):
            return None
        path = self.content / name
        known = self._done.get(name)
        if known is not None and path.is_file() and path.stat().st_size == known["size"]:
            with open(path, "rb", buffering=0) as file:
                if _sum(file.fileno(), 0, known["size"]) == known["sum"]:
                    self.reused += nbytes
                    self._progress(nbytes)
                    return known["said"]
        path.parent.mkdir(parents=True, exist_ok=True)
        said = make(path)
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            self._journal.note({"part": name, "size": size, "sum": _sum(file.fileno(), 0, size), "said": said})
        self.written += nbytes
        self._progress(nbytes)
        return said

    # --- the end ------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Synced first; then the destination is there, whole, unless it is shared."""
        for path, frame in self._frames.items() if self.share is None else ():
            self._mend(path, frame)
        for folder, _, names in os.walk(self.content):
            for name in names:
                _sync(Path(folder) / name)
            sync_path(Path(folder))
        if self.content.is_file():
            _sync(self.content)
        sync_path(self._folder)
        if self.share is not None:
            for frame in self._frames.values():
                shutil.rmtree(frame.parent)
            self._journal.close()
            return
        if os.path.lexists(self.dest):
            raise CkptdError("the destination exists by now", where=str(self.dest), hint="remove it, and run the same command")
        os.rename(self.content, self.dest)
        self._journal.close()
        shutil.rmtree(self._folder)
        sync_path(self.dest.parent)


def check(dest: Path) -> None:
    """Raises CkptdError: it exists, or has no place."""
    if os.path.lexists(dest):
        raise CkptdError("the destination exists", where=str(dest), hint="name another, or remove it first")
    if not dest.parent.is_dir():
        raise CkptdError("no such directory", where=str(dest.parent), hint="make it, or name another destination")
    for above in dest.parents:  # what stands there is retention's to delete, and readers' to find
        if (above / MANIFEST).is_file() or epoch_of_dir(above.name) is not None:
            raise CkptdError("the destination lies in a checkpoint", where=str(above), hint="name one outside of the storage root")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, piece: memoryview, at: int) -> None:
    while piece:
        done = os.pwrite(fd, piece, at)
        piece, at = piece[done:], at + done


def _any(piece: memoryview) -> bool:
    import numpy as np

    return bool(np.frombuffer(piece, np.uint8).any())


def _sum(fd: int, at: int, nbytes: int) -> str:
    total, end = xxhash.xxh3_128(), at + nbytes
    while at < end:
        data = os.pread(fd, min(READ_BYTES, end - at), at)
        if not data:
            break  # shorter than it was: another sum
        total.update(data)
        at += len(data)
    return total.hexdigest()


def _os_error(error: BaseException | None) -> OSError | None:
    """Below whatever torch made of it."""
    while error is not None and not isinstance(error, CkptdError):
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


__all__ = ["Progress", "Staging", "check"]
