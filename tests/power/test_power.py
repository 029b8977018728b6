"""P4, P11: a power cut at any instant of write and commit, on real file systems.

ext4 and XFS on a loop device; the file system's own shutdown ioctl (no log flush) drops everything that was not made
durable, as a power cut does, then the journal is replayed by mounting again. The cut falls before every operation in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.identity import kept_node_id
from ckptd.persist.commits import list_commits
from ckptd.persist.lineage import claim_epoch, newest_record
from ckptd.persist.names import DATA, epoch_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage import posix, posix_file
from ckptd.persist.storage.base import SyncFailed
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.storage.posix_file import PosixWriter
from ckptd.persist.verify import verify_at
from tests.node.checkpoints import JOB, World, check_all, epoch_record, save, small_world
from tests.power.disk import Disk, NoDisk, private_mounts

pytestmark = pytest.mark.root


class PowerCut(BaseException):
    """Nothing of the process may go on."""


@pytest.fixture(params=["ext4", pytest.param("xfs", marks=pytest.mark.chaos)])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with ExitStack() as opened:
        try:
            opened.enter_context(private_mounts())
            made = Disk(request.param, tmp_path)
        except NoDisk as why:
            pytest.skip(str(why))
        opened.callback(made.close)
        yield made


class Cutting(PosixStorage):
    """Cuts the power before the ``cut_at``-th operation (0: never)."""

    def __init__(self, machine: Disk, *, direct: bool, cut_at: int = 0) -> None:
        super().__init__(str(machine.mount / "root"), direct=direct)
        self.machine, self.cut_at, self.count, self.dark = machine, cut_at, 0, False

    def step(self) -> None:
        self.count += 1
        if self.count == self.cut_at:
            self.dark = True
            self.machine.cut()
        if self.dark:
            raise PowerCut

    def make_dir(self, path: str) -> None:
        self.step()
        super().make_dir(path)

    def create(self, path: str) -> PosixWriter:
        self.step()
        out = super().create(path)
        finish = out.finish

        def stepped() -> int:
            self.step()
            return finish()

        out.finish = stepped  # type: ignore[method-assign]
        return out

    def publish(self, source: str, target: str) -> bool:
        self.step()
        return super().publish(source, target)

    def move_dir(self, source: str, target: str) -> bool:
        self.step()
        return super().move_dir(source, target)

    def sync_dir(self, path: str) -> None:
        self.step()
        super().sync_dir(path)

    def move_file(self, source: str, target: str) -> None:
        self.step()
        super().move_file(source, target)

    def unlink(self, path: str) -> None:
        self.step()
        super().unlink(path)

    def delete_tree(self, path: str) -> None:
        self.step()
        super().delete_tree(path)


def listed(storage: PosixStorage) -> set[SnapshotId]:
    return {info.snapshot for info in list_commits(storage, JOB)}


def expect_whole(storage: PosixStorage, snapshots: set[SnapshotId], worlds: dict[SnapshotId, World]) -> None:
    for snapshot in snapshots:
        report = verify_at(storage, step_dir(JOB, snapshot))
        assert report.ok, report.problems
        with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
            check_all(checkpoint, worlds[snapshot])


def torn_directories(storage: PosixStorage) -> list[str]:
    """Step directories with data files but no manifest: what a stock reader would take for a checkpoint."""
    found = []
    for entry in storage.list(epoch_dir(JOB, 1)):
        if "." not in entry.name:
            names = [inner.name for inner in storage.list(f"{epoch_dir(JOB, 1)}/{entry.name}")]
            if any(name.endswith(DATA) for name in names) and "manifest.json" not in names:
                found.append(entry.name)
    return found


def acknowledged(storage: PosixStorage, world: World, snapshot: SnapshotId) -> bool:
    try:
        save(storage, world, snapshot)
    except PowerCut:
        return False
    return True


def test_a_power_cut_before_every_operation(machine: Disk) -> None:
    worlds: dict[SnapshotId, World] = {SnapshotId(1, 1): small_world(2, rows=300)}
    storage = Cutting(machine, direct=True)
    claim_epoch(storage, JOB, epoch_record(1, 2))
    before = storage.count
    save(storage, worlds[SnapshotId(1, 1)], SnapshotId(1, 1))
    total = storage.count - before
    safe = {SnapshotId(1, 1)}
    outcomes = set()
    for cut_at in range(1, total + 2):
        snapshot = SnapshotId(1, 1 + cut_at)
        worlds[snapshot] = small_world(2, seed=cut_at, rows=300)
        cutting = Cutting(machine, direct=cut_at % 2 == 0, cut_at=cut_at)
        done = acknowledged(cutting, worlds[snapshot], snapshot)
        if done:
            machine.cut()  # right after the acknowledgement
        machine.reboot()
        after = PosixStorage(str(machine.mount / "root"))
        found = listed(after)
        assert safe <= found, "a checkpoint that had survived one power cut was lost by another"
        assert snapshot in found or not done, "acknowledged, then lost"
        assert not torn_directories(after)
        expect_whole(after, {snapshot} & found, worlds)
        outcomes.add(snapshot in found)
        safe = found
        assert newest_record(after, JOB) == epoch_record(1, 2)
    expect_whole(PosixStorage(str(machine.mount / "root")), safe, worlds)
    assert outcomes == {True, False}


def test_without_fsync_the_same_cut_loses_it(machine: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method itself: switch our fsyncs off, and an acknowledged checkpoint is gone or torn."""
    monkeypatch.setattr(posix_file, "sync", lambda *_: None)
    monkeypatch.setattr(posix, "sync_entries", lambda *_: None)
    storage = PosixStorage(str(machine.mount / "root"), direct=False)
    save(storage, small_world(2, rows=300), SnapshotId(1, 1))
    machine.cut()
    machine.reboot()
    after = PosixStorage(str(machine.mount / "root"))
    found = listed(after)
    assert not found or not all(verify_at(after, step_dir(JOB, snapshot)).ok for snapshot in found)


def test_a_sync_that_comes_too_late_is_no_success(machine: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: XFS answers the fsync of a directory with success when it was shut down just before, and its changes are gone."""
    storage = PosixStorage(str(machine.mount / "root"))
    storage.make_dir("1000")
    storage.put_if_absent("1000/first", b"first")
    real = os.fsync

    def fsync(fd: int) -> None:
        machine.cut()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SyncFailed):
        storage.sync_dir("1000")


def test_the_identity_survives(machine: Disk) -> None:
    """P4: the name under which this node told the others its facts."""
    found = kept_node_id(machine.mount / "state" / "ckptd")
    machine.cut()
    machine.reboot()
    assert kept_node_id(machine.mount / "state" / "ckptd") == found


def test_a_claim_survives(machine: Disk) -> None:
    for number in range(1, 6):
        assert claim_epoch(PosixStorage(str(machine.mount / "root")), JOB, epoch_record(number)) == (
            True,
            number,
        )
        machine.cut()
        machine.reboot()
        assert newest_record(PosixStorage(str(machine.mount / "root")), JOB) == epoch_record(number)
