"""What was read of durable checkpoints stays on a local disk: the next restore on this node asks the store for less (`cache_dir`).

Each data file has one here, as long and with holes where nothing was read. Nothing says what is right in it but the sums of the
checkpoint: what does not match them is a hole, an old file of that name or a disk's mistake, and is read from the store. So nothing
here needs an fsync, a lock or a list, several daemons may share a directory, and whoever deletes in it does no harm.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptd.core.errors import CkptdError
from ckptd.persist.sums import digest

SUFFIX = ".cached"
BLOCK_UNIT_BYTES = 512  # of st_blocks

log = logging.getLogger("ckptd")


class CachedFile:
    """The copy of one data file. It holds no descriptor: a checkpoint may have more files than there are. From several threads."""

    def __init__(self, cache: Cache, path: Path) -> None:
        self._cache, self._path = cache, path

    def read(self, at: int, dest: memoryview) -> bool:
        """False: there are not so many bytes; what ``dest`` holds afterwards is to be compared with its sums."""
        try:
            with _opened(self._path, os.O_RDONLY) as fd:
                return os.preadv(fd, [dest], at) == len(dest)
        except OSError:
            return False

    def write(self, at: int, data: memoryview) -> None:
        """Best effort: without room there, the store is asked again."""
        if not self._cache.has_room(len(data)):
            return
        try:
            with suppress(FileNotFoundError):
                self._write(at, data)
                return
            self._path.parent.mkdir(mode=0o700, exist_ok=True)  # somebody deleted it; what it lies in may be a disk that is away
            self._write(at, data)
        except OSError as error:
            self._cache.failed(error)

    def _write(self, at: int, data: memoryview) -> None:
        with _opened(self._path, os.O_WRONLY | os.O_CREAT) as fd:
            os.pwrite(fd, data, at)

    def close(self) -> None:
        self._cache.closed(self._path)


class Cache:
    """``full``: what is open just now fills it, and nothing more is kept."""

    def __init__(self, directory: Path, budget: Callable[[int], int]) -> None:
        """budget: bytes, of a file system of so many. Raises CkptdError: it cannot be made, or others may look into it."""
        self.directory, self.full = directory, False
        self._open = Counter[str]()
        self._lock = threading.Lock()
        self._left = 0  # bytes that may be written before it is looked at again
        self._told = False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found, room = directory.stat(), os.statvfs(directory)
        except OSError as error:
            raise CkptdError(f"the cache cannot be made: {error.strerror}", where=str(directory)) from error
        self._bytes_max = budget(room.f_blocks * room.f_frsize)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            hint = "name a directory of this user's own, with mode 700"
            raise CkptdError("others may look into the cache", where=str(directory), hint=hint)

    def open(self, name: str) -> CachedFile:
        """name: where the file lies, unlike any other's."""
        path = self.directory / f"{digest(name.encode()).hex()}{SUFFIX}"
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)  # the oldest go first
        with self._lock:
            self._open[str(path)] += 1
        return CachedFile(self, path)

    def closed(self, path: Path) -> None:
        with self._lock:
            self._open -= Counter([str(path)])
            self.full, self._left = False, 0

    def has_room(self, nbytes: int) -> bool:
        """So much is going to be written."""
        with self._lock:
            if self.full:
                return False
            self._left -= nbytes
            if self._left < 0:
                self._left = self._make_room(nbytes) - nbytes
                self.full = self._left < 0
            return not self.full

    def failed(self, error: OSError) -> None:
        if not self._told:
            log.warning("what is read from storage is not kept in %s: %s", self.directory, error.strerror)
        self._told = True

    def _make_room(self, nbytes: int) -> int:
        """Of those that nobody reads just now the ones go that were not used for longest. How much may be written then."""
        found = sorted(self._files())
        room = self._bytes_max - sum(size for _, size, _ in found)
        for _, size, path in found:
            if room >= nbytes:
                break
            if path not in self._open:
                with suppress(OSError):
                    os.unlink(path)
                room += size
        return room

    def _files(self) -> list[tuple[float, int, str]]:
        found = []
        with suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with suppress(OSError):
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime, stat.st_blocks * BLOCK_UNIT_BYTES, entry.path))
        return found


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
