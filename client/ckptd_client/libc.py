"""The few calls of libc that Python has no GIL-free form of: memory maps without a duplicate descriptor, big copies.

``mmap.mmap`` keeps its own duplicate of the descriptor, which a forked loader worker would hold for ever, and unmaps when
collected, which in a forked child could hit another mapping. ctypes releases the GIL around every call here.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable

PROT_READ, PROT_WRITE = 0x1, 0x2
MAP_SHARED = 0x1
MADV_DONTFORK = 10
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_memmove = ctypes.PyDLL(None).memmove  # keeps the GIL
_memmove.argtypes, _memmove.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def map_shared(fd: int, nbytes: int) -> int:
    """Map ``nbytes`` of ``fd`` readable and writable; returns the address. Raises OSError."""
    return _map(fd, nbytes, PROT_READ | PROT_WRITE)


def _map(fd: int, nbytes: int, protection: int) -> int:
    address = _libc.mmap(None, nbytes, protection, MAP_SHARED, fd, 0)
    if address is None or address == MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """False when this kernel does not know the advice; it is advice, so nobody depends on it."""
    return int(_libc.madvise(address, nbytes, advice)) == 0


def copy(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def copy_all(targets: Iterable[int], sources: Iterable[int], sizes: Iterable[int]) -> None:
    """Of small ones: letting go of the GIL for each costs more than the copy (20,000 of 10 KB: 55 ms, and 38 without)."""
    deque(map(_memmove, targets, sources, sizes), maxlen=0)


def zero(address: int, nbytes: int) -> None:
    ctypes.memset(address, 0, nbytes)


def differ(a: int, b: int, nbytes: int) -> bool:
    return bool(_libc.memcmp(a, b, nbytes))


def map_readonly(fd: int, nbytes: int) -> int:
    """The same for reading only; works on memfds sealed against writing."""
    return _map(fd, nbytes, PROT_READ)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
