"""What one node's restore has read from a bucket goes on to the nodes that want the same, so that it leaves the bucket once.

Nobody knows beforehand who wants what. So each value has a home, a node that all ask who reads it: the first one is told to, and
the others get it from there as soon as it is read, out of the memory that it was read into. A node asks only for what it is about
to read, few values at a time and each from a place of its own on, so that all of them read, each as much as it can. Whatever goes
wrong between nodes, the bucket still has the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Executor

import xxhash

from ckptd.core.failpoint import failpoint
from ckptd.protect.landing_sums import LandingSums
from ckptd.protect.settle import Answers, Tasks, ended, settle, word_on
from ckptd.protect.verify import fresh_sums, units
from ckptd.recover.threads import Threads
from ckptd.thread_pool import ThreadPool
from ckptd.wire.bulk import Ticket, TransferError, Transport
from ckptd.wire.peer import ReadAsk, ReadTold

GROUP_NODES_MAX = 16  # that pass on to each other: each has a link to all others of them
PASSED_BYTES_MIN = 1 << 20  # reading less costs the bucket no more than asking costs the nodes
READING_MAX = 4  # values that a node reads at a time
FETCHING_MAX = 32  # that it waits for others to have read
HOME_TIMEOUT_S = 5.0
PATIENCE_S, SLOWEST_BYTES_PER_S = 20.0, 20e6  # with whoever reads a value
WORD_TIMEOUT_S = 5.0  # from the last byte to the word on it
PUSHES_MAX = 4

log = logging.getLogger("ckptd.recover")

Send = Callable[[str, str, object], bool]  # node, job, message
Read = Callable[[], Awaitable[None]]


class Passings:
    """Of one daemon: those of the restores that are under way."""

    def __init__(self, transport: Transport, send: Send) -> None:
        self.transport, self.send = transport, send
        self.answers: Answers[ReadTold] = Answers()
        self.pushing: Executor = ThreadPool(PUSHES_MAX, "pass")
        self._open: dict[tuple[str, str], Passing] = {}

    def begin(self, job: str, restore: str, node: str, nodes: Sequence[str]) -> Passing:
        """``restore``: tells it from all others of the job. ``nodes``: that pass on to each other, the same ones on all of them."""
        made = self._open[job, restore] = Passing(self, job, restore, node, nodes)
        return made

    def over(self, passing: Passing) -> None:
        self._open.pop((passing.job, passing.restore), None)

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, ReadTold):
            self.answers.came(message.transfer, message)
        elif isinstance(message, ReadAsk):
            passing = self._open.get((job, message.restore))
            if passing is None or node not in passing.nodes:
                self.send(node, job, ReadTold(message.transfer))
            else:
                passing.on_ask(node, message)
        else:
            return False
        return True

    def close(self) -> None:
        self.pushing.shutdown(wait=False, cancel_futures=True)


class Passing:
    """Of one restore on this node. Memory that was filled here stays as it is until ``forget()``, or ``ended()``."""

    def __init__(self, passings: Passings, job: str, restore: str, node: str, nodes: Sequence[str]) -> None:
        self.job, self.restore, self.nodes = job, restore, tuple(nodes)
        self._passings, self._node = passings, node
        self._turns, self._fetches = asyncio.Semaphore(READING_MAX), asyncio.Semaphore(FETCHING_MAX)
        self._readers: dict[bytes, str] = {}  # of the values whose home is here
        self._coming: dict[bytes, asyncio.Future[memoryview | None]] = {}  # what this node reads, or asks whether to
        self._told: dict[str, ReadTold | None] = {}  # by transfer; None: under way
        self._silent: set[str] = set()  # nodes that did not answer in time, or sent something else
        self._serving, self._pushing = Tasks(), Threads(passings.pushing)
        self._stop = threading.Event()

    def first_of(self, count: int) -> int:
        """Of so many values in the order that all nodes have them in: each begins at another place and goes on from there, as
        neighbours lie side by side in the bucket."""
        return self.nodes.index(self._node) * count // len(self.nodes)

    async def fill(self, key: Hashable, into: memoryview, read: Read) -> bool:
        """``read()`` fills ``into``, or another node that has read what goes by this key. True: that. Raises what ``read`` does."""
        if len(into) < PASSED_BYTES_MIN:
            await read()
            return False
        name = _digest(repr(key))
        async with self._turns:
            reader = await self._read_first(name, into, read)
        if reader == self._node:
            return False
        async with self._fetches:
            if await self._fetch(reader, name, into):
                return True
        async with self._turns:
            await read()
        return False

    async def forget(self) -> None:
        """What was filled up to now is passed to nobody any more."""
        self._coming = {name: coming for name, coming in self._coming.items() if not coming.done()}
        await self._pushing.ended()

    async def ended(self) -> None:
        """Nobody reads that memory any more when this returns."""
        self._passings.over(self)
        self._stop.set()
        for task in self._serving.running:
            task.cancel()
        await ended([*self._serving.running])
        await self._pushing.ended()

    # --- reading ------------------------------------------------------------------------------------------------
    async def _read_first(self, name: bytes, into: memoryview, read: Read) -> str:
        """Who reads it; when that is this node, it has. Others may be sent here before we know that."""
        coming = self._coming[name] = asyncio.get_running_loop().create_future()
        try:
            reader = await self._reader_of(name)
            if reader == self._node:
                await read()
                coming.set_result(into)
            return reader
        finally:
            if not coming.done():  # whoever waits for it reads it by itself
                coming.set_result(None)

    async def _reader_of(self, name: bytes) -> str:
        """The home's word. Where there is none, this node."""
        home = self.nodes[int.from_bytes(name[:8], "big") % len(self.nodes)]
        if home == self._node:
            return self._readers.setdefault(name, self._node)
        if home in self._silent:
            return self._node
        request = ReadAsk(secrets.token_hex(16), self.restore, name)
        told = await self._passings.answers.ask(request.transfer, self._saying(home, request), HOME_TIMEOUT_S)
        if told is None:
            self._is_silent(home, "it does not say who reads")
        return told.reader if told is not None and told.reader in self.nodes else self._node

    async def _fetch(self, reader: str, name: bytes, into: memoryview) -> bool:
        """False: it is not to be had there, and ``into`` holds anything; no stream writes into it any more."""
        if reader in self._silent:
            return False
        landing = LandingSums(into, units([(0, len(into))]))
        patience_s = PATIENCE_S + len(into) / SLOWEST_BYTES_PER_S
        try:
            incoming = self._passings.transport.expect(into, aad=self._aad(name), ttl_s=patience_s, witness=landing.saw)
        except TransferError as error:
            log.info("job=%s nothing is taken over from %s: %s", self.job, reader, error)
            return False
        arrived = asyncio.wrap_future(incoming.done)
        request = ReadAsk(secrets.token_hex(16), self.restore, name, incoming.ticket.encode())
        try:
            with self._passings.answers.to(request.transfer) as answer:
                told = await word_on(self._saying(reader, request), answer, arrived, patience_s, WORD_TIMEOUT_S, reader)
            if told.ok and landing.joined() == told.sums:
                return True
            if told.ok:
                self._is_silent(reader, "it passed on something else than it has read")
        except TransferError as error:
            self._is_silent(reader, error.what)
        finally:
            arrived.cancel()
            await settle(incoming)
        return False

    def _saying(self, node: str, request: ReadAsk) -> Callable[[], bool]:
        return lambda: self._passings.send(node, self.job, request)

    def _is_silent(self, node: str, why: str) -> None:
        if node not in self._silent:
            log.warning("job=%s what %s has read is read from storage again: %s", self.job, node, why)
        self._silent.add(node)

    # --- passing on ---------------------------------------------------------------------------------------------
    def on_ask(self, node: str, request: ReadAsk) -> None:
        """It is said again until there is an answer."""
        if not request.ticket:
            reader = self._readers.setdefault(request.piece, node)
            self._passings.send(node, self.job, ReadTold(request.transfer, reader=reader))
        elif request.transfer not in self._told:
            self._told[request.transfer] = None
            self._serving.spawn(self._serve(node, request))
        elif (told := self._told[request.transfer]) is not None:
            self._passings.send(node, self.job, told)

    async def _serve(self, node: str, request: ReadAsk) -> None:
        told = ReadTold(request.transfer)
        try:
            coming = self._coming.get(request.piece)
            source = await asyncio.shield(coming) if coming is not None else None
            if source is not None and self._coming.get(request.piece) is coming:
                told = ReadTold(request.transfer, True, sums=await self._pushing.run(self._push, source, request))
        except (TransferError, OSError, MemoryError) as error:
            log.info("job=%s %s gets nothing passed on: %s", self.job, node, str(error) or repr(error))
        finally:
            self._told[request.transfer] = told
            self._passings.send(node, self.job, told)

    def _push(self, source: memoryview, request: ReadAsk) -> bytes:
        """In a thread. The sums of what was read, made before it goes."""
        failpoint("restore.pass")
        ticket = Ticket.decode(request.ticket)
        if ticket.aad != self._aad(request.piece):
            raise TransferError("the ticket is for another transfer")
        sums = fresh_sums(source, (0, len(source)))
        self._passings.transport.push(ticket, [source], cancelled=self._stop)
        return sums

    def _aad(self, name: bytes) -> bytes:
        return f"pass|{self.job}|{self.restore}|{name.hex()}".encode()


def group_of(node: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Of all nodes of a restore those that pass on to each other, this one among them; the same on each of them."""
    names = sorted(set(nodes))
    first = names.index(node) // GROUP_NODES_MAX * GROUP_NODES_MAX
    return tuple(names[first : first + GROUP_NODES_MAX])


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())
