"""What several ranks of a node want of storage leaves it once, and nobody copies from memory that is another's by then (P1)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptd.recover import shared as module
from ckptd.recover.shared import Shared

KEY = ("model.w", None)


class Source:
    """Reads come to their end when they are told to."""

    def __init__(self) -> None:
        self.reads = 0
        self.go = asyncio.Event()

    async def read_into(self, into: memoryview, data: bytes = b"from storage", error: Exception | None = None) -> None:
        self.reads += 1
        await self.go.wait()
        if error is not None:
            raise error
        into[: len(data)] = data


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    with ThreadPoolExecutor(2) as pool:
        made = Shared(pool)
        yield made
        await made.ended()


def room() -> memoryview:
    return memoryview(bytearray(12))


async def begun(shared: Shared, source: Source, into: memoryview, **how: Any) -> asyncio.Task[bool]:
    task = asyncio.ensure_future(shared.fill(KEY, into, lambda: source.read_into(into, **how)))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_who_comes_meanwhile_or_later_gets_a_copy(shared: Shared) -> None:
    source, rooms = Source(), [room() for _ in range(4)]
    first = [await begun(shared, source, into) for into in rooms[:3]]
    source.go.set()
    assert [await task for task in first] == [False, True, True]
    assert await (await begun(shared, source, rooms[3]))
    assert source.reads == 1 and {bytes(into) for into in rooms} == {b"from storage"}


async def test_what_could_not_be_read_is_read_by_whoever_waits(shared: Shared) -> None:
    source, rooms = Source(), [room(), room()]
    fails = await begun(shared, source, rooms[0], error=OSError("gone"))
    waits = await begun(shared, source, rooms[1])
    source.go.set()
    with pytest.raises(OSError, match="gone"):
        await fails
    assert not await waits and source.reads == 2 and bytes(rooms[1]) == b"from storage"


async def test_who_is_called_off_leaves_the_others_to_themselves(shared: Shared) -> None:
    source, rooms = Source(), [room(), room()]
    goes, waits = [await begun(shared, source, into) for into in rooms]
    goes.cancel()
    source.go.set()
    assert not await waits and source.reads == 2


async def test_what_is_forgotten_in_between_is_read_anew(shared: Shared) -> None:
    """The first rank's next source failed in the same moment, and its memory is given back before the second rank comes to it."""
    source, rooms = Source(), [room(), room()]
    first = await begun(shared, source, rooms[0])
    waits = await begun(shared, source, rooms[1])

    async def gives_back() -> None:
        await first
        await shared.forget()
        rooms[0][:] = b"another rank"

    ends = asyncio.ensure_future(gives_back())
    await asyncio.sleep(0)
    source.go.set()
    assert not await first and not await waits
    await ends
    assert source.reads == 2 and bytes(rooms[1]) == b"from storage"


async def test_a_copy_under_way_is_waited_for(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    at, go, real = threading.Event(), threading.Event(), module._copy

    def slow(source: memoryview, into: memoryview) -> None:
        at.set()
        assert go.wait(20)
        real(source, into)

    monkeypatch.setattr(module, "_copy", slow)
    source, rooms = Source(), [room(), room()]
    source.go.set()
    assert not await (await begun(shared, source, rooms[0]))
    copies = await begun(shared, source, rooms[1])
    await asyncio.to_thread(at.wait)
    forgets = asyncio.ensure_future(shared.forget())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not forgets.done(), "memory would be another's under the copy"
    go.set()
    await forgets
    assert await copies and bytes(rooms[1]) == b"from storage"


async def test_what_is_forgotten_is_nobodys_source(shared: Shared) -> None:
    source, rooms = Source(), [room(), room()]
    source.go.set()
    assert not await (await begun(shared, source, rooms[0]))
    await shared.forget()
    rooms[0][:] = b"another rank"
    assert not await (await begun(shared, source, rooms[1]))
    assert source.reads == 2 and bytes(rooms[1]) == b"from storage"
