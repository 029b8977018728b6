"""What slots say about themselves, asked of the daemons that hold them, and kept beside the parity over them (design D8, D14).

When a slot is lost, its card says what it was: layout, sums, digests. So what parity brings back is checked against the sums
made at its seal.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import msgpack

from ckptd.arena.arena import Slot, SlotRecord
from ckptd.arena.record import check_record
from ckptd.arena.sums import lower_tier
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.redundancy.parity_sets import PARITY_SET_PLAN
from ckptd.core.state_map.agreement import in_order
from ckptd.core.state_map.layout import Layout
from ckptd.protect.fetched import Away
from ckptd.protect.settle import Answers, Tasks
from ckptd.wire.peer import Card, CardAsk

CARD_TIMEOUT_S = 30.0
CARDS_MAX = 255  # in one part: members of a parity set
NOT_HELD = "not held here"

Send = Callable[[str, str, object], bool]


class Cards:
    """``held(job, snapshot, rank)`` finds the slot that is asked about."""

    def __init__(self, node: str, send: Send, work: Executor) -> None:
        self._node, self._send, self._work = node, send, work
        self._answers: Answers[Card] = Answers()
        self._tasks = Tasks()
        self.held: Callable[[str, SnapshotId, int], Slot | None] = lambda job, snapshot, rank: None

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, CardAsk):
            self._tasks.spawn(self._serve(node, job, message))
        elif isinstance(message, Card):
            self._answers.came(message.transfer, message)
        else:
            return False
        return True

    async def ask(self, job: str, node: str, snapshot: SnapshotId, rank: int) -> SlotRecord:
        """The tier-1 record of that slot; of parity the whole one, but for which part it is. Raises CkptdError: Away when
        nobody answers."""
        if node == self._node:
            mine = await self._mine(job, snapshot, rank)
            if mine is None:
                raise CkptdError(f"rank {rank}: {NOT_HELD}", where=node)
            return mine
        request = CardAsk(secrets.token_hex(16), snapshot, rank)
        card = await self._answers.ask(request.transfer, lambda: self._send(node, job, request), CARD_TIMEOUT_S)
        if card is None:
            raise Away(f"rank {rank}: no answer", where=node)
        if not card.ok:
            raise CkptdError(f"rank {rank}: {card.reason}", where=node)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._work, _record, job, snapshot, rank, card, node)

    async def _serve(self, node: str, job: str, request: CardAsk) -> None:
        card = await self._mine(job, request.snapshot, request.rank)
        if card is None:
            self._send(node, job, Card(request.transfer, False, NOT_HELD))
            return
        said = (card.layout.encoded, card.objects_bytes, card.sums, card.digests, card.keep)
        self._send(node, job, Card(request.transfer, True, "", *said))

    async def _mine(self, job: str, snapshot: SnapshotId, rank: int) -> SlotRecord | None:
        """None: it is not held here, or in part only."""
        slot = self.held(job, snapshot, rank)
        record = slot.record if slot is not None else None
        if record is None or record.tier > 1:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._work, tier_one, record)


def tier_one(record: SlotRecord) -> SlotRecord:
    """The record of a tier-1 replica of this slot. Parity has no tiers."""
    if record.shard is not None or record.tier == 1:
        return record
    return replace(record, tier=1, sums=lower_tier(record.layout, record.sums, record.tier, 1))


def _record(job: str, snapshot: SnapshotId, rank: int, card: Card, node: str) -> SlotRecord:
    try:
        layout = Layout.decode(card.layout)
        tier = 0 if layout.plan_id.startswith(PARITY_SET_PLAN) else 1
        facts = card.objects_bytes, card.sums, card.digests, card.keep
        record = SlotRecord(job, snapshot, rank, tier, layout, *facts)
        if layout.rank != rank:
            raise ValueError("it is of another rank")
        check_record(record)
    except ValueError as error:
        raise CkptdError(f"rank {rank}: {error}", where=node) from error
    return record


# --- beside the parity --------------------------------------------------------------------------------------------------
def packed(cards: Mapping[int, SlotRecord]) -> bytes:
    """What every shard of a parity set keeps of its members: the same bytes on all of its nodes."""
    rows = [
        [rank, card.layout.encoded, card.objects_bytes, card.sums, sorted(card.digests), card.keep]
        for rank, card in sorted(cards.items())
    ]
    blob: bytes = msgpack.packb(rows)
    return blob


def unpacked(job: str, snapshot: SnapshotId, blob: bytes | memoryview) -> dict[int, SlotRecord]:
    """The inverse, whatever follows: rank -> tier-1 record. Raises ValueError."""
    found: dict[int, SlotRecord] = {}
    try:
        reader = msgpack.Unpacker(strict_map_key=True, max_buffer_size=len(blob))
        reader.feed(blob)
        rows: Any = reader.unpack()
        for rank, layout, objects_bytes, sums, digests, keep in rows[:CARDS_MAX]:
            decoded = Layout.decode(layout)
            pairs = tuple(in_order(decoded, [(str(name), bytes(value)) for name, value in digests]))
            record = SlotRecord(job, snapshot, rank, 1, decoded, objects_bytes, sums, pairs, bool(keep))
            check_record(record)
            found[rank] = record
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not the cards of a parity set: {error}") from error
    return found
