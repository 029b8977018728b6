"""Checkpoints that stay for good get whole tensors beside them, where the daemon is told to, on the node that retains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.daemon.services import Services, log
from ckptd.persist.consolidated import consolidate
from ckptd.persist.storage.base import Storage

WITHIN_S = 3600.0  # by then pacing has let all bytes through, whatever that costs training
KIND, WHICH = "retention", "consolidating"  # of health


class Consolidation:
    """In a thread of its own that all jobs share, one checkpoint after the other. What fails is tried again after the next pass of
    retention."""

    def __init__(self, services: Services, job: str) -> None:
        self._services, self._job = services, job
        self._due: dict[SnapshotId, None] = {}
        self._running = False
        self._cancelled = threading.Event()

    def begin(self, lasting: Iterable[SnapshotId]) -> None:
        """lasting: what stays for good, and has none."""
        services = self._services
        if not services.config.consolidate or services.storage is None:
            return
        self._due = dict.fromkeys(lasting)
        if self._due and not self._running:
            self._running = True
            services.spawn(self._run(services.storage), f"consolidate {self._job}")

    def cancel(self) -> None:
        self._due.clear()
        self._cancelled.set()

    async def _run(self, storage: Storage) -> None:
        self._cancelled = threading.Event()
        try:
            while self._due:
                snapshot = next(iter(self._due))
                del self._due[snapshot]
                await self._one(storage, snapshot)
        finally:
            self._running = False
            self._cancelled.set()  # the daemon stops: so does the thread

    async def _one(self, storage: Storage, snapshot: SnapshotId) -> None:
        services, cancelled = self._services, self._cancelled
        try:
            with services.pacer.transfer("flush", 0, WITHIN_S, cancelled.is_set) as pace:
                place = storage, self._job, snapshot, services.node.node
                written = await asyncio.wrap_future(services.consolidating.submit(consolidate, *place, pace, cancelled))
        except (CkptdError, OSError) as error:
            if not cancelled.is_set():
                services.health.event(KIND, f"step {snapshot.step} is not consolidated: {error}", job=self._job, which=WHICH)
            return
        services.health.clear(KIND, job=self._job, which=WHICH)
        if written:
            log.info("job=%s step=%d consolidated: %d bytes", self._job, snapshot.step, written)
