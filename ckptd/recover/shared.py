"""What one rank's restore has read from storage is copied for the other ranks of its node that want the same: each byte leaves
storage once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Executor

import numpy as np

from ckptd.recover.threads import Threads


class Shared:
    """Memory that was filled here stays as it is until ``forget()``, or the end of the restore."""

    def __init__(self, executor: Executor) -> None:
        self._copies = Threads(executor)
        self._coming: dict[Hashable, asyncio.Future[memoryview | None]] = {}

    async def fill(self, key: Hashable, into: memoryview, read: Callable[[], Awaitable[None]]) -> bool:
        """``read()`` fills ``into``, or what was read under this key is copied there. True: that. Raises what ``read`` raises."""
        while (known := self._coming.get(key)) is not None:
            source = await asyncio.shield(known)
            if source is not None and self._coming.get(key) is known:
                await self._copies.run(_copy, source, into)
                return True
        coming = self._coming[key] = asyncio.get_running_loop().create_future()
        try:
            await read()
            coming.set_result(into)
        finally:
            if not coming.done():  # whoever waits for it reads it by itself
                del self._coming[key]
                coming.set_result(None)
        return False

    async def forget(self) -> None:
        """Afterwards what was filled up to now is nobody's source."""
        self._coming = {key: coming for key, coming in self._coming.items() if not coming.done()}
        await self.ended()

    async def ended(self) -> None:
        await self._copies.ended()


def _copy(source: memoryview, into: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))  # without the interpreter's lock
