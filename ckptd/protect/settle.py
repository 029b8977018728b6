"""Waiting for the other side, and for the transport to let go of memory: what replicas and fetches have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, Protocol, TypeVar

from ckptd.protect.fetched import Unanswered
from ckptd.wire.bulk import Incoming, TransferError


class Word(Protocol):
    @property
    def ok(self) -> bool: ...


T = TypeVar("T")
W = TypeVar("W", bound=Word)
log = logging.getLogger("ckptd.protect")

REPEAT_S = 1.0  # a message that may have been lost is said again
UNREACHABLE_S = 3.0  # the control link takes nothing for the node for so long: do not wait for its answer


async def settle(incoming: Incoming) -> None:
    """End the transfer, if it has not ended, and return when no stream can write into its buffer any more; not before, even
    when this is cancelled: the streams are interrupted, so it takes moments."""
    incoming.cancel()
    done = asyncio.wrap_future(incoming.done)
    try:
        await ended([done])
    finally:
        if not done.cancelled():
            done.exception()  # looked at, so that asyncio does not complain; whoever needed it has it


async def ended(work: Collection[asyncio.Future[Any]]) -> None:
    """Returns when all of it is done; not before, however often this is cancelled: what it writes into is still in use. Only then
    is the cancelling raised."""
    stopped: asyncio.CancelledError | None = None
    while left := [one for one in work if not one.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            stopped = error
    if stopped is not None:
        raise stopped


async def all_done(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order. However it ends, none of them runs any more: what they write into may be used again, if each of
    them ends no sooner than its threads. The first error is raised, and calls off the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await ended(tasks)


async def in_thread(work: Executor, call: Callable[..., T], *args: Any) -> T:
    """Called off or not, and however often, the thread has ended when this returns."""
    running = asyncio.get_running_loop().run_in_executor(work, call, *args)
    try:
        return await asyncio.shield(running)
    finally:
        await ended([running])


class Answers(Generic[T]):
    """Words of other nodes on what they were asked, by the number of the transfer."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, transfer: str, say: Callable[[], bool], timeout_s: float) -> T | None:
        """Says it, again until somebody answers. None: nobody does."""
        with self.to(transfer) as answer:
            return answer.result() if await ask(say, (answer,), timeout_s) else None

    @contextlib.contextmanager
    def to(self, transfer: str) -> Iterator[asyncio.Future[T]]:
        """The answer that is waited for meanwhile."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[transfer] = answer
        try:
            yield answer
        finally:
            del self._waiting[transfer]

    def came(self, transfer: str, word: T) -> None:
        """What nobody waits for any more, or comes twice, is nothing."""
        waiting = self._waiting.get(transfer)
        if waiting is not None and not waiting.done():
            waiting.set_result(word)


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


async def word_on(
    say: Callable[[], bool], answer: asyncio.Future[W], arrived: asyncio.Future[int], ask_s: float, word_s: float, where: str
) -> W:
    """What a holder says to what it pushes here: after the last byte, or instead of the bytes. Once they come the transport bounds
    the wait: a stream that stalls is dropped. Raises TransferError; Unanswered: neither a byte nor a word within ``ask_s``."""
    if not await ask(say, (answer, arrived), ask_s):
        raise Unanswered("the holder does not answer", where=where)
    if answer.done() and not answer.result().ok:
        return answer.result()
    await arrived
    if not answer.done() and not await ask(say, (answer,), word_s, said=True):
        raise TransferError("no word after the last byte", where=where)
    return answer.result()


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
