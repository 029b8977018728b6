"""What must be on the file system after a power cut, judged from the notebook alone: it knows nothing of the protocol.

P4: what was acknowledged is there, bit-exact. P1, P11: what is listed is whole; what was not acknowledged is there or not,
never half. P12: only what enough newer checkpoints replace may go, nothing late changes what was there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.daemon.state import StateDir
from ckptd.identity import kept_node_id
from ckptd.persist.commits import list_commits
from ckptd.persist.lineage import newest_record
from ckptd.persist.names import DATA, MANIFEST, epoch_of_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.posix import MARKER, PosixStorage
from ckptd.persist.storage.tree import DROPPED, HIDDEN
from ckptd.persist.verify import verify_at
from tests.node.checkpoints import JOB, check_all
from tests.power.life import world_of
from tests.power.notes import KEEP_LAST, Note
from tests.power.promises import Broken, Failed, expect


class Oracle:
    def __init__(self) -> None:
        self.begun: dict[SnapshotId, set[int]] = defaultdict(set)
        self.fixed: dict[SnapshotId, int] = {}  # whose bytes it holds, once that is known
        self.safe: set[SnapshotId] = set()  # acknowledged, or seen after a cut
        self.kept: set[SnapshotId] = set()
        self.claimed: EpochRecord | None = None
        self.persisted: EpochRecord | None = None
        self.asked: list[EpochRecord] = []  # claims and records that were begun
        self.identity = ""
        self.fresh: set[SnapshotId] = set()  # begun in the newest life
        self.retaining = False  # in the newest life
        self.unacknowledged: Counter[str] = Counter()

    def hear(self, notes: Sequence[Note]) -> None:
        """What one life noted down."""
        self.retaining = False
        self.fresh.clear()
        for note in notes:
            expect(note.what != "broken", note.text)
            expect(note.what != "wrong", f"it failed before the power did:\n{note.text}", Failed)
            self._hear(note)

    def _hear(self, note: Note) -> None:
        if note.what == "named":
            expect(
                not self.identity or note.text == self.identity,
                f"the node is {note.text}, it was {self.identity}",
            )
            self.identity = note.text
        elif note.what in ("claiming", "persisting") and note.record is not None:
            self.asked.append(note.record)
        elif note.what == "claimed":
            self.claimed = note.record
        elif note.what == "persisted":
            self.persisted = note.record
        elif note.what == "retaining":
            self.retaining = True
        elif note.snapshot is not None:
            self._of_snapshot(note, note.snapshot)

    def _of_snapshot(self, note: Note, snapshot: SnapshotId) -> None:
        if note.what == "begin":
            self.begun[snapshot].add(note.content)
            self.fresh.add(snapshot)
        elif note.what == "committed":
            self.safe.add(snapshot)
            if len(self.begun[snapshot]) == 1:
                self.fixed.setdefault(snapshot, note.content)
            if note.keep:
                self.kept.add(snapshot)

    # --- after the reboot ---------------------------------------------------------------------------------------
    def check(self, mount: Path) -> None:
        """Raises Broken."""
        try:
            self._check_state(mount / "state")
            if self.claimed is not None or (mount / "store" / MARKER).exists():
                self._check_storage(PosixStorage(str(mount / "store"), create=False, marked=True))
        except (CkptdError, OSError) as error:
            raise Broken(f"cannot be read: {error}") from error

    def _check_state(self, place: Path) -> None:
        if self.identity:
            found = kept_node_id(place)
            expect(found == self.identity, f"the node was {self.identity}, now it is {found}")
        if self.persisted is not None:
            job = StateDir(place).jobs().get(JOB)
            expect(job is not None, "the state directory has forgotten the epoch")
            assert job is not None
            kept = job.record
            newer = kept.number > self.persisted.number and kept in self.asked
            text = f"the state directory says {kept}, acknowledged was {self.persisted}"
            expect(kept == self.persisted or newer, text)

    def _check_storage(self, storage: PosixStorage) -> None:
        self._check_lineage(newest_record(storage, JOB))
        commits = list_commits(storage, JOB)
        found = {info.snapshot for info in commits}
        self._check_torn(storage)
        for snapshot in sorted(found):
            self._check_whole(storage, snapshot)
        self._check_missing(found)
        marked = {info.snapshot for info in commits if info.keep}
        expect(self.kept <= marked, f"kept ones lost: {sorted(self.kept - marked)}")
        for snapshot in self.fresh - self.safe:
            self.unacknowledged["there" if snapshot in found else "not there"] += 1
        self.safe = found

    def _check_lineage(self, record: EpochRecord | None) -> None:
        if self.claimed is None:
            return
        expect(record is not None, "the claimed epoch is gone")
        assert record is not None
        expect(
            record.number >= self.claimed.number,
            f"epoch {self.claimed.number} was claimed, the newest is {record.number}",
        )
        expect(record == self.claimed or record in self.asked, f"nobody asked for {record}")
        if record.number == self.claimed.number:
            expect(record == self.claimed, f"epoch {record.number} belongs to somebody else now")

    def _check_whole(self, storage: PosixStorage, snapshot: SnapshotId) -> None:
        report = verify_at(storage, step_dir(JOB, snapshot))
        expect(report.ok, f"{snapshot} is listed and damaged: {report.problems}")
        fixed = self.fixed.get(snapshot)
        contents = self.begun[snapshot] if fixed is None else {fixed}
        with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
            found = [content for content in contents if _holds(checkpoint, content)]
        expect(found, f"{snapshot} holds other bytes than were committed")
        self.fixed[snapshot] = found[0]

    def _check_missing(self, found: set[SnapshotId]) -> None:
        restorable = {snapshot for snapshot in found if self._is_candidate(snapshot)}
        expect(restorable or not self.safe, "no restorable checkpoint is left (P12)")
        for snapshot in sorted(self.safe - found):
            newer = sum(other > snapshot for other in restorable)
            enough = newer >= KEEP_LAST if self._is_candidate(snapshot) else bool(restorable)
            expect(
                self.retaining and enough and snapshot not in self.kept, f"{snapshot} was durable and is gone"
            )

    def _is_candidate(self, snapshot: SnapshotId) -> bool:
        return self.claimed is None or self.claimed.is_candidate(snapshot)

    @staticmethod
    def _check_torn(storage: PosixStorage) -> None:
        """A stock reader loads every data file of a directory that is named like a checkpoint."""
        for top in storage.list(JOB):
            if epoch_of_dir(top.name) is None:
                continue
            for entry in storage.list(f"{JOB}/{top.name}"):
                names = {inner.name for inner in storage.list(f"{JOB}/{top.name}/{entry.name}")}
                data = any(name.endswith(DATA) for name in names)
                torn = data and "." not in entry.name and not names & {MANIFEST, HIDDEN, DROPPED}
                expect(not torn, f"{entry.name} has data files and no manifest")

    @staticmethod
    def check_tidy(mount: Path) -> None:
        """After a life that cleaned up: nothing but checkpoints, claims and records. Raises Broken."""
        found = [
            path
            for path in mount.rglob("*")
            if path.suffix in (".part", ".gone", ".tmp") or "clock-" in path.name
        ]
        litter = [
            path for path in found if path.name != HIDDEN or not path.with_name(MANIFEST).exists()
        ]
        beside = {path.name for left in litter for path in left.parent.iterdir()}
        expect(
            not litter, f"left behind: {[str(path.relative_to(mount)) for path in litter]}, beside {beside}"
        )


def _holds(checkpoint: Checkpoint, content: int) -> bool:
    try:
        check_all(checkpoint, world_of(content))
    except AssertionError:
        return False
    return True
