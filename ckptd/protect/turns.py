"""So many at once, first come first served; how many may change at any time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

LOOK_S = 0.5  # whoever waits looks so often whether more are allowed by now


class Turns:
    """``async with turns:`` in one event loop. ``allowed()``: how many may be inside now, at least 1."""

    def __init__(self, allowed: Callable[[], int]) -> None:
        self._allowed = allowed
        self._inside = 0
        self._waiting: deque[asyncio.Event] = deque()

    async def __aenter__(self) -> None:
        mine = asyncio.Event()
        self._waiting.append(mine)
        try:
            while self._waiting[0] is not mine or self._inside >= self._allowed():
                mine.clear()
                await _wait(mine)
            self._inside += 1
        finally:
            self._waiting.remove(mine)
            self._call_next()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        self._call_next()

    def _call_next(self) -> None:
        if self._waiting:
            self._waiting[0].set()


async def _wait(event: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(event.wait(), LOOK_S)
    except asyncio.TimeoutError:
        return
