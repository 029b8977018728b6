"""Damage for tests: bits flipped in the memory of a running daemon, and in files."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

MEMFD_PREFIX = "/memfd:"


def flip_in_memory(pid: int, pattern: bytes) -> int:
    """Flip one bit in every copy of ``pattern`` that the memfds of this process hold. Returns how many copies there were."""
    flipped = 0
    for memory in _memfds(pid):
        at = memory.find(pattern)
        while at >= 0:
            memory[at + len(pattern) // 2] ^= 1
            flipped += 1
            at = memory.find(pattern, at + 1)
    return flipped


def _memfds(pid: int) -> Iterator[mmap.mmap]:
    seen: set[int] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith(MEMFD_PREFIX):
                continue
            fd = os.open(entry, os.O_RDWR)
            try:
                facts = os.fstat(fd)
                if facts.st_ino in seen or not facts.st_size:
                    continue
                seen.add(facts.st_ino)
                memory = mmap.mmap(fd, facts.st_size)
            finally:
                os.close(fd)
            with memory:
                yield memory


def flip_in_file(path: Path, at: int = -1) -> None:
    """One bit, by default of the last byte."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
