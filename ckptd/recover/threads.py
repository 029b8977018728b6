"""Work of a restore that must have ended before its memory goes to somebody else: a thread cannot be called off.

Storage may hang, so unlike what protect/settle.py waits for, a call here is left behind when its caller is called off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from ckptd.protect.settle import ended

T = TypeVar("T")


class Threads:
    """Calls in threads of ``executor``. Whoever awaits one may be cancelled; the call is still known until it ended."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, call, *args)
        self._running.add(future)
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)

    async def ended(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # looked at: whoever needed it has it, or was cancelled


async def all_ended(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Side by side. Raises the first error, or is cancelled, only when all of them have ended; an error calls off nothing, as the
    threads of the others would write on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await ended(tasks)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
