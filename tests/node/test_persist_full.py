"""A full or vanished storage: errors with a hint, nothing left behind, and it goes on when it can (P4, P5)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist import lease
from ckptd.persist.commits import list_commits
from ckptd.persist.names import DATA, attempt_dir, leases_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.storage.base import FULL, NotFound, StorageError
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from tests import places
from tests.node.checkpoints import JOB, check_all, commit_all, save, small_world, write_all
from tests.node.memory_tree import MemoryTree

SNAPSHOT = SnapshotId(1, 10)
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with places.small_disk(tmp_path / "disk", "24m") as place:
        yield place


@places.for_root
def test_a_disk_that_fills_up_while_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space was there when asked for, then somebody else took it."""
    storage = PosixStorage(str(small_disk / "root"))
    monkeypatch.setattr(PosixStorage, "free_bytes", lambda self: 1 << 40)
    world = small_world(2, rows=4000)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(16 << 20))
    with pytest.raises(StorageError) as caught:
        write_all(storage, world, SNAPSHOT, "a1", nodes=1)
    assert caught.value.errno == errno.ENOSPC
    assert "free space" in caught.value.hint
    assert storage.list(attempt_dir(JOB, SNAPSHOT, "a1")) == []
    assert list_commits(storage, JOB) == []
    ballast.unlink()
    save(storage, world, attempt="a2")
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


@places.for_root
def test_a_full_disk_is_noticed_before_writing(small_disk: Path) -> None:
    storage = PosixStorage(str(small_disk / "root"))
    with pytest.raises(StorageError, match=r"[0-9.]+ [KM]iB needed and 16\.0 MiB in reserve, [0-9.]+ [KM]?i?B free") as caught:
        save(storage, small_world(2, rows=4000))
    assert str(small_disk) in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.hint == "free space on the storage, or keep fewer checkpoints if keep_last is above 1"


@places.for_root
def test_a_full_disk_does_not_stop_readers(small_disk: Path) -> None:
    """No room for a lease: reading goes on without one."""
    storage = PosixStorage(str(small_disk / "root"))
    world = small_world(1)
    save(storage, world)
    places.fill(small_disk / "ballast")
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


def test_every_storage_operation_may_fail_once() -> None:
    """The N-th operation fails, for every N: an error with a place, nothing committed in part, and the retry works."""

    class Failing(MemoryTree):
        fail_at = 0
        count = 0

    def failing(name: str):  # type: ignore[no-untyped-def]
        real = getattr(MemoryTree, name)

        def call(self: Failing, *args: str):  # type: ignore[no-untyped-def]
            self.count += 1
            if self.count == self.fail_at:
                raise StorageError(f"{name}: Input/output error", where=self.locate(args[0]), errno=errno.EIO)
            return real(self, *args)

        return call

    for name in ("make_dir", "create", "publish", "move_dir", "sync_dir", "open_file", "entries"):
        setattr(Failing, name, failing(name))
    world = small_world(2, rows=40)
    whole = Failing()
    save(whole, world)
    for fail_at in range(1, whole.count + 1):
        storage = Failing()
        storage.fail_at = fail_at
        with suppress(CkptdError):
            save(storage, world)
        for info in list_commits(storage, JOB):
            with Checkpoint.open(storage, JOB, info.snapshot) as checkpoint:
                check_all(checkpoint, world)
        save(storage, world, attempt="a2")
        with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
            check_all(checkpoint, world)


def test_a_storage_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    world = small_world()
    save(storage, world)
    (tmp_path / "root").rename(tmp_path / "away")
    for call in (
        lambda: write_all(storage, world, SnapshotId(1, 20), "a1"),
        lambda: list_commits(storage, JOB),
        lambda: Checkpoint.open(storage, JOB, SNAPSHOT),
    ):
        with pytest.raises(StorageError, match="vanished"):
            call()
    assert not (tmp_path / "root").exists(), "nothing was written in its place"
    (tmp_path / "away").rename(tmp_path / "root")
    save(storage, world, SnapshotId(1, 20))
    assert [info.snapshot.step for info in list_commits(storage, JOB)] == [10, 20]


