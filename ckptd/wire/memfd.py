"""Objects too large for a frame: sealed memfds, immutable once made, read without mapping (design D1, D2)."""

from __future__ import annotations

import fcntl
import os

ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
IMMUTABLE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
READ_BYTES_MAX = 64 * 1024 * 1024  # of one pread


def memfd_object(data: bytes | memoryview, name: str = "ckptd-object") -> int:
    """A new memfd that holds ``data`` and that nobody can change any more. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_memfd_object(fd: int, max_bytes: int) -> bytes:
    """The bytes of a sealed memfd of at most ``max_bytes``. Raises ValueError for any other descriptor.

    The seals are asked first: only a memfd has any, so nothing after it can block (a FUSE file would) or
    change under us.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"not a memfd: {error}") from error
    if seals & IMMUTABLE != IMMUTABLE:
        raise ValueError("the memfd is not sealed against change")
    size = os.fstat(fd).st_size
    if size > max_bytes:
        raise ValueError(f"object of {size} bytes, at most {max_bytes} are taken")
    pieces: list[bytes] = []
    at = 0
    while at < size:
        piece = os.pread(fd, min(READ_BYTES_MAX, size - at), at)
        if not piece:
            raise ValueError("the memfd ended early")
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
