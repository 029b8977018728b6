"""Slices of held slots, from the daemon that holds them to one that restores, makes parity, or lacks a frozen part (D8, D11, D14).

The receiver checks what arrives against the sums made at the seal where whole blocks travel, so one look covers the holder's
memory and the wire; the holder verifies and sums parts of blocks. Whoever asks issues the ticket, so bytes only ever
arrive where they were asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from ckptd.arena.arena import Slot, SlotRecord
from ckptd.arena.payload import Payload
from ckptd.arena.sums import bad_blocks
from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import SnapshotId
from ckptd.core.pacing.slowdown import DEADLINE_S
from ckptd.protect.fetched import Fetched, Unanswered
from ckptd.protect.landing_sums import LandingSums
from ckptd.protect.pacer import Pacer
from ckptd.protect.peer_slot import DAMAGE, PACED_STREAMS
from ckptd.protect.settle import Answers, Tasks, in_thread, settle, word_on
from ckptd.protect.verify import copy_verified, count_bad, fresh_sums, stored_sums, units
from ckptd.thread_pool import ThreadPool
from ckptd.wire.bulk import STREAMS_DEFAULT, Changed, Ticket, TransferError, Transport
from ckptd.wire.peer import FetchAsk, FetchBad, FetchDone

ASK_TIMEOUT_S = 600.0  # the first byte or a word: a queue at the holder; one that dies is noticed sooner
ANSWER_TIMEOUT_S = 15.0  # from the last byte to the holder's word on it
SPANS_MAX = 1_000_000
SERVING_MAX = 4096  # transfers under way or waiting for their turn; who is not among them asks again
SERVED_MAX = 4096  # transfers remembered, so that a repeated ask is not served twice
SERVED_KEPT_S = 60.0  # an answer with its sums may be megabytes; an asker waits ANSWER_TIMEOUT_S for it
PUSHES_MAX = 8
PACED_MAX = 4  # for protection, beside them: restores do not wait for these
FREED = "the slot was freed"
MISMATCH = "the slices do not match their sums"
RETRY_PAUSES_S = (0.1, 0.3, 0.9)  # before a restore asks again, over new connections: links reset, and daemons run out of sockets

log = logging.getLogger("ckptd.protect")

Send = Callable[[str, str, object], bool]
Spans = tuple[tuple[int, int], ...]


class Fetcher:
    """``held(job, snapshot, rank)`` finds the slot to serve from; ``on_damage(job, slot, reason)`` hears of bad blocks in it,
    ``on_refused(job, node)`` of bytes from that node that did not match."""

    def __init__(
        self,
        transport: Transport,
        send: Send,
        work: Executor,
        streams: int = STREAMS_DEFAULT,
        pacer: Pacer | None = None,
    ) -> None:
        self._transport, self._send, self._work, self._streams = transport, send, work, streams
        self._pacer = pacer or Pacer()
        self.within_s = DEADLINE_S  # of what is fetched for protection
        self._pushes: Executor = ThreadPool(PUSHES_MAX, "serve", ready=PUSHES_MAX)
        self._paced: Executor = ThreadPool(PACED_MAX, "lend", ready=PACED_MAX)
        self._answers: Answers[FetchDone] = Answers()
        self._serving: set[tuple[str, str]] = set()
        self._served: dict[tuple[str, str], FetchDone] = {}
        self._tasks = Tasks()
        self._closing = threading.Event()
        self.held: Callable[[str, SnapshotId, int], Slot | None] = lambda job, snapshot, rank: None
        self.on_damage: Callable[[str, Slot, str], None] = lambda job, slot, reason: None
        self.on_refused: Callable[[str, str], None] = lambda job, node: None

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, FetchAsk):
            self._on_ask(node, job, message)
        elif isinstance(message, FetchBad):
            slot = self.held(job, message.snapshot, message.rank)
            if slot is not None:
                self.look(job, slot)
        elif isinstance(message, FetchDone):
            self._answers.came(message.transfer, message)
        else:
            return False
        return True

    def look(self, job: str, slot: Slot) -> None:
        """Somebody has reason to think that it is damaged: ``on_damage`` if so."""
        self._tasks.spawn(self._look(job, slot))

    def close(self) -> None:
        self._closing.set()
        for pool in (self._pushes, self._paced):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- asking -------------------------------------------------------------------------------------------------
    async def fetch(
        self, job: str, node: str, snapshot: SnapshotId, rank: int, spans: Spans, into: memoryview,
        *, protects: float = 0.0,
    ) -> Fetched:  # fmt: skip
        """Fill ``into`` with those spans of the slot's payload, one after the other. What is not ``ok`` leaves it undefined.
        ``protects``: what part of one slot's protection this is (1: all of it). Nobody waits for that to go on training, so the
        holder paces it, and it is done again by whoever wants it; 0: for a restore, which asks a few times."""
        assert len(into) == sum(length for _, length in spans), "the buffer is as long as the spans"
        pauses = iter(() if protects else RETRY_PAUSES_S)
        while True:
            found, again = await self._try(job, node, snapshot, rank, spans, into, protects)
            pause_s = next(pauses, None) if again else None
            if pause_s is None:
                return found
            if found.reason == MISMATCH:
                pauses = iter(())  # once more only: if it was not the wire, the holder is looking at its copy
            log.info("job=%s rank %d is asked of %s again: %s", job, rank, node, found.reason)
            await asyncio.sleep(pause_s)

    async def here(
        self, job: str, snapshot: SnapshotId, rank: int, spans: Spans, into: memoryview, looked: str
    ) -> Fetched:
        """The same of what this daemon holds itself. ``looked``: what found the damage, if there is any. Called off or not, nothing
        writes into ``into`` any more when it returns."""
        slot = self.held(job, snapshot, rank)
        record = slot.record if slot is not None else None
        if slot is None or record is None:
            return Fetched(False, "not held here")
        if await in_thread(self._work, copy_verified, slot, record, spans, into):
            return Fetched(True)
        if slot.record is not record:
            return Fetched(False, FREED)
        self.on_damage(job, slot, looked)
        return Fetched(False, DAMAGE)

    async def _try(
        self, job: str, node: str, snapshot: SnapshotId, rank: int, spans: Spans, into: memoryview, protects: float
    ) -> tuple[Fetched, bool]:
        """How it ended, and whether it may end otherwise at once."""
        landing = await asyncio.get_running_loop().run_in_executor(self._work, _landing, spans, into)
        transfer = secrets.token_hex(16)
        try:
            aad = _aad(job, snapshot, rank)
            incoming = self._transport.expect(into, aad=aad, ttl_s=ASK_TIMEOUT_S, witness=landing.saw)
        except TransferError as error:
            return Fetched(False, str(error), away=True), True
        within_s = self.within_s * min(protects, 1.0)
        request = FetchAsk(transfer, snapshot, rank, spans, incoming.ticket.encode(), within_s)
        arrived = asyncio.wrap_future(incoming.done)
        wrong = False
        try:
            with self._answers.to(transfer) as answer:
                say = partial(self._send, node, job, request)
                # The ticket lives as long as we ask, for the holder serves a few at a time.
                done = await word_on(say, answer, arrived, ASK_TIMEOUT_S, ANSWER_TIMEOUT_S, node)
            if not done.ok:
                return Fetched(False, done.reason, done.again), done.again
            if landing.joined() == done.sums:
                return Fetched(True), False
            wrong = True
            self._send(node, job, FetchBad(snapshot, rank))
            return Fetched(False, MISMATCH), True
        except TransferError as error:
            return Fetched(False, str(error), away=True), not isinstance(error, Unanswered)
        finally:
            arrived.cancel()
            await settle(incoming)  # whoever asked may use the memory for something else now
            if wrong or isinstance(incoming.done.exception(), Changed):
                self.on_refused(job, node)

    # --- serving ------------------------------------------------------------------------------------------------
    def _on_ask(self, node: str, job: str, ask: FetchAsk) -> None:
        key = (node, ask.transfer)
        if key in self._served:
            self._send(node, job, self._served[key])
            return
        if key in self._serving or len(self._serving) >= SERVING_MAX:
            return
        self._serving.add(key)
        self._tasks.spawn(self._serve(node, job, ask))

    async def _serve(self, node: str, job: str, ask: FetchAsk) -> None:
        outcome = FetchDone(ask.transfer, False, reason="internal", again=True)  # it says nothing of the slot
        try:
            slot = self.held(job, ask.snapshot, ask.rank)
            record = slot.record if slot is not None else None
            if slot is None or record is None:
                outcome = FetchDone(ask.transfer, False, reason="not held here")
            else:
                loop = asyncio.get_running_loop()
                pool = self._paced if ask.within_s > 0 else self._pushes
                outcome = await loop.run_in_executor(pool, self._deliver, slot, record, ask)
                if outcome.reason == DAMAGE and slot.record is record:  # else it holds something else by now
                    self.on_damage(job, slot, "found while serving a peer")
        except (TransferError, OSError, MemoryError) as error:
            outcome = FetchDone(ask.transfer, False, reason=str(error) or repr(error), again=True)
        except (CkptdError, ValueError) as error:
            outcome = FetchDone(ask.transfer, False, reason=str(error))
        finally:
            self._remember((node, ask.transfer), outcome)
            self._send(node, job, outcome)

    def _remember(self, key: tuple[str, str], outcome: FetchDone) -> None:
        self._serving.discard(key)
        self._served[key] = outcome
        while len(self._served) > SERVED_MAX:
            self._served.pop(next(iter(self._served)))
        asyncio.get_running_loop().call_later(SERVED_KEPT_S, self._served.pop, key, None)

    def _deliver(self, slot: Slot, record: SlotRecord, ask: FetchAsk) -> FetchDone:
        """In a thread. Whole blocks go with the sums made at their seal, so the asker's one look checks memory and wire;
        parts of blocks are verified here and summed."""
        held = record.layout.spans(record.tier)
        if len(ask.spans) > SPANS_MAX or not all(_inside(held, at, n) for at, n in ask.spans):
            raise ValueError("spans outside of the slot")
        failpoint("fetch.serve")
        stored = stored_sums(record.layout, record.sums, record.tier, ask.spans)
        ticket = Ticket.decode(ask.ticket)
        if ticket.aad != _aad(record.job, ask.snapshot, ask.rank):
            raise TransferError("the ticket is for another transfer")
        views = [slot.payload[at : at + n] for at, n in ask.spans]
        partial = [span for span, known in zip(ask.spans, stored, strict=True) if known is None]
        if partial and bad_blocks(slot.payload, record.layout, record.sums, partial, record.tier):
            return FetchDone(ask.transfer, False, reason=DAMAGE)
        sums = _sums(slot.payload, ask.spans, stored)

        def gone() -> bool:  # released or void meanwhile: the memory may be filled with another snapshot at any time
            return slot.record is not record

        if gone():  # what was summed may not be what was verified
            raise CkptdError(FREED)
        self._push(ticket, views, ask.within_s, gone)
        if gone():  # so what went may be of another snapshot; without this word the asker took it for damage on the way
            raise CkptdError(FREED)
        return FetchDone(ask.transfer, True, sums)

    def _push(self, ticket: Ticket, views: list[memoryview], within_s: float, gone: Callable[[], bool]) -> None:
        if within_s <= 0:
            self._transport.push(ticket, views, streams=self._streams, cancelled=self._closing)
            return
        streams = PACED_STREAMS if self._pacer.paced else self._streams
        with self._pacer.transfer("protect", ticket.nbytes, within_s, gone) as pace:
            self._transport.push(ticket, views, streams=streams, cancelled=self._closing, pace=pace)

    async def _look(self, job: str, slot: Slot) -> None:
        record = slot.record
        if record is None:
            return
        bad = await count_bad(self._work, slot.payload, record.layout, record.sums, record.tier)
        if bad and slot.record is record:  # else it was freed and filled anew meanwhile
            self.on_damage(job, slot, f"{bad} blocks do not match their sums")


def _inside(held: Spans, at: int, length: int) -> bool:
    return length >= 0 and any(first <= at and at + length <= first + n for first, n in held)


def _sums(payload: Payload, spans: Spans, stored: list[bytes | None]) -> bytes:
    return b"".join(
        fresh_sums(payload, span) if known is None else known
        for span, known in zip(spans, stored, strict=True)
    )


def _landing(spans: Spans, into: memoryview) -> LandingSums:
    """Of the spans' units, where they will lie once they stand in a row."""
    at, row = 0, []
    for _, length in units(spans):
        row.append((at, length))
        at += length
    return LandingSums(into, row)


def _aad(job: str, snapshot: SnapshotId, rank: int) -> bytes:
    return f"fetch|{job}|{snapshot.epoch}|{snapshot.step}|{snapshot.grant}|{rank}".encode()
