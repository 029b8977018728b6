"""Waiting for the other side, and for the transport to let go of memory: what replicas and fetches have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from ckptd.wire.bulk import Incoming

log = logging.getLogger("ckptd.protect")

REPEAT_S = 1.0  # a message that may have been lost is said again
UNREACHABLE_S = 3.0  # the control link takes nothing for the node for so long: do not wait for its answer


async def settle(incoming: Incoming) -> None:
    """End the transfer, if it has not ended, and return when no stream can write into its buffer any more."""
    incoming.cancel()
    done = asyncio.wrap_future(incoming.done)
    await asyncio.wait([done])
    if not done.cancelled():
        done.exception()  # looked at, so that asyncio does not complain; whoever needed it has it


class Tasks:
    """Work for peers that nobody awaits; what it raises is logged."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self.running.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work for a peer failed", exc_info=task.exception())


async def ask(
    say: Callable[[], bool], answers: Collection[asyncio.Future[Any]], timeout_s: float, *, said: bool = False
) -> bool:
    """``say()`` the same thing until one of the answers is there. False: none within the time, or nobody to say it to.

    ``said``: it was said before, so only what gets lost is said again.
    """
    loop = asyncio.get_running_loop()
    started = reached = loop.time()
    while loop.time() - started < timeout_s:
        if said or say():
            reached = loop.time()
        elif loop.time() - reached >= UNREACHABLE_S:
            return False
        said = False
        left = max(0.0, started + timeout_s - loop.time())
        done, _ = await asyncio.wait(
            answers, timeout=min(REPEAT_S, left), return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return True
    return False
