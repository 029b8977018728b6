"""A thread cannot be called off: whoever waits for one keeps waiting, however often he is cancelled, as it may write into memory
that goes to somebody else afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptd.protect.settle import all_done, in_thread
from ckptd.recover.threads import Threads, all_ended
from tests.node.gates import Gates
from tests.node.links import eventually

TURNS = 20  # of the event loop: a task that were to end would have


class Held:
    """A call in a thread, which ends when it is told to."""

    def __init__(self) -> None:
        self.work = ThreadPoolExecutor(1)
        self.ended = False
        self._gates = Gates()
        self.go = self._gates.open

    def call(self) -> None:
        self._gates.task()
        self.ended = True

    async def begin(self, waiting: Any) -> asyncio.Task[Any]:
        """``waiting`` as a task, once the thread is at work."""
        task = asyncio.ensure_future(waiting)
        await eventually(lambda: self._gates.inside)
        return task


@pytest.fixture
def held() -> Iterator[Held]:
    thread = Held()
    yield thread
    thread.go()
    thread.work.shutdown()


async def cancelled(task: asyncio.Task[Any], times: int) -> None:
    for _ in range(times):
        task.cancel()
        await turns()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def outlasts(task: asyncio.Task[Any], held: Held) -> bool:
    """The cancelled task was still there while its thread was at work, and ended after it."""
    was_there = not task.done() and not held.ended
    held.go()
    with pytest.raises(asyncio.CancelledError):
        await task
    return was_there and held.ended


async def fails() -> None:
    raise ValueError("a source that fails")


async def waits() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_cancelled_call_has_ended_when_its_caller_goes_on(held: Held, times: int) -> None:
    task = await held.begin(in_thread(held.work, held.call))
    await cancelled(task, times)
    assert await outlasts(task, held)


async def test_what_the_call_raised_or_returned_is_had() -> None:
    with ThreadPoolExecutor(1) as work:
        assert await in_thread(work, max, 2, 3) == 3
        with pytest.raises(ZeroDivisionError):
            await in_thread(work, divmod, 1, 0)


@pytest.mark.parametrize("times", [1, 2])
async def test_cancelled_while_the_rest_is_called_off(held: Held, times: int) -> None:
    """A restore by parity whose source failed, and whose round is dropped: a slot went back while a thread wrote into it."""
    task = await held.begin(all_done([in_thread(held.work, held.call), fails()]))
    await turns()
    await cancelled(task, times)
    assert await outlasts(task, held)


@pytest.mark.parametrize("times", [1, 2])
async def test_cancelled_where_a_sibling_ends_at_once(held: Held, times: int) -> None:
    """Each is cancelled twice by that alone: with the caller, and because the first of them ended."""
    task = await held.begin(all_done([in_thread(held.work, held.call), waits()]))
    await cancelled(task, times)
    assert await outlasts(task, held)


async def test_the_first_error_comes_when_the_others_have_ended(held: Held) -> None:
    task = await held.begin(all_done([in_thread(held.work, held.call), fails()]))
    await turns()
    assert not task.done()
    held.go()
    with pytest.raises(ValueError, match="a source"):
        await task
    assert held.ended


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_sources_of_a_restore_have_ended_when_it_was_called_off(held: Held, times: int) -> None:
    task = await held.begin(all_ended([all_done([in_thread(held.work, held.call)]), fails(), waits()]))
    await cancelled(task, times)
    assert await outlasts(task, held)


async def test_a_thread_of_a_restore_is_known_when_nobody_awaits_it(held: Held) -> None:
    """Storage may hang: the restore goes on without it, its memory goes to nobody."""
    threads = Threads(held.work)
    task = await held.begin(threads.run(held.call))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ended = asyncio.ensure_future(threads.ended())
    await turns()
    assert not ended.done()
    held.go()
    await ended
    assert held.ended
