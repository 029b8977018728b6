"""Old checkpoints of one job go after each commit, where a flush found no room, when a steward begins, and once more when what was
hidden has had its grace: the next commit may lack just that room. One pass at a time, in a flush thread, with a limit (P5, P12)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.daemon.read_back import READ_BACK_S
from ckptd.daemon.services import Services, log
from ckptd.persist.retention import READER_GRACE_S, Retained, retain
from ckptd.persist.storage.base import Storage

RETENTION_TIMEOUT_S = 3600.0  # of one pass: this node alone reads whole checkpoints back before it deletes any
CANCEL_PATIENCE_S = 5.0  # for a pass that was called off: it notices between two files, unless storage hangs
AGAIN_S = READER_GRACE_S + 5.0  # after a pass that hid something; storage stamps by its own clock
UNREAD_S = 1.0  # half the pause after a first pass that came before the writers had read back what they wrote
KIND = "retention"
PROBLEMS_TOLD_MAX = 5  # of the damage that one pass read back


class Retention:
    """``hung``: threads of the job that storage does not let go of, shared with its flushes (Durable); a pass that hangs is
    one of them, and no other begins until it ends: several would take the threads of all jobs. ``then``: what it leaves for good
    (Retained.lasting) after each pass."""

    def __init__(
        self,
        services: Services,
        job: str,
        hung: set[asyncio.Future[Any]],
        hung_max: int,
        waits_for: Callable[[str], bool],
        then: Callable[[list[SnapshotId]], None],
    ) -> None:
        self._services, self._job, self._then = services, job, then
        self._hung, self._hung_max = hung, hung_max
        self._due = self._running = False
        self._epoch: EpochRecord | None = None
        self._cancelled = threading.Event()
        self._again: asyncio.TimerHandle | None = None
        self._unread_s, self._writers_s, self._waits_for = UNREAD_S, READ_BACK_S, waits_for

    def begin(self, epoch: EpochRecord, *, full: bool = False) -> None:
        """Something may go, of this epoch's job. One pass sees all that is there when it begins. full: storage is, so that it does
        not wait for those who read back what they wrote."""
        self._epoch, self._unread_s = epoch, UNREAD_S
        if full or not self._due:
            self._writers_s = 0.0 if full else READ_BACK_S
        self._look()

    def _look(self) -> None:
        self._due = True
        if not self._running and self._services.storage is not None:
            self._running = True
            self._services.spawn(self._run(self._services.storage), f"retention {self._job}")

    def cancel(self) -> None:
        self._due = False
        self._cancelled.set()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None

    async def _run(self, storage: Storage) -> None:
        try:
            while self._due:
                self._due = False
                await self._pass(storage)
        except (CkptdError, OSError) as error:
            self._services.health.event(KIND, str(error), job=self._job, which="pass")
        finally:
            self._running = False
            self._cancelled.set()  # the daemon stops: so does the thread

    async def _pass(self, storage: Storage) -> None:
        if len(self._hung) >= self._hung_max:
            raise CkptdError("storage does not let go of earlier tries", where=self._services.node.node)
        self._cancelled = cancelled = threading.Event()
        call = partial(
            retain, storage, self._job, self._services.policy, epoch=self._epoch, writers_s=self._writers_s,
            waits_for=self._waits_for, cancelled=cancelled,
        )
        thread = self._services.flush.submit(call)
        work = asyncio.wrap_future(thread)
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # looked at, also when nobody waits any more
        await asyncio.wait({work}, timeout=RETENTION_TIMEOUT_S)
        if not work.done() and not thread.cancel():
            cancelled.set()
            await asyncio.wait({work}, timeout=CANCEL_PATIENCE_S)
            await self._until_let_go(work)
        if work.cancelled():
            raise CkptdError(f"no flush thread was free for {RETENTION_TIMEOUT_S:.0f} s", where=self._job)
        done = work.result()
        self._services.health.clear(KIND, job=self._job, which="pass")
        self._tell(done)
        self._then(done.lasting)
        self._stop_waiting()
        self._unread_s = min(2 * self._unread_s, AGAIN_S) if done.unread else UNREAD_S
        if (done.waiting or done.unread) and not cancelled.is_set():
            pause_s = self._unread_s if done.unread else AGAIN_S
            self._again = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _tell(self, done: Retained) -> None:
        for problem in done.problems[:PROBLEMS_TOLD_MAX]:
            self._services.health.event(KIND, problem, job=self._job)
        if done.hidden or done.revealed or done.deleted or done.ended:
            gone = f"hid {_steps(done.hidden)}, revealed {_steps(done.revealed)}, deleted {len(done.deleted)}"
            log.info("job=%s retention: %s%s", self._job, gone, f"; {done.ended}" if done.ended else "")

    async def _until_let_go(self, work: asyncio.Future[Any]) -> None:
        if work.done():
            return
        text = "storage does not let go of a retention; old checkpoints stay until it does"
        self._services.health.report(KIND, text, job=self._job, which="hung")
        self._hung.add(work)
        try:
            await asyncio.wait({work})
        finally:
            self._hung.discard(work)
            self._services.health.clear(KIND, job=self._job, which="hung")


def _steps(snapshots: list[SnapshotId]) -> str:
    return ", ".join(str(snapshot.step) for snapshot in snapshots) or "nothing"