def test_a_commit_that_hung_for_an_hour_is_not_acknowledged_once_its_attempt_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: storage lets go of its rename, the last step, and of a pass that took the attempt for dead at one moment."""
    storage, world = PosixStorage(str(tmp_path / "root")), small_world(rows=40)
    save(storage, world, SnapshotId(1, 5))
    reports = write_all(storage, world, SNAPSHOT, "a1")
    attempt, pointer = attempt_dir(JOB, SNAPSHOT, "a1"), step_dir(JOB, SNAPSHOT)
    move_dir, unlink, renamed = storage.move_dir, os.unlink, Future[bool]()

    def hangs(source: str, target: str) -> bool:
        if target != pointer or renamed.done():
            return move_dir(source, target)
        for file in Path(storage.locate(attempt)).iterdir():
            os.utime(file, (1, 1))
        monkeypatch.setattr(os, "unlink", goes_on)
        retain(storage, JOB, Policy())
        return renamed.result()

    def goes_on(name: str, *, dir_fd: int | None = None) -> None:
        if name.endswith(DATA) and not renamed.done():
            try:
                renamed.set_result(move_dir(attempt, pointer))
            except NotFound as error:
                renamed.set_exception(error)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(storage, "move_dir", hangs)
    with pytest.raises(NotFound):
        commit_all(storage, world, SNAPSHOT, reports)
    assert renamed.done()
    assert [info.snapshot.step for info in list_commits(storage, JOB)] == [5]


@places.for_root
def test_a_directory_without_rights() -> None:
    """As an ordinary user below somebody else's directory: the error says what is needed."""
    code = (
        "import os, sys\n"
        "from ckptd.persist.storage.posix import PosixStorage\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "PosixStorage(sys.argv[1]).make_dir('65534/job')\n"
    )
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        root = f"{above}/root"
        PosixStorage(root)
        result = subprocess.run(
            [sys.executable, "-c", code, root], capture_output=True, text=True, cwd=REPO, check=False
        )
    assert "Permission denied" in result.stderr
    assert "needs read and write rights" in result.stderr


def test_nothing_is_there_to_begin_with() -> None:
    assert MemoryStorage().list("1000/gpt") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_reader_goes_on_where_its_lease_cannot_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """P10: of a restore that took more than two minutes that was taken for damage, and an older step was restored."""
    storage, world = PosixStorage(str(tmp_path / "root")), small_world(rows=40)
    save(storage, world)
    monkeypatch.setattr(lease, "LEASE_REFRESH_S", 0.0)

    def fails(path: str) -> None:
        raise StorageError("it does not write", where=path, errno=number)

    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        held = storage.list(leases_dir(JOB))
        for name in ("create", "unlink"):
            monkeypatch.setattr(storage, name, fails)
        check_all(checkpoint, world)
        assert storage.list(leases_dir(JOB)) == held
        if number in FULL:  # there is room again
            monkeypatch.delattr(storage, "create")
            monkeypatch.delattr(storage, "unlink")
            check_all(checkpoint, world)
            assert len(storage.list(leases_dir(JOB))) == 1 and storage.list(leases_dir(JOB)) != held


@places.for_root
def test_old_checkpoints_go_from_a_full_disk(small_disk: Path) -> None:
    """No room for the mark that one was read back, which would only save the next pass the reading (P12)."""
    storage = PosixStorage(str(small_disk / "root"))
    world = small_world(1)
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step))
    places.fill(small_disk / "ballast")
    retain(storage, JOB, Policy(keep_last=1), grace_s=0.0)
    assert [info.snapshot.step for info in list_commits(storage, JOB)] == [20]
    assert storage.free_bytes() > 0


@places.for_root
def test_old_checkpoints_go_where_no_file_can_be_made(tmp_path: Path) -> None:
    """No inode is left, or a quota of files is used up: retention makes none to free some."""
    with places.small_disk(tmp_path / "few", "64m,nr_inodes=100") as few:
        storage = PosixStorage(str(few / "root"))
        for step in (10, 20, 30):
            save(storage, small_world(1, rows=40), SnapshotId(1, step))
        with suppress(OSError):
            for number in range(100):
                (few / f"other-{number}").touch()
        with pytest.raises(StorageError, match="No space"):
            storage.put_if_absent("file", b"")
        done = retain(storage, JOB, Policy(keep_last=1), grace_s=60.0)
        assert [snapshot.step for snapshot in done.hidden] == [10, 20]
        retain(storage, JOB, Policy(keep_last=1), grace_s=0.0)
        assert [info.snapshot.step for info in list_commits(storage, JOB)] == [30]
        assert storage.put_if_absent("file", b"")


def test_nothing_goes_from_a_storage_that_failed_to_take_the_mark_of_what_was_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: a full one would have room afterwards; of any other failure nobody knows what it took along."""
    storage = PosixStorage(str(tmp_path / "root"))
    for step in (10, 20):
        save(storage, small_world(1, rows=40), SnapshotId(1, step))

    def broken(*_: object) -> None:
        raise StorageError("write: Input/output error", errno=errno.EIO)

    monkeypatch.setattr(storage, "mark", broken)
    with pytest.raises(StorageError, match="Input/output"):
        retain(storage, JOB, Policy(keep_last=1), grace_s=0.0)
    assert [info.snapshot.step for info in list_commits(storage, JOB)] == [10, 20]
