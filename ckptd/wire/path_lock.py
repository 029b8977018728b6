"""One daemon per socket path: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ckptd.core.errors import CkptdError


class PathLock:
    """flock on ``PATH.lock``. The file stays: removing it would let two daemons lock two files of one
    name."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path.with_name(path.name + ".lock"), -1

    def take(self) -> None:
        """Raises CkptdError when another process has it, or the directory does not let us."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CkptdError(
                f"cannot lock: {error.strerror}", where=str(self._path), hint="set socket to a path of ours"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise CkptdError(
                "another daemon serves this socket",
                where=str(self._path),
                hint="stop it, or set another socket",
            ) from None
        self._fd = fd

    def drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
