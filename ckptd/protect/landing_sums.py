"""Sums of bytes as they land: each made in the thread of the stream that brought its last byte, of the memory.

So the sums are ready when the last byte is. A look at everything afterwards took two threads 0.07 s for 2 GB, in which the wire
stood still.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import xxhash


class LandingSums:
    """``saw`` is the witness (wire.bulk) of a transfer into ``buffer``; any number of streams may call it at once.

    units: (offset, length > 0) of what gets a sum each; ascending, without overlap. What lies between them is not looked at.
    """

    def __init__(self, buffer: memoryview, units: Sequence[tuple[int, int]]) -> None:
        self.buffer, self._units = buffer, units
        self._ends = [at + length for at, length in units]
        self._sums = [b""] * len(units)
        self._missing: dict[int, int] = {}  # unit -> bytes still to come, of those that came in part
        self._lock = threading.Lock()

    def saw(self, offset: int, length: int) -> None:
        """These bytes of the buffer are there now; each byte is said once."""
        digest, end = xxhash.xxh3_128_digest, offset + length
        for index in range(bisect_right(self._ends, offset), len(self._units)):
            at, size = self._units[index]
            if at >= end:
                break
            came = min(at + size, end) - max(at, offset)
            if came == size or self._completes(index, came, size):
                self._sums[index] = digest(self.buffer[at : at + size])

    def _completes(self, index: int, came: int, size: int) -> bool:
        """Count what came of a unit in several pieces. True, once: that was the last."""
        with self._lock:
            left = self._missing.pop(index, size) - came
            if left:
                self._missing[index] = left
        return not left

    def joined(self) -> bytes:
        """The sums in order of the units, as sealed slots keep them; too short unless every byte landed."""
        return b"".join(self._sums)
