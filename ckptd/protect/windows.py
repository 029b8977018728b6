"""Scratch for parity: windows of a fixed size, reused and bounded over everything that this daemon encodes and decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

WINDOW_BYTES = 4 << 20
WINDOWS_MAX = 24  # 96 MiB; a parity set of more columns than this gets as many as it needs, alone


class Windows:
    """On the event loop only."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self.taken = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[list[memoryview]]:
        """``count`` windows at once, so that nobody waits for more while he holds some."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.taken == 0 or self.taken + count <= WINDOWS_MAX)
            self.taken += count
        windows = [self._free.pop() if self._free else memoryview(bytearray(WINDOW_BYTES)) for _ in range(count)]
        try:
            yield windows
        finally:
            self._free += windows[: max(0, WINDOWS_MAX - len(self._free))]
            self.taken -= count
            async with self._changed:
                self._changed.notify_all()
