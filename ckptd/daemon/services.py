"""What a job's shell may use of its daemon: one object, so that the rooms are wired in one place (daemon/server.py)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckptd.arena.arena import Arena
from ckptd.core.errors import CkptdError
from ckptd.core.ids import NodeInfo
from ckptd.core.policy import Policy
from ckptd.core.protocol.life import Tombstone
from ckptd.core.state_map.layout import Layout
from ckptd.daemon.state import StateDir
from ckptd.observe.health import Health
from ckptd.observe.metrics import Metrics
from ckptd.persist.cache import Cache
from ckptd.persist.storage.base import Storage
from ckptd.protect.cards import Cards
from ckptd.protect.fetch import Fetcher
from ckptd.protect.holdings import Holdings
from ckptd.protect.map_parts import MapParts
from ckptd.protect.pacer import Pacer
from ckptd.protect.parity import ParityMaker
from ckptd.protect.replicate import Replicator
from ckptd.recover.passing import Passings
from ckptd.wire.complaints import Complaints
from ckptd.wire.memfd import read_memfd_object

if TYPE_CHECKING:
    from ckptd.config import Config

log = logging.getLogger("ckptd.daemon")
T = TypeVar("T")

LIST_TIMEOUT_S = 5.0  # storage that does not answer by then: what memory holds is listed without it


@dataclass
class Services:
    config: Config
    node: NodeInfo
    policy: Policy
    state: StateDir
    arena: Arena
    replicator: Replicator
    fetcher: Fetcher
    pacer: Pacer
    cards: Cards
    map_parts: MapParts
    holdings: Holdings
    passings: Passings
    parity: ParityMaker
    storage: Storage | None
    cache: Cache | None
    health: Health
    metrics: Metrics
    send: Callable[[str, str, object], bool]  # node, job, message
    connect: Callable[[NodeInfo, str], None]  # of this job
    release: Callable[[str], None]  # all nodes that this job named
    down: Callable[[], list[str]]  # nodes that were told to be so
    work: Executor  # sums, allocation, verification: short, touches memory
    sizing: Executor
    rereading: Executor  # what was written
    consolidating: Executor
    disk: Executor  # short words with storage: claims, lists; may hang all the same
    flush: Executor  # files and commits: minutes each, and must not keep a claim or a list waiting
    forget_job: Callable[[str, Tombstone], None]
    forget_if_empty: Callable[[str], None]  # a name somebody only asked about
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    complaints: Complaints = field(default_factory=lambda: Complaints(to=log))  # about local users
    given_up: dict[str, asyncio.Future[Any]] = field(default_factory=dict)  # job -> a list of it that storage has not answered yet
    reading: dict[int, asyncio.Lock] = field(default_factory=dict)  # uid -> who reads an object of his

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        """Unix time, for people; decisions use now()."""
        return time.time()

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[Any]:
        """A task whose failure is a fact of health, never lost."""
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        task.set_name(name)
        self.tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.went_wrong(task.get_name(), task.exception())

    def went_wrong(self, what: str, error: BaseException | None, job: str = "") -> None:
        """A fault of ours, not of the world: the log has the trace, health says that there is one."""
        log.error("%s failed", what, exc_info=error)
        text = f"{what}: {error!r}" if job else f"{type(error).__name__}: the log has more"  # the second is for everybody's eyes
        self.health.event("internal", text, job=job)

    async def in_work(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.work, call, *args)

    async def in_sizing(self, call: Callable[..., T], *args: Any) -> T:
        """What touches new memory takes minutes, and must hold up no restore and no seal."""
        return await asyncio.get_running_loop().run_in_executor(self.sizing, call, *args)

    async def read_object(self, uid: int, fd: int, bytes_max: int, parse: Callable[[bytes], T]) -> T:
        """``parse`` of a sealed memfd, in a thread. Of each user one at a time; the others wait unread (D20). Takes ``fd``. Raises
        ValueError."""
        try:
            async with self.reading.setdefault(uid, asyncio.Lock()):
                return await self.in_work(_read_and(parse), fd, bytes_max)
        finally:
            os.close(fd)

    def read_layout(self, uid: int, fd: int, bytes_max: int) -> asyncio.Future[Layout]:
        """The same of a layout, its id as well. Takes ``fd``. ValueError: it is none."""
        future = asyncio.ensure_future(self.read_object(uid, fd, bytes_max, _decode))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever needs it asks
        return future

    async def on_disk(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.disk, call, *args)

    async def listed(self, call: Callable[..., T], storage: Storage, job: str, *args: Any) -> T:
        """For people, who do not wait for storage. Raises CkptdError when it does not answer soon. As long as a list that was given
        up has not ended, no other of its job is begun: they would pile up."""
        until, before = self.now() + LIST_TIMEOUT_S, self.given_up.get(job)
        if before is not None:
            await asyncio.wait({before}, timeout=LIST_TIMEOUT_S)
        if before is None or before.done():
            asked = asyncio.ensure_future(self.on_disk(call, storage, job, *args))
            await asyncio.wait({asked}, timeout=max(0.0, until - self.now()))
            if asked.done():
                return asked.result()
            self.given_up[job] = asked
            asked.add_done_callback(partial(self._list_ended, job))
        raise CkptdError(f"no answer within {LIST_TIMEOUT_S:.0f} s")

    def _list_ended(self, job: str, asked: asyncio.Future[Any]) -> None:
        if self.given_up.get(job) is asked:
            del self.given_up[job]
        if not asked.cancelled():
            asked.exception()  # looked at: whoever asked was told that there is no answer


def _read_and(parse: Callable[[bytes], T]) -> Callable[[int, int], T]:
    return lambda fd, bytes_max: parse(read_memfd_object(fd, bytes_max))


def _decode(data: bytes) -> Layout:
    layout = Layout.decode(data)
    layout.layout_id  # noqa: B018 - made here, kept with it
    if layout.frozen_bytes:
        layout.frozen.layout_id  # noqa: B018
    return layout
