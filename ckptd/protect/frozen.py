"""What a replica leans on: the frozen part of its snapshot, fetched from the sender where it is not here yet (design D6, D8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from ckptd.arena.arena import Arena, Slot, SlotRecord
from ckptd.arena.frozen import content_of, frozen_record, own_bytes
from ckptd.arena.sums import bad_blocks
from ckptd.core.errors import CkptdError
from ckptd.core.state_map.record_size import record_bytes
from ckptd.protect.fetch import Fetcher
from ckptd.protect.peer_slot import DAMAGE, allocate
from ckptd.wire.bulk import Changed

TRIES_MAX = 3  # it may go again before anything leans on it


class FrozenParts:
    """``find(job, content)``: a slot of it that is here. ``on_arrived(job, slot)``: one was received, verified and sealed."""

    def __init__(self, arena: Arena, fetcher: Fetcher, work: Executor) -> None:
        self._arena, self._fetcher, self._work = arena, fetcher, work
        self._coming: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.find: Callable[[str, str], Slot | None] = lambda job, content: None
        self.on_arrived: Callable[[str, Slot], None] = lambda job, slot: None

    async def support(self, slot: Slot, node: str, record: SlotRecord) -> None:
        """``slot`` leans on the frozen part of ``record``, which ``node`` holds. Raises CkptdError, NoMemory among them."""
        part = await asyncio.get_running_loop().run_in_executor(self._work, frozen_record, record)
        key = record.job, content_of(part)
        for _ in range(TRIES_MAX):
            found = self.find(*key)
            if found is not None:
                slot.lean(found)
                return
            if key not in self._coming:
                self._coming[key] = asyncio.ensure_future(self._bring(node, record, part))
                self._coming[key].add_done_callback(lambda done: self._arrived(key, done))
            await asyncio.shield(self._coming[key])
        raise CkptdError("the frozen part does not stay", where=node)

    def _arrived(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        del self._coming[key]
        if not done.cancelled():
            done.exception()  # looked at: whoever waits has it

    async def _bring(self, node: str, record: SlotRecord, part: SlotRecord) -> None:
        loop = asyncio.get_running_loop()
        nbytes, room = own_bytes(part.layout, part.tier), record_bytes(len(part.layout.encoded), len(part.sums))
        slot = await loop.run_in_executor(
            self._work, allocate, self._arena, record.job, record.rank, nbytes, room
        )
        try:
            slot.fill()
            spans = ((record.layout.frozen_at, nbytes),)
            into = slot.extent[:nbytes]
            what = record.job, node, record.snapshot, record.rank, spans
            found = await self._fetcher.fetch(*what, into, protects=1.0)
            if not found.ok:
                raise CkptdError(f"its frozen part: {found.reason}", where=node)
            if await loop.run_in_executor(self._work, bad_blocks, slot.extent, part.layout, part.sums, None, part.tier):
                raise Changed(DAMAGE)
            await loop.run_in_executor(self._work, slot.seal, part)
        except BaseException:
            self._arena.release(slot)
            raise
        self.on_arrived(record.job, slot)
