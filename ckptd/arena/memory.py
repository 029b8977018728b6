"""What the kernel does with a memfd's pages. ctypes, because ``mmap.madvise`` keeps the GIL while it
works."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet
POPULATE_PIECE_BYTES = 256 * 1024 * 1024
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_MODE = 0o600  # nobody of another uid reopens it through /proc

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def make_memfd(name: str, size: int) -> int:
    """A memfd whose size and seals are final, without pages yet."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, _MODE)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed_memfd(fd: int) -> bool:
    """Fixed in size, and not made read-only by somebody."""
    try:
        seals: int = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals == SEALS


def map_segment(fd: int, size: int) -> mmap.mmap:
    """Forked children do not inherit it and core dumps do not hold it."""
    mapping = mmap.mmap(fd, size)
    mapping.madvise(mmap.MADV_DONTFORK)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def populate(mapping: mmap.mmap, size: int) -> None:
    """Enter pages that exist already into this process' page table, so that the first receive does not fault
    on each. An optimization: what the kernel refuses is left to faults."""
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        start = ctypes.addressof(anchor)
        for at in range(0, size, POPULATE_PIECE_BYTES):
            if _libc.madvise(start + at, min(POPULATE_PIECE_BYTES, size - at), MADV_POPULATE_WRITE):
                return
    finally:
        del anchor  # else the mapping could not be closed


def give_back_pages(fd: int, size: int) -> None:
    """Free the pages now, even while a stopped or slow trainer still maps them: it would read zeros, and pay
    itself for what it writes. Raises OSError."""
    if _libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, 0, size):
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), "punching out a retired segment")
