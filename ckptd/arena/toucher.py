"""The sacrificial child: touches the pages of a new segment in place of the daemon (design D1).

At a memory limit the kernel kills; it kills this process first (oom_score_adj 1000), and the daemon reads its
exit status. It runs as a script under ``python -I -S``: standard library only. Arguments: descriptor, bytes,
pid of the daemon.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys

PIECE_BYTES = 64 * 1024 * 1024  # between pieces it looks whether the daemon still lives
PAGE_BYTES = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23
OOM_SCORE_ADJ_MAX = 1000
EXIT_ORPHAN = 3
EXIT_ERRNO = 4  # the errno stands on stdout


def touch(mapping: mmap.mmap, at: int, size: int) -> None:
    try:
        mapping.madvise(MADV_POPULATE_WRITE, at, size)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
            raise
        mapping[at : at + size : PAGE_BYTES] = bytes(-(-size // PAGE_BYTES))


def main(fd: int, size: int, parent: int) -> int:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE_ADJ_MAX))
    try:
        with mmap.mmap(fd, size) as mapping:
            for at in range(0, size, PIECE_BYTES):
                if os.getppid() != parent:
                    return EXIT_ORPHAN
                touch(mapping, at, min(PIECE_BYTES, size - at))
    except OSError as error:
        sys.stdout.write(str(error.errno or 0))
        return EXIT_ERRNO
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
