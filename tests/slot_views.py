"""The slots that a rank of a test was told of, mapped as the client maps them."""

from __future__ import annotations

import mmap
import os

from ckptd.wire import rank as wire


class SlotViews(dict[int, memoryview]):
    """By number."""

    def __init__(self) -> None:
        self._segments: dict[str, mmap.mmap] = {}

    def take(self, note: wire.Mapped, fds: list[int]) -> None:
        """Closes the descriptors, and takes them off the list."""
        while fds:
            fd = fds.pop()
            self._segments[note.segment] = mmap.mmap(fd, note.segment_bytes)
            os.close(fd)
        whole = memoryview(self._segments[note.segment])
        self[note.slot] = whole[note.offset : note.offset + note.capacity]
