"""One daemon per socket path, and per state directory: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from ckptd.core.errors import CkptdError

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class PathLock:
    """flock on ``PATH.lock``. The file stays: removing it would let two daemons lock two files of one
    name. ``taken``, ``hint``: what is said when another process has it."""

    def __init__(self, path: Path, taken: str, hint: str) -> None:
        self._path, self._fd = path.with_name(path.name + ".lock"), -1
        self._taken, self._hint = taken, hint

    def take(self) -> None:
        """Raises CkptdError when another process has it, OSError when the directory does not let us. On a file system without
        locks (NFS can be one) nobody is kept out."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the latter is CIFS's word for it
            os.close(fd)
            raise CkptdError(self._taken, where=str(self._path), hint=self._hint) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                os.close(fd)
                raise
        self._fd = fd

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
