"""Files of a POSIX storage: O_DIRECT from a bounded aligned scratch buffer, or straight from memory that is aligned.

O_DIRECT keeps checkpoints out of the page cache (they would push out the training data) and makes fsync cheap. What
does not take it (tmpfs, some network file systems) is written through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.directory import sync_directory
from ckptd.persist.storage.base import StorageError, SyncFailed, storage_error

SCRATCH_BYTES = 8 << 20  # one write; also the bounce buffer of each open file
ALIGN_BYTES = 4096  # of file offset, length and address under O_DIRECT
IN_PLACE_BYTES_MIN = 1 << 20  # below this a copy is cheaper than one more write
POOLED_MAX = 4  # scratch buffers kept for the next file

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ScratchPool:
    """Page-aligned buffers, kept warm: touching 8 MiB for the first time costs as much as writing it."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self) -> mmap.mmap:
        with self._lock:
            if self._free:
                return self._free.pop()
        return mmap.mmap(-1, SCRATCH_BYTES)

    def give(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if len(self._free) < POOLED_MAX:
                self._free.append(buffer)


def sync(fd: int, where: str) -> None:
    """fsync or SyncFailed. Never tried twice: after a failure the kernel may call lost pages clean (P11)."""
    _sync(os.fsync, fd, where)


def sync_entries(fd: int, where: str) -> None:
    """The same for a directory."""
    _sync(sync_directory, fd, where)


def _sync(call: Callable[[int], None], fd: int, where: str) -> None:
    try:
        call(fd)
    except OSError as error:
        hint = "the bytes may be lost; look for disk errors in the kernel log"
        raise SyncFailed(
            f"fsync: {error.strerror}", where=where, hint=hint, errno=error.errno or 0
        ) from error


class PosixWriter:
    def __init__(self, fd: int, where: str, pool: ScratchPool, *, direct: bool) -> None:
        self._fd = fd
        self._where = where
        self._pool = pool
        self._buffer = pool.take()
        self._view = memoryview(self._buffer)
        self._array = np.frombuffer(self._buffer, np.uint8)
        self._direct = direct and _set_direct(fd, True)
        self._at = 0  # of the scratch buffer's first byte in the file; a multiple of ALIGN_BYTES
        self._fill = 0

    @property
    def position(self) -> int:
        return self._at + self._fill

    @property
    def direct(self) -> bool:
        return self._direct

    def space(self) -> memoryview:
        return self._view[self._fill :]

    def advance(self, nbytes: int) -> None:
        self._fill += nbytes
        assert self._fill <= SCRATCH_BYTES, "advance() beyond space()"
        if self._fill == SCRATCH_BYTES:
            self._flush(SCRATCH_BYTES)

    def write(self, data: bytes | memoryview) -> None:
        source = np.frombuffer(data, np.uint8)
        self._copy(source[self._write_in_place(source) :])

    def finish(self) -> int:
        size = self.position
        try:
            if self._fill:
                self._flush_tail(size)
            sync(self._fd, self._where)
        finally:
            self.abort()
        return size

    def abort(self) -> None:
        if self._fd < 0:
            return
        self._view.release()
        del self._array
        self._pool.give(self._buffer)
        os.close(self._fd)
        self._fd = -1

    def _copy(self, source: Bytes) -> None:
        done = 0
        while done < len(source):
            count = min(len(source) - done, SCRATCH_BYTES - self._fill)
            np.copyto(self._array[self._fill : self._fill + count], source[done : done + count])
            self.advance(count)
            done += count

    def _write_in_place(self, source: Bytes) -> int:
        """How many bytes were written from where they are: what O_DIRECT can take, or all through the page cache."""
        lead = -self._fill % ALIGN_BYTES if self._direct else 0
        if len(source) < IN_PLACE_BYTES_MIN or (self._direct and (source.ctypes.data + lead) % ALIGN_BYTES):
            return 0
        self._copy(source[:lead])
        if self._fill:
            self._flush(self._fill)
        count = (len(source) - lead) // ALIGN_BYTES * ALIGN_BYTES
        self._pwrite(source[lead : lead + count].data, self._at)
        self._at += count
        return lead + count

    def _flush_tail(self, size: int) -> None:
        padded = -(-self._fill // ALIGN_BYTES) * ALIGN_BYTES if self._direct else self._fill
        self._array[self._fill : padded] = 0
        self._flush(padded)
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(error, "truncate", self._where) from error

    def _flush(self, nbytes: int) -> None:
        self._pwrite(self._view[:nbytes], self._at)
        self._at += self._fill
        self._fill = 0

    def _pwrite(self, view: memoryview, at: int) -> None:
        while view:
            try:
                done = os.pwrite(self._fd, view[:SCRATCH_BYTES], at)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    # A file system that takes the flag, but not the write.
                    self._direct = not _set_direct(self._fd, False)
                    continue
                raise storage_error(error, "write", self._where) from error
            if done % ALIGN_BYTES and self._direct:  # a short write: the rest is not aligned any more
                self._direct = not _set_direct(self._fd, False)
            view, at = view[done:], at + done


class PosixReader:
    at_once = BLOCK_BYTES

    def __init__(self, fd: int, where: str) -> None:
        self._fd = fd
        self._where = where
        self._size = os.fstat(fd).st_size

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, at: int, dest: memoryview) -> None:
        while dest:
            try:
                done = os.preadv(self._fd, [dest], at)
            except OSError as error:
                raise storage_error(error, "read", self._where) from error
            if done == 0:
                raise StorageError(
                    f"the file ends at byte {at}, {len(dest)} bytes are missing", where=self._where
                )
            dest, at = dest[done:], at + done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT; False when the file system does not have it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
