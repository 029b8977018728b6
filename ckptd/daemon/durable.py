"""The durable side of one job: epoch claims, flushes, commits. Everything that may hang on storage runs in the
disk threads; a vanished or full storage never stops the event loop or training (P5)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.life import is_grave
from ckptd.core.protocol.machine.context import is_told
from ckptd.core.retention import CommitInfo
from ckptd.daemon.consolidation import Consolidation
from ckptd.daemon.read_back import ReadBack
from ckptd.daemon.retention import Retention
from ckptd.daemon.services import Services, log
from ckptd.persist.commit import commit
from ckptd.persist.commits import list_commits, list_durable, needed_by, shown_of
from ckptd.persist.forget import delete_forgotten
from ckptd.persist.lineage import claim_epoch, forgotten_epoch, newest_record
from ckptd.persist.pieces import HeldPiece
from ckptd.persist.row_deltas import fit_nothing
from ckptd.persist.storage.base import AWAY, FULL, Storage
from ckptd.persist.sums import SlotDamage
from ckptd.persist.writer import write_pieces

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell
T = TypeVar("T")

WRITE_SHARE = 0.5  # of write_timeout_s, and of the time from one flush to the next: by then pacing has let all bytes through
AWAY_TOLD_S = 120.0  # after the newest try that found no storage
CANCEL_PATIENCE_S = 5.0  # for a write that was called off: it notices within a few MiB, unless storage hangs
HUNG_MAX = 2  # threads of one job that storage does not let go of; the others are for other jobs


@dataclass
class Write:
    """``cancelled``: the threads should stop. ``given_up``: they did not, so nobody waits for them any more."""

    cancelled: threading.Event
    given_up: asyncio.Future[bytes]

    def give_up(self) -> None:
        if not self.given_up.done():
            self.given_up.set_result(b"")


class Durable:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job
        self._writing: dict[str, Write] = {}  # by attempt
        self._hung: set[asyncio.Future[Any]] = set()  # given up, and still at it
        self._unfit: Sequence[str] = services.config.row_deltas  # patterns, until they were looked at
        self.flushed_bytes = self.written_bytes = 0  # of state, and what it took to store it; here, in this life of the daemon
        self.damaged: set[SnapshotId] = set()  # found here, or marked on storage when it was last listed
        self.read_back = ReadBack(services, job.job, self.was_damaged)
        self._consolidation = Consolidation(services, job.job)
        then = self._consolidation.begin
        self._retention = Retention(services, job.job, self._hung, HUNG_MAX, self.read_back.waits_for, then)

    # --- lineage ------------------------------------------------------------------------------------------------
    def read(self, do: ins.ReadDurable) -> None:
        self._services.spawn(self._read(do), f"read durable {self._job.job}")

    async def _read(self, do: ins.ReadDurable) -> None:
        attempt, turn = do.attempt, do.turn
        storage, job = self._services.storage, self._job.job
        if storage is None:
            self._job.feed(ev.DurableRead(attempt, True, turn=turn))
            return
        try:
            record = await self._services.on_disk(newest_record, storage, job)
            forgotten = await self._services.on_disk(forgotten_epoch, storage, job)
            commits = await self._services.on_disk(list_durable, storage, job, self._services.policy)
        except (CkptdError, OSError) as error:
            self._services.health.report("storage", str(error))
            self._job.feed(ev.DurableRead(attempt, False, reason=str(error), turn=turn))
            return
        self._services.health.clear("storage")
        if record is not None and is_grave(record):  # whoever was to delete the rest may have died
            self._services.spawn(self._delete_forgotten(storage), f"delete what is left of {job}")
        elif not attempt:  # this node speaks for the job from now on: what its predecessor hid has had its grace, perhaps
            self.retain()
        found = tuple(sorted(info.captured for info in commits))
        self._job.feed(ev.DurableRead(attempt, True, record, found, forgotten=forgotten, turn=turn))

    async def _delete_forgotten(self, storage: Storage) -> None:
        job, in_flush = self._job.job, asyncio.get_running_loop().run_in_executor
        try:
            left = await in_flush(self._services.flush, delete_forgotten, storage, job)
        except (CkptdError, OSError) as error:
            self._services.health.event("storage", f"what is left of a forgotten job cannot be deleted: {error}")
            return
        if left:
            log.info("job=%s forgotten: deleted what an order that did not end had left: %s", job, ", ".join(left))

    def claim(self, do: ins.ClaimEpoch) -> None:
        self._services.spawn(self._claim(do), f"claim epoch {self._job.job} {do.record.number}")

    async def _claim(self, do: ins.ClaimEpoch) -> None:
        storage = self._services.storage
        ok, taken, reason = True, 0, ""
        if storage is not None:
            try:
                ok, taken = await self._services.on_disk(claim_epoch, storage, self._job.job, do.record)
            except (CkptdError, OSError) as error:
                # Without storage the job may protect, not commit (D10): the claim is made up for when it answers, or with a commit.
                ok, reason = True, str(error)
                self._services.health.report("storage", reason)
        self._job.feed(ev.EpochClaimed(do.attempt, do.record.number, ok, taken, reason))

    # --- flush --------------------------------------------------------------------------------------------------
    def write(self, do: ins.WriteFiles) -> None:
        write = Write(threading.Event(), asyncio.get_running_loop().create_future())
        self._writing[do.attempt] = write
        self._services.spawn(self._write(do, write), f"write {self._job.job} {do.snapshot}")

    def within_s(self) -> float:
        """How soon a flush must be done, whatever it costs training: so often durable steps were asked for."""
        config, step_s = self._services.config, self._job.meter.step_s
        every_s = [config.flush_every_s, config.flush_every_steps * (step_s or 0.0)]
        return WRITE_SHARE * min([config.write_timeout_s, *filter(None, every_s)])

    async def _write(self, do: ins.WriteFiles, write: Write) -> None:
        storage, started = self._services.storage, self._services.now()
        ok, reason, report = False, "no storage", b""
        try:
            pieces, moved = self._held(do)
            if storage is not None:
                with self._services.pacer.transfer("flush", moved, self.within_s()) as pace:
                    call = partial(
                        write_pieces, storage, self._job.job, do.snapshot, do.attempt, self._services.node.node,
                        pieces, write.cancelled, per_rank=do.per_rank, dedup=self._services.config.dedup,
                        compress=self._services.config.compress, row_deltas=self._services.config.row_deltas, pace=pace,
                    )  # fmt: skip
                    report = await self._in_flush(call, write.given_up)
                ok, reason = True, ""
                written = await self.read_back.wrote(do.snapshot, report)
                self._tell_unfit(report)
                self.flushed_bytes, self.written_bytes = self.flushed_bytes + moved, self.written_bytes + written
                self._services.metrics.flushed(self._job.job, self._services.now() - started, moved, written)
                self._services.health.clear("flush", job=self._job.job)
                self._services.health.clear("storage")
        except SlotDamage as error:
            reason = str(error)
            slot = self._job.slot(error.slot)
            if slot is not None:  # pinned: it still is what was to be written
                self._job.damaged(slot, slot.record, reason)
        except (CkptdError, OSError) as error:
            reason = str(error)
            self._not_written(error)
            if not write.cancelled.is_set():
                self._services.health.report("flush", reason, job=self._job.job)
                cause = error.what if isinstance(error, CkptdError) else error.strerror or type(error).__name__
                self._job.losses.failed("flush failed", cause, f"{do.snapshot}: {reason}")
        except Exception as error:  # the machine waits for an answer, and keeps the slots until it has one
            reason = f"internal: {error!r}"
            self._services.went_wrong(f"write {self._job.job} {do.snapshot}", error, self._job.job)
        finally:
            write.cancelled.set()  # the daemon stops: so do the threads
            self._writing.pop(do.attempt, None)
        self._job.feed(ev.FilesWritten(do.snapshot, do.attempt, ok, reason, report))

    def _tell_unfit(self, report: bytes) -> None:
        """Once: a pattern with a typo changes nothing else, and others may have what fits it."""
        patterns, self._unfit = self._unfit, ()
        for pattern in fit_nothing(report, patterns):
            text = "row_deltas: no table that this node writes fits %s (two dimensions or more, rows of 64 bytes or more)"
            log.info(f"job=%s {text}", self._job.job, pattern)

    def _held(self, do: ins.WriteFiles) -> tuple[list[HeldPiece], int]:
        pieces: list[HeldPiece] = []
        moved = 0
        for slot_id, piece in do.pieces:
            slot = self._job.slot(slot_id)
            if slot is None or slot.record is None or slot.record.snapshot != do.snapshot:
                raise CkptdError("the slot to write is gone", where=f"slot {slot_id}")
            record = slot.record
            pieces.append(HeldPiece(piece, slot.payload, record, slot_id))
            nbytes = record.layout.fragments.nbytes
            moved += int(nbytes[piece.numbers(len(nbytes))].sum())
        return pieces, moved

    def cancel(self, do: ins.CancelWrite) -> None:
        write = self._writing.get(do.attempt)
        if write is not None and not write.cancelled.is_set():
            write.cancelled.set()
            asyncio.get_running_loop().call_later(CANCEL_PATIENCE_S, write.give_up)

    def cancel_all(self) -> None:
        for write in self._writing.values():
            write.cancelled.set()
        self._retention.cancel()
        self._consolidation.cancel()
        self.read_back.cancel()

    async def _in_flush(
        self, call: Callable[[], T], given_up: asyncio.Future[Any], late: Callable[[], None] = lambda: None
    ) -> T:
        """A thread that hangs in storage must not keep its slots for ever: no snapshot would find a free one. Nor may the
        tries of one job take all threads. ``late``: it was given up, and came to a good end all the same."""
        where = self._services.node.node
        if len(self._hung) >= HUNG_MAX:
            raise CkptdError("storage does not let go of earlier tries", where=where)
        thread = self._services.flush.submit(call)
        work = asyncio.wrap_future(thread)
        await asyncio.wait({work, given_up}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if not thread.cancel():  # it has begun
            self._hung.add(work)
            work.add_done_callback(partial(self._let_go, late))
        raise CkptdError("called off, and storage does not let go of it", where=where)

    def _let_go(self, late: Callable[[], None], work: asyncio.Future[Any]) -> None:
        self._hung.discard(work)
        if not work.cancelled() and work.exception() is None:
            late()

    def commit(self, do: ins.Commit) -> None:
        self._services.spawn(self._commit(do), f"commit {self._job.job} {do.snapshot}")

    async def _commit(self, do: ins.Commit) -> None:
        ok, reason = False, "no storage"
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        limit = asyncio.get_running_loop().call_later(
            self._services.policy.write_timeout_s, given_up.set_result, None
        )
        try:
            if self._services.storage is not None:
                call, late = partial(self._claim_and_commit, do), partial(self._committed, do)
                await self._in_flush(call, given_up, late)
                ok, reason = True, ""
        except (CkptdError, OSError) as error:
            reason = str(error)
            self._not_written(error)
            self._services.health.report("flush", reason, job=self._job.job)
        except Exception as error:  # the steward waits for an answer
            reason = f"internal: {error!r}"
            self._services.went_wrong(f"commit {self._job.job} {do.snapshot}", error, self._job.job)
        finally:
            limit.cancel()
        if ok:
            self._committed(do)
        else:
            self._job.feed(ev.CommitDone(do.snapshot, do.attempt, False, reason))

    def _committed(self, do: ins.Commit) -> None:
        self._job.feed(ev.CommitDone(do.snapshot, do.attempt, True, ""))
        log.info("job=%s epoch=%d step=%d is durable", self._job.job, do.snapshot.epoch, do.snapshot.step)
        self.retain()

    def retain(self, *, full: bool = False) -> None:
        """Something may go. full: storage is."""
        if self._job.record is not None:
            self._retention.begin(self._job.record, full=full)

    def _not_written(self, error: CkptdError | OSError) -> None:
        """The steward tries the flush again; what may go of a full storage is gone by then, or a minute later."""
        number = getattr(error, "errno", 0)
        if number in FULL:
            self.retain(full=True)
        elif number == AWAY:  # until something answers; also a node that has nothing more to write forgets it
            self._services.health.event("storage", str(error), ttl_s=AWAY_TOLD_S)

    def _claim_and_commit(self, do: ins.Commit) -> None:
        storage = self._services.storage
        assert storage is not None
        ok, taken = claim_epoch(storage, self._job.job, do.record)  # idempotent for our own nonce
        if not ok and taken >= do.record.number:
            raise CkptdError(
                f"epoch {do.record.number} was claimed by another start of this job", where=self._job.job,
                hint="nothing more becomes durable until you start the job once more: its name runs twice, this daemon missed "
                "a restart while storage was away, or a claim hung there until its start was over",
            )  # fmt: skip
        commit(
            storage, self._job.job, do.snapshot, do.attempt, do.record, do.reports, do.layouts, do.per_rank, do.keep
        )  # fmt: skip

    def was_damaged(self, snapshot: SnapshotId, text: str) -> None:
        """Whoever read it, back or for a restore, found that."""
        self.damaged.add(snapshot)
        self._services.metrics.quarantined(self._job.job, "disk")
        told = f"checkpoint of step {snapshot.step}, epoch {snapshot.epoch}: {text}"
        self._services.health.event("damage", told, job=self._job.job)
        log.warning("job=%s damaged on storage: %s", self._job.job, told)

    # --- lists --------------------------------------------------------------------------------------------------
    async def steps(self) -> list[dict[str, Any]]:
        """Snapshots in memory and on storage, newest first."""
        rows = {snapshot.at: row for snapshot, row in sorted(self._in_memory().items())}
        record = self._job.record
        stored = await self._listed(list_commits)
        if stored is not None:  # its word counts: a checkpoint that memory was told of may have been deleted since
            rows = {at: {**row, "durable": False} for at, row in rows.items()}
            self.damaged |= {info.captured for info in stored if info.damaged}
        needed = needed_by(stored or ())
        for info in stored or ():
            row = rows.setdefault(info.snapshot.at, _row(info.snapshot, -1, 0, True, "storage"))
            row["durable"], row["keep"], row["damaged"] = True, info.keep, info.damaged
            row["of"], row["needed_by"], row["whole"] = shown_of(info), needed[info.snapshot], info.whole
            row["without"] = row["without"] or info.without
            row["abandoned"] = record is not None and record.abandons(info.snapshot)
            row["where"] = "memory+storage" if row["where"].startswith("memory") else "storage"
        return [rows[at] for at in sorted(rows, reverse=True)]

    def _in_memory(self) -> dict[SnapshotId, dict[str, Any]]:
        record, released, here = self._job.record, self._job.machine.levels.released, self._services.node.node
        if record is None or not is_told(record, here, holds=bool(self._job.machine.slots.sealed)):
            return {}  # what it was told last may be long gone
        without = self._left_out()
        return {
            snapshot: _row(snapshot, told.level, told.wanted, told.durable, "memory", snapshot in without)
            for snapshot, told in self._job.levels.items()
            if told.level >= 0 and not told.void and snapshot not in released
            if record.is_candidate(snapshot)
        }

    def _left_out(self) -> set[SnapshotId]:
        """Snapshots that some rank, of which this node holds something, took without optimizer state."""
        records = (s.record for s in self._services.arena.slots.values() if s.tenant.job == self._job.job)
        return {record.snapshot for record in records if record is not None and record.layout.without}

    async def durable_now(self) -> tuple[SnapshotId, ...] | None:
        """What storage holds of this job at this moment, such that a power cut takes none of it back, and that is not known to be
        damaged; None: it does not answer."""
        commits = await self._listed(list_durable, self._services.policy)
        return None if commits is None else tuple(info.captured for info in commits if not info.damaged)

    async def _listed(self, call: Callable[..., list[CommitInfo]], *args: Any) -> list[CommitInfo] | None:
        """None: there is no storage, or it does not answer, as health says."""
        if self._services.storage is None:
            return None
        try:
            commits = await self._services.listed(call, self._services.storage, self._job.job, *args)
        except (CkptdError, OSError) as error:
            self._services.health.report("storage", str(error))
            return None
        self._services.health.clear("storage")
        return commits


def _row(snapshot: SnapshotId, level: int, wanted: int, durable: bool, where: str, without: bool = False) -> dict[str, Any]:
    return {
        "epoch": snapshot.epoch, "step": snapshot.step, "level": level, "wanted": wanted, "durable": durable,
        "keep": False, "abandoned": False, "where": where, "without": without,
        "damaged": False, "of": [], "needed_by": 0, "whole": False,
    }  # fmt: skip
