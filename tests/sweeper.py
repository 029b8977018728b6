"""Cleans up after a run of the tests, however it ended: waits for the end of its stdin, then kills what the run has left
running, unmounts what it has left mounted and removes its folder. ``python -m tests.sweeper FOLDER``.

Ours is every process whose TMPDIR lies in the folder, but this one. An interrupted worker ends none of what its tests have started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ckptd.demo import processes
from tests.short import kept

ROUNDS_MAX = 5  # a process that was just being started is found in the next round


def ours(folder: str) -> list[int]:
    mark = b"TMPDIR=" + os.fsencode(folder)
    others = (pid for pid in processes.pids() if pid != os.getpid() and processes.alive(pid))
    return [pid for pid in others if any(entry.startswith(mark) for entry in _environ(pid))]


def _environ(pid: int) -> list[bytes]:
    with suppress(OSError):  # it ended meanwhile, or is another user's
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _mounts(folder: str) -> Iterator[str]:
    """Newest first. Spaces are escaped in this file; there are none in the names of ours."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split()[1]
        if place.startswith(folder + "/"):
            yield place


def sweep(folder: str) -> None:
    for _ in range(ROUNDS_MAX):
        found = ours(folder)
        if not found:
            break
        processes.kill(found)
    for place in _mounts(folder):
        subprocess.run(["umount", "-l", place], check=False)
    if not kept():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    sweep(sys.argv[1])
