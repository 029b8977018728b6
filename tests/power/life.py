"""One life of a node under power cuts: identity, state directory, epoch claim, flushes and commits with retention beside
them, as the daemon does them, and what must be refused: attempts and claims that come too late.

Everything runs in a forked process with ckptd's own code; what it may rely on it writes into its notebook.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.daemon.state import Kept, StateDir
from ckptd.identity import kept_node_id
from ckptd.persist.commits import list_commits
from ckptd.persist.lineage import claim_epoch, highest_epoch, newest_record
from ckptd.persist.retention import ATTEMPT_STALE_S, retain
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, World, commit_all, epoch_record, small_world, write_all
from tests.power.mutants import MUTANTS
from tests.power.notes import KEEP_LAST, Life, Note, Notebook
from tests.power.promises import Broken, expect
from tests.power.trap import END, Trap

SNAPSHOTS = 3  # per life
STEPS = 10  # between two
ROWS = 300  # of the largest tensor: 1.2 MB
NODES = 2
FILE_BYTES_MAX = 1 << 19  # so that a node writes several files


@lru_cache(maxsize=32)
def world_of(content: int) -> World:
    return small_world(NODES, seed=content, rows=ROWS)


def fork_of(storage: PosixStorage, chance: random.Random) -> tuple[SnapshotId, ...]:
    """What a restore would continue from, newest first: mostly the newest checkpoint, now and then an older one."""
    record = newest_record(storage, JOB)
    found = [info.snapshot for info in list_commits(storage, JOB)]
    found = sorted(snapshot for snapshot in found if record is None or record.is_candidate(snapshot))
    if not found:
        return ()
    fork = found[-1] if chance.random() < 0.85 else chance.choice(found)
    older = record.ancestry if record is not None else ()
    return (fork, *(other for other in older if other.epoch < fork.epoch))


class Running:
    def __init__(self, life: Life) -> None:
        self.life = life
        self.notebook = Notebook(life.log)
        self.chance = random.Random(life.seed)
        self.trap = Trap(
            life.mount, lambda name: self.note("cut", text=name), life.point, life.nth, life.flags
        )
        self.policy = Policy(keep_last=KEEP_LAST)
        self._retention = ThreadPoolExecutor(1, "retention")
        self._pass: Future[None] | None = None

    def note(self, what: str, **facts: Any) -> None:
        self.notebook.write(Note(what, **facts))

    def promised(self, what: str, **facts: Any) -> None:
        """Noted first: from now on it must be there."""
        self.note(what, **facts)
        self.trap.passes(f"acknowledged {what}")

    def run(self) -> None:
        try:
            if self.life.mutant:
                MUTANTS[self.life.mutant]()
            self.trap.install()
            if self.life.delay_s:
                self.trap.cut_after(self.life.delay_s)
            self._live()
        except BaseException as error:
            if self.trap.dark:  # every operation fails now; the thread that cuts ends us
                threading.Event().wait()
            broken = isinstance(error, Broken)
            self.note("broken" if broken else "wrong", text=str(error) if broken else traceback.format_exc())
            raise
        self.note("counts", counts=self.trap.counts)
        if not self.life.tidy:
            self.trap.cut(END)

    def _live(self) -> None:
        self._start()
        if self.life.tidy:
            self._clean_up()
        if self.life.goes_on is not None:
            self._commit_again(self.life.goes_on)
        for _ in range(SNAPSHOTS):
            self._snapshot()
            self._retain()
        self._retained()
        if self.life.tidy:
            self._clean_up()

    # --- start --------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        place = Path(self.life.mount)
        self.promised("named", text=kept_node_id(place / "state"))
        self.state = StateDir(place / "state")
        self.state.alone()
        self.state.jobs()
        self.storage = PosixStorage(str(place / "store"), direct=self.chance.random() < 0.5)
        self._stale_claim()
        old = newest_record(self.storage, JOB)
        again = self.life.goes_on is not None and self.life.goes_on.record is not None
        self.record = self._again(old) if again else self._next()
        fork = self.record.parent
        self.step = fork.step if fork is not None else 0
        self.note("claiming", record=self.record)
        ok, taken = claim_epoch(self.storage, JOB, self.record)
        assert ok, f"epoch {self.record.number} is refused, {taken} is taken"
        self.promised("claimed", record=self.record)
        self.note("persisting", record=self.record)
        self.state.persist_job(JOB, Kept(self.record))
        self.promised("persisted", record=self.record)

    def _next(self) -> EpochRecord:
        kept = [kept.record.number for kept in self.state.jobs().values()]
        number = 1 + max([highest_epoch(self.storage, JOB), *kept])
        nonce = f"{self.chance.getrandbits(64):016x}"
        return epoch_record(number, NODES, fork_of(self.storage, self.chance), nonce)

    def _again(self, old: EpochRecord | None) -> EpochRecord:
        assert self.life.goes_on is not None and self.life.goes_on.record is not None
        expect(old is not None and old.number >= self.life.goes_on.record.number, "a claimed epoch is lost")
        return self.life.goes_on.record

    def _stale_claim(self) -> None:
        """An epoch that is taken cannot be taken again, whoever asks (P12)."""
        old = newest_record(self.storage, JOB)
        if old is not None:
            ok, _ = claim_epoch(self.storage, JOB, replace(old, nonce="stale"))
            expect(not ok, f"epoch {old.number} was given to a second start of the job")

    # --- flush --------------------------------------------------------------------------------------------------
    def _snapshot(self) -> None:
        self.step += STEPS
        snapshot = SnapshotId(self.record.number, self.step)
        keep, fate = self.chance.random() < 0.2, self.chance.random()
        contents = [self.chance.getrandbits(24) for _ in range(2)]
        if fate < 0.2:
            self._race(snapshot, contents, keep)
        else:
            self._save(snapshot, contents[0], keep)
        if fate > 0.7:  # its twin comes late and must change nothing (P12)
            self._write_and_commit(snapshot, contents[1], False, lambda what, **facts: None)

    def _save(self, snapshot: SnapshotId, content: int, keep: bool) -> None:
        self.note("begin", snapshot=snapshot, content=content)
        self._write_and_commit(snapshot, content, keep, self.promised)

    def _race(self, snapshot: SnapshotId, contents: list[int], keep: bool) -> None:
        """Two committers, two attempts: one of them wins, both are told that it is durable."""
        for content in contents:
            self.note("begin", snapshot=snapshot, content=content)
        with ThreadPoolExecutor(2) as both:
            running = [
                both.submit(self._write_and_commit, snapshot, content, keep, self.promised)
                for content in contents
            ]
        for one in running:
            one.result()

    def _write_and_commit(
        self, snapshot: SnapshotId, content: int, keep: bool, tell: Callable[..., None]
    ) -> None:
        world, attempt = world_of(content), f"a{content:x}"
        reports = write_all(self.storage, world, snapshot, attempt, NODES, FILE_BYTES_MAX)
        facts = {"snapshot": snapshot, "content": content, "attempt": attempt, "keep": keep}
        tell("written", reports=tuple(reports), record=self.record, **facts)
        commit_all(self.storage, world, snapshot, reports, attempt, keep=keep, record=self.record)
        tell("committed", **facts)

    def _commit_again(self, left: Note) -> None:
        """Files that were reported are durable: any committer can go on from the reports alone."""
        assert left.snapshot is not None
        world = world_of(left.content)
        commit_all(
            self.storage, world, left.snapshot, left.reports, left.attempt, keep=left.keep, record=self.record
        )
        self.promised("committed", snapshot=left.snapshot, content=left.content, keep=left.keep)
        self.step = max(self.step, left.snapshot.step)

    # --- retention ----------------------------------------------------------------------------------------------
    def _retain(self) -> None:
        """As the daemon does: one pass at a time, beside the next flush."""
        if self._pass is None or self._pass.done():
            self._retained()
            self.note("retaining")
            grace_s = 0.0 if self.chance.random() < 0.8 else ATTEMPT_STALE_S
            self._pass = self._retention.submit(self._one_pass, grace_s)

    def _one_pass(self, grace_s: float) -> None:
        done = retain(self.storage, JOB, self.policy, grace_s=grace_s)
        assert not done.problems, done.problems

    def _clean_up(self) -> None:
        """As if a day had passed: nobody reads any more, and nobody is at work."""
        retain(self.storage, JOB, self.policy, grace_s=0, stale_s=0, attempt_stale_s=0)

    def _retained(self) -> None:
        if self._pass is not None:
            self._pass.result()
