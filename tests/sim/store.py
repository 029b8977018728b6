"""Durable storage shared by all nodes: a backend of the real contract, each step an event of its own. Checks itself (P4, P12).

A step takes its time, may fail, and may be done although it says that it failed. What it changed is visible before it is
durable: in between daemons die, other daemons see it, and a power cut takes it back or tears it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from threading import get_ident
from typing import TypeVar

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.state_map.box import Box
from ckptd.persist import lineage
from ckptd.persist.names import SIDE, epoch_of_dir, epochs_dir, step_of_dir
from ckptd.persist.storage.base import Entry, Pointer, Sight, StorageError, SyncFailed
from ckptd.persist.storage.memory import MemoryReader, MemoryStorage, MemoryWriter, Stored
from tests.sim.broken import Broken
from tests.sim.disk import Unsynced
from tests.sim.steps import Steps, end_all

JOB = "0/sim"
STEP_S = 0.004  # on the average
READ_S = 0.6  # at most, of what one node wrote
SYNC_S = 0.01  # between a change and its durability
SLOW_S = 6.0  # at most, of one step while storage is slow ...
SLOW_OF = 0.1  # ... and so many steps are
FAILS_OF = 0.03  # of the steps while storage is failing
WRONG_OF = 0.03  # of the others: done, and the answer is an error

Rows = list[tuple[object, ...]]
T = TypeVar("T")


@dataclass
class Committed:
    """What a checkpoint holds, looked at from outside."""

    snapshot: SnapshotId
    tensors: dict[str, dict[Box, bytes]] = field(default_factory=dict)
    objects: dict[int, bytes] = field(default_factory=dict)


class Store(MemoryStorage):
    def __init__(self, policy: Policy, rng: Random, now: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.policy, self.rng = policy, rng
        self.up = True
        self.full = self.slow = self.failing = False
        self.running: Steps | None = None  # what is under way between two waits
        self.steps: set[Steps] = set()  # under way
        self.ever: set[SnapshotId] = set()  # acknowledged as durable
        self.rows: dict[bytes, Rows] = {}  # what a file's few bytes stand for
        self.contents: dict[str, Committed] = {}  # attempt's path -> what was committed of it
        self.tainted: set[str] = set()  # files whose sync failed
        self.when_written: Callable[[], None] | None = None  # called once, between a change and its sync
        self.unsynced_files = False  # a mistake: writers do not wait for their files
        self.unsynced_commits = False  # another one: nor committers
        self.running_epoch: EpochRecord | None = None  # the newest one whose ranks have loaded ...
        self.read_here = False  # ... its checkpoint, out of this storage
        self._time = now
        self._home = get_ident()  # the thread of the world
        self._changes: dict[int, dict[str, Stored]] = {}  # of what is not durable yet
        self._unsynced = Unsynced()
        self._failed: set[int] = set()  # changes that a power cut took before somebody else could sync them
        self._acknowledged: set[tuple[int, int]] = set()  # (epoch, step), and not deleted by retention

    def close(self) -> None:
        end_all(self)

    def calm(self) -> None:
        self.up, self.full, self.slow, self.failing = True, False, False, False

    def now_s(self) -> float:
        return self._time() if self._time is not None else super().now_s()

    # --- what one step meets ------------------------------------------------------------------------------------
    def wait(self) -> float:
        return self.rng.uniform(0.5, SLOW_S) if self.slow and self.rng.random() < SLOW_OF else 0.0

    def refuses(self, *, writes: bool = True) -> str:
        """The error of a step that does not happen; "": it happens."""
        if not self.up:
            return "storage is gone"
        if self.full and writes:
            return "ENOSPC"
        return "EIO" if self.failing and self.rng.random() < FAILS_OF else ""

    def _steps(self) -> Steps | None:
        """Whose step this is. None: nobody waits for a clock."""
        assert not self.steps or get_ident() == self._home, "by a thread of its own: no seed would be the same world twice"
        return self.running

    def _read(self, call: Callable[[], T]) -> T:
        if self._steps() is not None:
            self._before(writes=False)
        return call()

    def _change(self, call: Callable[[], T], *, takes: bool = False, synced: bool = True) -> T:
        """takes: it makes room."""
        steps = self._steps()
        if steps is None:
            return call()
        self._before(writes=not takes)
        before = dict(self.objects)
        result = call()
        changed = {path for path in before.keys() | self.objects.keys() if before.get(path) is not self.objects.get(path)}
        if changed:
            token = self._wrote(before, changed)
            if synced:
                self._sync(steps, token)
        if self.failing and self.rng.random() < WRONG_OF:
            raise StorageError("EIO, and yet done", errno=errno.EIO)
        return result

    def _before(self, *, writes: bool) -> None:
        assert self.running is not None, "only where somebody waits for a clock"
        self.running.wait(STEP_S * self.rng.uniform(0.3, 1.7) + self.wait())
        reason = self.refuses(writes=writes)
        if reason:
            raise StorageError(reason, where=JOB, errno=errno.ENOSPC if reason == "ENOSPC" else errno.EIO)

    def _wrote(self, before: Mapping[str, Stored], changed: Collection[str]) -> int:
        made = {path: self.objects[path] for path in changed if path in self.objects}

        def undo() -> None:
            for path in changed:
                if self.objects.get(path) is made.get(path):
                    self._take_back(path, before.get(path))

        token = self._unsynced.wrote(undo)
        self._changes[token] = made
        call, self.when_written = self.when_written, None
        if call is not None:
            call()
        return token

    def _take_back(self, path: str, old: Stored | None) -> None:
        """A new file is lost, or only its first half is there."""
        new = self.objects.get(path)
        if old is not None:
            self.objects[path] = old
        elif new is not None and new.data and self.rng.random() < 0.5 and path.endswith(".side"):
            self.objects[path] = replace(new, data=new.data[: len(new.data) // 2])
        else:
            self.objects.pop(path, None)

    def _sync(self, steps: Steps, token: int) -> None:
        made = self._changes[token]
        steps.wait(SYNC_S + self.wait())
        if token in self._changes:  # nobody else has synced it
            del self._changes[token]
            synced = self._unsynced.sync(token) and not self.refuses()
        else:
            synced = token not in self._failed  # each who waits for a sync is told that it failed
        if not synced:
            self.tainted.update(made)
            raise SyncFailed("fsync: EIO", where=JOB, errno=errno.EIO)

    def power_cut(self) -> int:
        """Raises Broken when something acknowledged is lost (P4)."""
        lost = self._unsynced.power_cut(self.rng)
        there = {snapshot.at for snapshot, _ in self._pointers()}
        gone = sorted(self._acknowledged - there)
        if gone:
            raise Broken(f"P4 step {gone[0][1]} of epoch {gone[0][0]} was acknowledged as durable, and a power cut took it")
        return lost

    # --- the contract, step by step -----------------------------------------------------------------------------
    def clock_s(self, path: str) -> float:
        return self._read(lambda: MemoryStorage.clock_s(self, path))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self._change(lambda: MemoryStorage.put_if_absent(self, path, data))

    def list(self, path: str) -> list[Entry]:
        return self._read(lambda: MemoryStorage.list(self, path))

    def open(self, path: str) -> MemoryReader:
        steps = self._steps()
        if steps is not None and path.endswith(SIDE):
            steps.wait(self.rng.uniform(0.0, READ_S))  # it stands for all the bytes of a node
        return self._read(lambda: MemoryStorage.open(self, path))

    def pointers(self, path: str) -> Sequence[Pointer]:
        return self._read(lambda: MemoryStorage.pointers(self, path))

    def delete(self, path: str) -> None:
        self._change(lambda: MemoryStorage.delete(self, path), takes=True)

    def discard(self, path: str) -> None:
        self._change(lambda: MemoryStorage.discard(self, path), takes=True)

    def secure(self, *paths: str) -> None:
        """As a file system does it: what lies below is durable, whoever put it there."""

        def sync() -> None:
            for token, made in list(self._changes.items()):
                if all(path.startswith(tuple(f"{above}/" for above in paths)) for path in made):
                    del self._changes[token]
                    if not self._unsynced.sync(token):
                        self._failed.add(token)
                        raise SyncFailed("fsync: EIO", where=JOB, errno=errno.EIO)

        self._read(sync)

    def put(self, path: str) -> MemoryWriter:
        self._read(lambda: MemoryStorage.put(self, path))
        return FileOfSteps(self, path)

    def finish(self, path: str, data: bytes) -> bool:
        """A whole file of an attempt."""
        return self._change(lambda: MemoryStorage.put_if_absent(self, path, data), synced=not self.unsynced_files)

    def commit_if_absent(
        self, attempt: str, pointer: str, names: Collection[str], beside: Mapping[str, bytes]
    ) -> bool:
        call = super().commit_if_absent
        return self._change(lambda: call(attempt, pointer, names, beside), synced=not self.unsynced_commits)

    def mark(self, pointer: str, name: str, data: bytes) -> None:
        self._change(lambda: MemoryStorage.mark(self, pointer, name, data))

    def unmark(self, pointer: str, name: str) -> bool:
        return self._change(lambda: MemoryStorage.unmark(self, pointer, name), takes=True)

    def hide(self, pointer: str) -> bool:
        return self._change(lambda: MemoryStorage.hide(self, pointer), takes=True)

    def reveal(self, pointer: str) -> bool:
        return self._change(lambda: MemoryStorage.reveal(self, pointer), takes=True)

    def drop(self, pointer: str) -> bool:
        return self._change(lambda: self._drop(pointer), takes=True)

    def _drop(self, pointer: str) -> bool:
        before = [snapshot for snapshot, _ in self._pointers()]
        if not MemoryStorage.drop(self, pointer):
            return False
        after = [snapshot for snapshot, _ in self._pointers()]
        (gone,) = set(before) - set(after)
        self._acknowledged.discard(gone.at)
        epoch = self.running_epoch
        parent = epoch.parent if epoch is not None and self.read_here and self._claimed(epoch) else None
        needed = parent is not None and parent.at == gone.at
        if epoch is not None and needed and not any(map(epoch.is_candidate, after)):
            raise Broken(f"P12 retention deleted {gone}, the last that epoch {epoch.number} can go back to")
        return True

    def _claimed(self, record: EpochRecord) -> bool:
        claim = self.claims.get(record.number)
        return claim is not None and claim.nonce == record.nonce

    # --- looked at from outside ---------------------------------------------------------------------------------
    @property
    def commits(self) -> dict[SnapshotId, Committed]:
        """What readers see."""
        shown = (self.contents[stored.attempt] for _, stored in self._pointers() if stored.sight is Sight.SHOWN)
        return {content.snapshot: content for content in shown}

    def shows(self, snapshot: SnapshotId) -> bool:
        """Its step, whichever capture that is: there is one of each."""
        return any(shown.at == snapshot.at for shown in self.commits)

    def holds(self, snapshot: SnapshotId) -> bool:
        """The same, also hidden."""
        return any(found.at == snapshot.at for found, _ in self._pointers())

    def _pointers(self) -> Sequence[tuple[SnapshotId, Stored]]:
        found = []
        for path, stored in self.objects.items():
            epoch, _, step = path.rpartition("/")
            if stored.attempt and step_of_dir(step) is not None:  # and no commit inside one
                epoch = epoch.rpartition("/")[2]
                found.append((SnapshotId(epoch_of_dir(epoch) or 0, step_of_dir(step) or 0), stored))
        return found

    @property
    def claims(self) -> dict[int, EpochRecord]:
        running, self.running = self.running, None
        try:
            claims: dict[int, EpochRecord] = {}
            for entry in self.list(epochs_dir(JOB)):
                record = lineage._read(self, f"{epochs_dir(JOB)}/{entry.name}")
                claims[record.number] = record
            return claims
        except CkptdError as error:
            raise Broken(f"P12 a claim cannot be read: {error}") from error
        finally:
            self.running = running

    def newest(self) -> EpochRecord | None:
        claims = self.claims
        return claims[max(claims)] if claims else None

    def acknowledge(self, snapshot: SnapshotId) -> None:
        self.ever.add(snapshot)
        if self.holds(snapshot):  # retention may have been there since
            self._acknowledged.add(snapshot.at)

    def went_on(self, record: EpochRecord, *, read_here: bool) -> None:
        """Its ranks have loaded."""
        if self.running_epoch is None or self.running_epoch.number <= record.number:
            self.running_epoch, self.read_here = record, read_here


class FileOfSteps(MemoryWriter):
    def finish(self) -> int:
        assert isinstance(self._storage, Store)
        if not self._storage.finish(self._path, bytes(self._data)):
            raise StorageError("put: File exists", where=self._path, errno=errno.EEXIST)
        return len(self._data)
