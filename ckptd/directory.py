"""Directories whose entries outlive a power cut (P4)."""

from __future__ import annotations

import os
from pathlib import Path

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def sync_directory(fd: int) -> None:
    """fsync of an open directory. Raises OSError.

    It is opened once more, because XFS answers the fsync of a directory with success when its log was shut down meanwhile (the
    device failed) and the changes are lost; nothing can be opened there any more.
    """
    os.fsync(fd)
    os.close(os.open(".", _DIR, dir_fd=fd))


def sync_path(path: Path) -> None:
    """The same by name."""
    fd = os.open(path, _DIR)
    try:
        sync_directory(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, mode: int) -> None:
    """Each one that is made is durable in the one above it; existing ones are fine. ``mode``: of the last one, as
    ``Path.mkdir`` has it. Raises OSError."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for place in missing:
        sync_path(place.parent)
