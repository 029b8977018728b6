"""One replica: offer, ticket, push, verify, seal (design D8, D4). Both sides, for every job of this daemon.

The sender repeats its offer until it hears something; the receiver remembers each transfer, so that a repeated offer finds
the ticket or the outcome that got lost, or hears that the receiver is at work. Bytes go straight into the receiver's arena
and count only when every block matched.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from ckptd.arena.arena import Arena, NoMemory, Slot, SlotRecord
from ckptd.arena.frozen import leans
from ckptd.arena.sums import block_count, live_blocks, lower_tier
from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import SnapshotId
from ckptd.core.pacing.slowdown import DEADLINE_S
from ckptd.core.protocol.events import NO_MEMORY
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.record_size import SUM_BYTES, record_bytes
from ckptd.protect.frozen import FrozenParts
from ckptd.protect.landing_sums import LandingSums
from ckptd.protect.pacer import Pacer, Transfer
from ckptd.protect.peer_slot import DAMAGE, PACED_STREAMS, allocate
from ckptd.protect.settle import Tasks, ask, settle
from ckptd.protect.turns import Turns
from ckptd.protect.verify import count_bad
from ckptd.thread_pool import ThreadPool
from ckptd.wire.bulk import STREAMS_DEFAULT, Changed, Ticket, TransferError, Transport
from ckptd.wire.peer import ReplicaDone, ReplicaOffer, ReplicaTicket

OFFER_TIMEOUT_S = 30.0  # no ticket by then, and no word that the peer is at work on it
VERIFY_TIMEOUT_S = 60.0  # the same, from the last byte to the receiver's verdict
PUSHES_MAX = 8  # at once, over all peers and jobs
PACED_PUSHES_MAX = 2  # more would share the same rate, and hold scratch memory that restores want
OUTCOMES_KEPT_MAX = 4096

Send = Callable[[str, str, object], bool]


@dataclass
class _Sending:
    ticket: asyncio.Future[bytes]
    done: asyncio.Future[tuple[bool, str]]
    heard: bool = False  # the receiver said that it is at work


@dataclass
class _Receiving:
    ticket: bytes = b""


class Replicator:
    """``on_arrived(job, slot)``: a replica was sealed here. ``on_refused(job, node)``: what that node sent did not match.
    ``refusal(job, snapshot, rank)``: why one is not wanted."""

    def __init__(
        self,
        transport: Transport,
        arena: Arena,
        send: Send,
        work: Executor,
        frozen: FrozenParts,
        streams: int = STREAMS_DEFAULT,
        pacer: Pacer | None = None,
    ):
        self._transport, self._arena, self._send, self._frozen = transport, arena, send, frozen
        self._work, self._streams, self._pacer = work, streams, pacer or Pacer()
        self._turns = Turns(lambda: PACED_PUSHES_MAX if self._pacer.paced else PUSHES_MAX)
        self._pushes = ThreadPool(PUSHES_MAX, "push", ready=PUSHES_MAX)
        self._sending: dict[str, _Sending] = {}
        self._receiving: dict[tuple[str, str], _Receiving] = {}
        self._outcomes: dict[tuple[str, str], ReplicaDone] = {}
        self._tasks = Tasks()
        self.on_arrived: Callable[[str, Slot], None] = lambda job, slot: None
        self.on_refused: Callable[[str, str], None] = lambda job, node: None
        self.refusal: Callable[[str, SnapshotId, int], str] = lambda job, snapshot, rank: ""

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, ReplicaOffer):
            self._on_offer(node, job, message)
        elif isinstance(message, ReplicaTicket):
            sending = self._sending.get(message.transfer)
            if sending is not None:
                sending.heard = True
                if message.ticket and not sending.ticket.done():
                    sending.ticket.set_result(message.ticket)
        elif isinstance(message, ReplicaDone):
            sending = self._sending.get(message.transfer)
            if sending is not None and not sending.done.done():
                sending.done.set_result((message.ok, message.reason))
        else:
            return False
        return True

    def close(self) -> None:
        self._pushes.shutdown(wait=False, cancel_futures=True)

    # --- sender -------------------------------------------------------------------------------------------------
    async def replicate(
        self, job: str, slot: Slot, tier: int, to: str, within_s: float = DEADLINE_S
    ) -> tuple[bool, str]:
        """Send the slot's tier prefix to that node. (True, "") once it verified and sealed it; else why not.

        "damage": our own copy does not match its sums. ``within_s``: pacing gives way to be done in so many seconds.
        """
        record = slot.record
        if record is None:
            return False, "slot is gone"

        def gone() -> bool:  # released or void meanwhile: the memory may be filled with another snapshot at any time
            return slot.record is not record

        with self._pacer.transfer("protect", record.layout.live_bytes(tier), within_s, gone) as pace:
            return await self._replicate(job, slot, record, tier, to, pace)

    async def _replicate(
        self, job: str, slot: Slot, record: SlotRecord, tier: int, to: str, pace: Transfer
    ) -> tuple[bool, str]:
        loop = asyncio.get_running_loop()
        transfer = secrets.token_hex(16)
        sending = self._sending[transfer] = _Sending(loop.create_future(), loop.create_future())
        offer = _offer(transfer, record, tier)
        cancelled = threading.Event()

        def say() -> bool:
            return self._send(to, job, offer)

        try:
            async with self._turns:  # before the offer: a ticket that waits for its turn expires
                if slot.record is not record:
                    return False, "slot is gone"
                heard = await _word(say, sending, (sending.ticket, sending.done), OFFER_TIMEOUT_S)
                if not sending.ticket.done():
                    return sending.done.result() if heard else (False, "no answer")
                ticket = _ticket_for(job, offer, sending.ticket.result())
                # Only the live part: the peer asks for the frozen one if it lacks it.
                span = slot.extent[: record.layout.live_bytes(tier)]
                await loop.run_in_executor(self._pushes, self._push, ticket, span, cancelled, pace)
            if not await _word(say, sending, (sending.done,), VERIFY_TIMEOUT_S, said=True):
                return False, "no word after the last byte"
            ok, reason = sending.done.result()
            if not ok and reason == DAMAGE and not await self._ours_is_bad(slot, record):
                reason = "damaged on the way"
            return ok, reason
        except CkptdError as error:
            return False, str(error)
        finally:
            cancelled.set()
            del self._sending[transfer]

    def _push(self, ticket: Ticket, span: memoryview, cancelled: threading.Event, pace: Transfer) -> None:
        failpoint("protect.push")
        streams = PACED_STREAMS if self._pacer.paced else self._streams
        self._transport.push(ticket, [span], streams=streams, cancelled=cancelled, pace=pace)

    async def _ours_is_bad(self, slot: Slot, record: SlotRecord) -> bool:
        return bool(await count_bad(self._work, slot.payload, record.layout, record.sums, record.tier))

    # --- receiver -----------------------------------------------------------------------------------------------
    def _on_offer(self, node: str, job: str, offer: ReplicaOffer) -> None:
        key = (node, offer.transfer)
        outcome = self._outcomes.get(key)
        if outcome is not None:
            self._send(node, job, outcome)
        elif key in self._receiving:
            self._send(node, job, ReplicaTicket(offer.transfer, self._receiving[key].ticket))
        elif reason := self.refusal(job, offer.snapshot, offer.rank):
            self._send(node, job, ReplicaDone(offer.transfer, False, reason))
        else:
            self._receiving[key] = _Receiving()
            self._tasks.spawn(self._receive(node, job, offer))

    async def _receive(self, node: str, job: str, offer: ReplicaOffer) -> None:
        key = (node, offer.transfer)
        ok, reason = False, "internal"
        try:
            slot, reason = await self._take(node, job, offer)
            ok = slot is not None
            failpoint("protect.sealed")
            if slot is not None:
                self.on_arrived(job, slot)
        except (CkptdError, ValueError) as error:
            reason = str(error)
        finally:
            self._receiving.pop(key, None)
            outcome = self._outcomes[key] = ReplicaDone(offer.transfer, ok, "" if ok else reason)
            while len(self._outcomes) > OUTCOMES_KEPT_MAX:
                self._outcomes.pop(next(iter(self._outcomes)))
            self._send(node, job, outcome)

    async def _take(self, node: str, job: str, offer: ReplicaOffer) -> tuple[Slot | None, str]:
        loop = asyncio.get_running_loop()
        layout = await loop.run_in_executor(self._work, Layout.decode, offer.layout)
        record = _record(job, layout, offer)
        nbytes = layout.live_bytes(offer.tier)
        try:
            slot = await loop.run_in_executor(
                self._work, allocate, self._arena, job, offer.rank, nbytes,
                record_bytes(len(offer.layout), len(offer.sums), offer.digests),
            )
        except NoMemory as error:
            return None, f"{NO_MEMORY}: {error.what}"
        try:
            slot.fill()
            live = live_blocks(layout, offer.tier)
            landing = LandingSums(slot.extent[:nbytes], live)
            if await self._let_in(node, job, offer, landing) != offer.sums[: SUM_BYTES * len(live)]:
                raise Changed(DAMAGE)
            if leans(record):
                await self._frozen.support(slot, node, record)
            await loop.run_in_executor(self._work, _seal, slot, record)
        except BaseException as error:
            self._arena.release(slot)
            if isinstance(error, Changed):
                self.on_refused(job, node)
            if isinstance(error, CkptdError):
                return None, error.what
            raise
        return slot, ""

    async def _let_in(self, node: str, job: str, offer: ReplicaOffer, landing: LandingSums) -> bytes:
        """The sums of the blocks as they landed. Raises TransferError. However it ends, nothing writes into the memory afterwards:
        it may be released."""
        incoming = self._transport.expect(landing.buffer, aad=_aad(job, offer), witness=landing.saw)
        try:
            ticket = self._receiving[node, offer.transfer].ticket = incoming.ticket.encode()
            self._send(node, job, ReplicaTicket(offer.transfer, ticket))
            await asyncio.wrap_future(incoming.done)
            return landing.joined()
        finally:
            await settle(incoming)


async def _word(
    say: Callable[[], bool],
    sending: _Sending,
    answers: Collection[asyncio.Future[Any]],
    timeout_s: float,
    *,
    said: bool = False,
) -> bool:
    """One of the answers is there. The receiver may have to touch memory for the first time, or to fetch a frozen part of any
    size; while it is at work it says so to each repeated offer, and its own limits end it."""
    sending.heard = True
    while sending.heard:
        sending.heard = False
        if await ask(say, answers, timeout_s, said=said):
            return True
        said = True
    return False


def _seal(slot: Slot, record: SlotRecord) -> None:
    failpoint("protect.seal")
    slot.seal(record)


def _ticket_for(job: str, offer: ReplicaOffer, data: bytes) -> Ticket:
    """Raises TransferError when the ticket is for something else than what we offered."""
    ticket = Ticket.decode(data)
    if ticket.aad != _aad(job, offer):
        raise TransferError("the ticket is for another transfer")
    return ticket


def _offer(transfer: str, record: SlotRecord, tier: int) -> ReplicaOffer:
    sums = lower_tier(record.layout, record.sums, record.tier, tier)
    return ReplicaOffer(
        transfer, record.snapshot, record.rank, tier, record.layout.encoded, record.objects_bytes, sums, record.digests,
        record.keep,
    )  # fmt: skip


def _record(job: str, layout: Layout, offer: ReplicaOffer) -> SlotRecord:
    snapshot = offer.snapshot
    if min(snapshot.epoch, snapshot.step, snapshot.grant, offer.rank, offer.tier, offer.objects_bytes) < 0:
        raise ValueError("the offer has a negative number")
    if layout.is_frozen:
        raise ValueError("the offer is of no snapshot")
    if layout.rank != offer.rank or len(offer.sums) != SUM_BYTES * block_count(layout, offer.tier):
        raise ValueError("the offer contradicts its layout")
    return SlotRecord(
        job=job,
        snapshot=offer.snapshot,
        rank=offer.rank,
        tier=offer.tier,
        layout=layout,
        objects_bytes=offer.objects_bytes,
        sums=offer.sums,
        digests=offer.digests,
        keep=offer.keep,
    )


def _aad(job: str, offer: ReplicaOffer) -> bytes:
    """What both sides know of the transfer, bound into every sealed chunk."""
    of = offer.snapshot
    return f"replica|{job}|{of.epoch}|{of.step}|{of.grant}|{offer.rank}|{offer.tier}".encode()
