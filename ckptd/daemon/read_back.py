"""Each node reads back what it wrote, once that is part of a checkpoint: older ones only go then, and no node reads it all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.daemon.services import Services
from ckptd.persist import report as r
from ckptd.persist.names import file_stem, step_dir, writer_of
from ckptd.persist.storage.base import Storage
from ckptd.persist.verify import read_back

READ_BACK_S = 600.0  # for one node's files; after that the retaining node reads what has no mark
WRITTEN_MAX = 4  # checkpoints remembered as written and not read yet; what is older is left to the retaining node
KIND, WHICH = "retention", "read-back"  # of health


class ReadBack:
    """In a thread that all jobs share, beside those that write: paced as it is, it may take minutes."""

    def __init__(self, services: Services, job: str, on_damage: Callable[[SnapshotId, str], None]) -> None:
        self._services, self._job, self._on_damage = services, job, on_damage
        self._written: dict[SnapshotId, tuple[str, int]] = {}  # writer, bytes
        self._due: dict[SnapshotId, None] = {}
        self._running, self._reads = False, ""
        self._cancelled = threading.Event()

    def waits_for(self, writer: str) -> bool:
        """Is it at work or about to be, or another node that may be? What an earlier life of this daemon wrote nobody reads.
        Called from retention's thread."""
        stem, _, _ = writer.rpartition("-")
        ours = (written for written, _ in tuple(self._written.values()))
        return stem != file_stem(self._services.node.node) or writer in (self._reads, *ours)

    async def wrote(self, snapshot: SnapshotId, report: bytes) -> int:
        """How many bytes."""
        files, nbytes = await self._services.in_work(r.decode, report), 0
        if files.side is not None:
            nbytes = files.side.size + sum(file.size for file in files.files)
            self._written[snapshot] = writer_of(files.side.path), nbytes
        while len(self._written) > WRITTEN_MAX:
            self._written.pop(next(iter(self._written)))
        return nbytes

    def committed(self, snapshot: SnapshotId) -> None:
        """Perhaps by another attempt than the one that wrote here: then none of its files is ours."""
        if snapshot in self._written and self._services.storage is not None:
            self._due[snapshot] = None
            if not self._running:
                self._running = True
                self._services.spawn(self._run(self._services.storage), f"read back {self._job}")

    def cancel(self) -> None:
        self._due.clear()
        self._written.clear()
        self._cancelled.set()

    async def _run(self, storage: Storage) -> None:
        try:
            while self._due:
                snapshot = next(iter(self._due))
                del self._due[snapshot]
                if snapshot in self._written:
                    self._reads, nbytes = self._written[snapshot]
                    del self._written[snapshot]
                    await self._read(storage, snapshot, self._reads, nbytes)
        finally:
            self._running = False
            self._cancelled.set()  # the daemon stops: so does the thread

    async def _read(self, storage: Storage, snapshot: SnapshotId, writer: str, nbytes: int) -> None:
        self._cancelled = cancelled = threading.Event()
        directory, text = step_dir(self._job, snapshot), ""
        try:
            with self._services.pacer.transfer("flush", nbytes, READ_BACK_S / 2) as pace:  # not in the thread, which may hang
                thread = self._services.rereading.submit(read_back, storage, directory, writer, pace, cancelled)
                work = asyncio.wrap_future(thread)
                await asyncio.wait({work}, timeout=READ_BACK_S)
            if not work.done():  # who retains reads it now; storage may hang, or other jobs have more to read
                cancelled.set()
                thread.cancel()
                return
            found = work.result()
            text = "; ".join(found.problems[:1])
            if found.damaged:
                self._on_damage(snapshot, text)
                return
        except (CkptdError, OSError) as error:
            text = str(error)
        finally:
            self._reads = ""
        if not text:  # storage that was away is back
            self._services.health.clear(KIND, job=self._job, which=WHICH)
        elif not cancelled.is_set():
            self._services.health.event(KIND, f"step {snapshot.step}: {text}", job=self._job, which=WHICH)
