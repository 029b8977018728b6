"""The durable side of a simulated daemon: the real code of ckptd/persist, step by step, beside everything else that happens.

Only the bytes are small: a file stands for the pieces of held slots that would be in it, and a report for the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.persist import manifest as m
from ckptd.persist.commit import commit_made
from ckptd.persist.commits import list_durable
from ckptd.persist.index import Index
from ckptd.persist.lineage import claim_epoch, forgotten_epoch, newest_record
from ckptd.persist.names import SIDE, attempt_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.side import SideWriter, check_side
from ckptd.persist.sums import FileDamage
from tests.sim.broken import Broken
from tests.sim.state import fragments_of
from tests.sim.steps import Steps
from tests.sim.store import JOB, SYNC_S, Committed, Rows

if TYPE_CHECKING:
    from tests.sim.host import Host

COMMIT_S = 0.05
GRACE_S = 3.0  # of retention: short, so that a life sees deletions
__all__ = ["SYNC_S", "Writes"]


class Writes:
    def __init__(self, host: Host) -> None:
        self.host = host
        self._cancelled: set[str] = set()
        self._retaining = 0  # the life of the daemon in which a pass of retention is under way
        self._due: EpochRecord | None = None
        self._readings: dict[tuple[int, int], Reading] = {}  # by life and round

    def steps(self, call: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        Steps(self.host, call, done).start()

    # --- reading and claiming -----------------------------------------------------------------------------------
    def read(self, do: ins.ReadDurable) -> None:
        self.steps(self._look, partial(self._has_read, do))

    def _look(self) -> tuple[EpochRecord | None, int, tuple[SnapshotId, ...]]:
        store = self.host.world.store
        record, forgotten = newest_record(store, JOB), forgotten_epoch(store, JOB)
        return record, forgotten, tuple(info.captured for info in list_durable(store, JOB, self.host.world.policy))

    def _has_read(self, do: ins.ReadDurable, found: Any, error: Exception | None) -> None:
        if error is not None:
            self.host.feed(ev.DurableRead(do.attempt, False, reason=str(error), turn=do.turn))
        else:
            record, forgotten, commits = found
            self.host.feed(ev.DurableRead(do.attempt, True, record, commits, forgotten=forgotten, turn=do.turn))

    def claim(self, do: ins.ClaimEpoch) -> None:
        """Without storage the shell says at once that it is the epoch's."""
        if self.host.world.policy.durable:
            self.steps(partial(self._claim, do.record), partial(self._claimed, do))
        else:
            self.host.later(COMMIT_S, ev.EpochClaimed(do.attempt, do.record.number, True, 0, ""))

    def _claim(self, record: EpochRecord) -> tuple[bool, int]:
        return claim_epoch(self.host.world.store, JOB, record)

    def _claimed(self, do: ins.ClaimEpoch, found: Any, error: Exception | None) -> None:
        ok, taken = found if error is None else (True, 0)
        reason = str(error) if error is not None else ""
        self.host.feed(ev.EpochClaimed(do.attempt, do.record.number, ok, taken, reason))

    # --- files --------------------------------------------------------------------------------------------------
    def cancel(self, attempt: str) -> None:
        self._cancelled.add(attempt)

    def write(self, do: ins.WriteFiles) -> None:
        world = self.host.world
        world.clock.after(world.flush_s * (0.5 + world.rng.random()), self._write, self.host.life, self.host.machine, do)

    def _write(self, life: int, machine: JobMachine, do: ins.WriteFiles) -> None:
        if life != self.host.life or machine is not self.host.machine:  # its process died, or the job was forgotten
            return
        rows = self._rows(do)
        if rows is None or do.attempt in self._cancelled:
            reason = "damage" if rows is None else "cancelled"
            self.host.feed(ev.FilesWritten(do.snapshot, do.attempt, False, reason))
        else:
            self.steps(partial(self._file, do, rows), partial(self._written, do))

    def _file(self, do: ins.WriteFiles, rows: Rows) -> bytes:
        store = self.host.world.store
        directory = attempt_dir(JOB, do.snapshot, do.attempt)
        token = b"%d" % len(store.rows)
        store.rows[token] = rows
        path = f"{self.host.name}-{token.decode()}{SIDE}"
        store.begin(directory)
        out = store.put(f"{directory}/{path}")
        side = SideWriter(out)
        at = side.append(token)
        size, found = side.finish()
        return json.dumps([path, size, found.hex(), at, token.decode()]).encode()

    def _written(self, do: ins.WriteFiles, report: Any, error: Exception | None) -> None:
        """P11: a failed sync is final for this file."""
        if error is not None and "fsync" in str(error):
            self.host.world.oracle.count("a failed sync of a file")
        reason = str(error) if error is not None else ""
        self.host.feed(ev.FilesWritten(do.snapshot, do.attempt, error is None, reason, report or b""))

    def _rows(self, do: ins.WriteFiles) -> Rows | None:
        """None: a slot is damaged."""
        rows: Rows = []
        for slot, piece in do.pieces:
            mem = self.host.memory.get(slot)
            if mem is None or mem.snapshot != do.snapshot or mem.payload is None or mem.layout is None:
                raise Broken(f"P1 slot {slot} of {self.host.name} was reused while it was being written")
            if not mem.intact:
                self.host.feed(ev.SlotDamaged(slot, "found while writing"))
                return None
            fragments = fragments_of(mem.layout)
            for index in piece.numbers(len(fragments)):
                fragment = fragments[index]
                rows.append((fragment.key, fragment.box, mem.piece(index)))
            if piece.objects:
                rows.append(("", piece.rank, mem.piece(-1)))
        return rows

    # --- commits ------------------------------------------------------------------------------------------------
    def commit(self, do: ins.Commit) -> None:
        self.host.world.clock.after(COMMIT_S, self._commit, self.host.life, do)

    def _commit(self, life: int, do: ins.Commit) -> None:
        if life == self.host.life:
            self.steps(partial(self._claim_and_commit, do), partial(self._committed, do))

    def _claim_and_commit(self, do: ins.Commit) -> None:
        store = self.host.world.store
        ok, taken = self._claim(do.record)
        if not ok and taken >= do.record.number:
            raise CkptdError(f"epoch {do.record.number} is claimed by another start")
        directory = attempt_dir(JOB, do.snapshot, do.attempt)
        made = partial(self._made, do, directory)
        commit_made(store, directory, step_dir(JOB, do.snapshot), made, do.keep)
        if store.commits.get(do.snapshot, self._content(do)).tensors != self._content(do).tensors:
            raise Broken(f"P12 {do.snapshot} was committed with two contents")

    def _made(self, do: ins.Commit, directory: str) -> m.Contents:
        """From what was really written. The oracle looks at whether it is whole."""
        store, sides = self.host.world.store, []
        for path, size, found, _, _ in map(json.loads, do.reports):
            if f"{directory}/{path}" in store.tainted:
                raise Broken(f"P11 the commit of {do.snapshot} uses {path}, whose sync had failed")
            reader = store.open(f"{directory}/{path}")
            try:
                check_side(reader, bytes.fromhex(found), path)
            except FileDamage as error:
                raise Broken(f"P4 {path} was reported, and a power cut tore it: {error}") from error
            sides.append(m.SideFile(path, size, found))
        done = store.contents[directory] = self._content(do)
        slices = [(key, box.offsets[0], data) for key, rows in done.tensors.items() for box, data in rows.items()]
        self.host.world.oracle.published(do.snapshot, slices, done.objects)
        manifest = m.Manifest(
            m.FORMAT, m.VERSION, "", "sim", "", JOB, do.attempt, do.snapshot, do.keep, do.record.world, do.record,
            m.BLOCK_BYTES, [], {}, [], [], sides,
        )  # fmt: skip
        return m.Contents(manifest, Index.of([]))

    def _content(self, do: ins.Commit) -> Committed:
        done = Committed(do.snapshot)
        for *_, token in map(json.loads, do.reports):
            for key, where, data in self.host.world.store.rows[token.encode()]:
                if key:
                    done.tensors.setdefault(str(key), {})[where] = data  # type: ignore[index,assignment]
                else:
                    done.objects[where] = data  # type: ignore[index,assignment]
        return done

    def _committed(self, do: ins.Commit, _: Any, error: Exception | None) -> None:
        store, oracle = self.host.world.store, self.host.world.oracle
        reason = str(error) if error is not None else ""
        if error is None and self.host.world.faults.moments.denies_commit():
            oracle.count("a commit reported as failed")
            reason = "EIO"
        elif error is None:
            store.acknowledge(do.snapshot)
            oracle.committed(do.snapshot)
            self._retain(do.record)
        self.host.feed(ev.CommitDone(do.snapshot, do.attempt, not reason, reason))

    def _retain(self, record: EpochRecord) -> None:
        """One pass at a time, as daemon/retention.py does it."""
        self._due = record
        if self._retaining != self.host.life:
            self._pass(None, None)

    def _pass(self, done: Any, _: Exception | None) -> None:
        if done is not None:
            for kind in ("hidden", "revealed", "deleted", "ended"):
                if getattr(done, kind):
                    self.host.world.oracle.count(f"retention: {kind}")
        record, self._due = self._due, None
        self._retaining = self.host.life if record is not None else 0
        if record is not None:
            store, policy = self.host.world.store, self.host.world.policy
            self.steps(partial(retain, store, JOB, policy, epoch=record, grace_s=GRACE_S, at_once=1), self._pass)

    # --- restores -----------------------------------------------------------------------------------------------
    def opens(self, do: ins.PrepareRestore, then: Callable[[], None]) -> None:
        """``then`` is called when the checkpoint is open, or cannot be opened."""
        reading = self._readings.get((self.host.life, do.round))
        if reading is None:
            reading = self._readings[self.host.life, do.round] = Reading(self, do)
            self.steps(reading.open, reading.opened)
        reading.tell(then)

    def stored(self, do: ins.PrepareRestore) -> Committed | None:
        reading = self._readings.get((self.host.life, do.round))
        return reading.content if reading is not None else None

    def close(self) -> None:
        """The restore is over."""
        for reading in self._readings.values():
            reading.close()
        self._readings.clear()


class Reading:
    """A checkpoint that is being restored from: claim, lease, manifest, as daemon/rebuild_host.py does it."""

    def __init__(self, writes: Writes, do: ins.PrepareRestore) -> None:
        self._writes, self._do = writes, do
        self.checkpoint: Checkpoint | None = None
        self.content: Committed | None = None
        self._over = self._closed = False
        self._waiting: list[Callable[[], None]] = []

    def open(self) -> Checkpoint:
        assert self._do.snapshot is not None
        store = self._writes.host.world.store
        with suppress(CkptdError):
            claim_epoch(store, JOB, self._do.record)
        return Checkpoint.open(store, JOB, self._do.snapshot)

    def opened(self, checkpoint: Any, error: Exception | None) -> None:
        if error is None:
            self.checkpoint = checkpoint
            manifest = checkpoint.manifest
            directory = attempt_dir(JOB, manifest.snapshot, manifest.attempt)
            self.content = self._writes.host.world.store.contents[directory]
        self._over = True
        for call in self._waiting:
            call()
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        if self.checkpoint is not None:
            self._writes.steps(self.checkpoint.close, lambda *_: None)

    def tell(self, then: Callable[[], None]) -> None:
        if self._over:
            then()
        else:
            self._waiting.append(then)
