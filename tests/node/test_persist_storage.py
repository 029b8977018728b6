"""Storage: the conformance suite for each implementation, and what only a real directory can show."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from random import Random

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist.commits import list_all
from ckptd.persist.names import DATA, MANIFEST, PART, step_dir
from ckptd.persist.retention import retain
from ckptd.persist.storage import posix
from ckptd.persist.storage.base import Entry, Storage, StorageError, read_file
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import MARKER, PosixStorage
from ckptd.persist.storage.posix_file import ALIGN_BYTES, SCRATCH_BYTES, PosixWriter
from tests.descriptors import opened, opened_since
from tests.node.checkpoints import JOB, save, small_world
from tests.node.crash_storage import CrashStorage
from tests.node.storage_conformance import StorageConformance, pattern
from tests.sim.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()


class TestSimulator(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return Store(Policy(), Random(1))


class TestCrashModel(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return CrashStorage()


class _Posix(StorageConformance):
    """The marker would show in the root's listing: the suite runs one directory deeper."""

    @pytest.fixture
    def storage(self, root: Path) -> Storage:
        return Unmarked(str(root), direct=self.direct)

    direct = True


class Unmarked(PosixStorage):
    def entries(self, path: str) -> list[Entry]:
        return [entry for entry in super().entries(path) if entry.name != MARKER]


class TestObjectStore(StorageConformance):
    @pytest.fixture
    def storage(self, bucket: str) -> Storage:
        return storage_at(bucket, create=True)


class TestPosixDirect(_Posix):
    direct = True


class TestPosixBuffered(_Posix):
    direct = False


def test_direct_writes_really_bypass_the_page_cache(root: Path) -> None:
    storage = PosixStorage(str(root))
    out = storage.create("file")
    if not out.direct:
        pytest.skip("this file system has no O_DIRECT")
    flags = [
        line for line in Path(f"/proc/self/fdinfo/{out._fd}").read_text().splitlines() if "flags" in line
    ]
    assert int(flags[0].split()[1], 8) & os.O_DIRECT
    out.write(pattern(SCRATCH_BYTES + 5))
    assert out.finish() == SCRATCH_BYTES + 5


def test_aligned_memory_is_written_in_place(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    copied = []
    copy = PosixWriter._copy
    monkeypatch.setattr(
        PosixWriter, "_copy", lambda self, source: (copied.append(len(source)), copy(self, source))[1]
    )
    memory = mmap.mmap(-1, 8 << 20)
    memory[:] = pattern(8 << 20)
    storage = PosixStorage(str(root))
    out = storage.create("file")
    out.write(memoryview(memory)[:ALIGN_BYTES])
    copied.clear()
    out.write(memoryview(memory))
    out.finish()
    assert sum(copied) == 0
    assert read_file(storage, "file", 1 << 30) == memory[:ALIGN_BYTES] + memory[:]


def test_a_small_file_that_could_not_be_written_leaves_neither_a_file_nor_one_that_is_open(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Unmarked(str(root))
    storage.put_if_absent("before", b"")

    def full(self: PosixWriter, data: bytes) -> None:
        raise StorageError("write: No space left on device", errno=errno.ENOSPC)

    monkeypatch.setattr(PosixWriter, "write", full)
    before = opened()
    with pytest.raises(StorageError, match="No space"):
        storage.put_if_absent("file", b"x")
    assert opened_since(before) == []
    assert [entry.name for entry in storage.list("")] == ["before"]


def test_a_vanished_root_is_an_error_and_its_return_is_noticed(root: Path, tmp_path: Path) -> None:
    """An open handle of the root must not make us write into a directory that was moved away."""
    storage = PosixStorage(str(root))
    storage.put_if_absent("file", b"here")
    root.rename(tmp_path / "away")
    for call in (
        lambda: storage.list(""),
        lambda: storage.create("new"),
        lambda: storage.open("file"),
        storage.free_bytes,
    ):
        with pytest.raises(StorageError, match="vanished") as caught:
            call()
        assert caught.value.hint
    (tmp_path / "away").rename(root)
    assert read_file(storage, "file", 10) == b"here"


def test_an_unmounted_root_is_not_taken_for_an_empty_one(root: Path) -> None:
    storage = PosixStorage(str(root))
    (root / MARKER).unlink()
    with pytest.raises(StorageError, match="lost its"):
        storage.list("")


def test_a_daemon_that_comes_back_does_not_make_up_a_root(root: Path) -> None:
    with pytest.raises(StorageError, match="vanished"):
        PosixStorage(str(root), create=False, marked=True).list("")
    root.mkdir()
    with pytest.raises(StorageError, match="lost its"):
        PosixStorage(str(root), create=False, marked=True).list("")
    assert PosixStorage(str(root), create=False).list("") == []


def test_links_lead_nowhere(root: Path, tmp_path: Path) -> None:
    """P13: whoever owns a directory below the root cannot make the daemon read, write or delete elsewhere."""
    storage = PosixStorage(str(root))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    os.mkfifo(root / "fifo")
    for call in (
        lambda: storage.open("link/secret"),
        lambda: storage.open("file"),
        lambda: storage.open("fifo"),
        lambda: storage.create("link/new"),
        lambda: storage.make_dir("link/new"),
        lambda: storage.unlink("link/secret"),
        lambda: storage.delete_tree("link"),
    ):
        with pytest.raises(StorageError):
            call()
    storage.make_dir("tree")
    (root / "tree" / "inner").symlink_to(outside)
    storage.delete_tree("tree")
    assert (outside / "secret").read_bytes() == b"secret"
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_files_are_private(root: Path) -> None:
    storage = PosixStorage(str(root))
    storage.make_dir("1000/job")
    storage.put_if_absent("1000/job/file", b"x")
    assert stat.S_IMODE((root / "1000/job/file").stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "1000/job").stat().st_mode) == 0o700


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_files_of_a_job_belong_to_its_user(root: Path) -> None:
    storage = PosixStorage(str(root))
    storage.make_dir("1000/job")
    storage.put_if_absent("1000/job/file", b"x")
    assert {(root / name).stat().st_uid for name in ("1000", "1000/job", "1000/job/file")} == {1000}


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CkptdError, match="storage root"):
        PosixStorage(str(tmp_path / "file" / "root"))


def test_errors_carry_a_hint(root: Path) -> None:
    storage = PosixStorage(str(root))
    (root / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        storage.list("file")
    assert caught.value.hint


def test_a_file_that_somebody_holds_open_on_nfs_keeps_no_other_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open on this client gets another name when it is deleted, which cannot be deleted: its directory is not empty."""
    storage, unlink, held = PosixStorage(str(root)), os.unlink, ".nfs000000000001"
    for step in (10, 20, 30):
        save(storage, small_world(rows=40), SnapshotId(1, step))

    def unlinks(name: str, *, dir_fd: int | None = None) -> None:
        if name == held:
            raise OSError(errno.EBUSY, "Device or resource busy")
        here = os.readlink(f"/proc/self/fd/{dir_fd}")
        if name.endswith(DATA) and "step-0000000010" in here and not list(Path(here).glob(f"{held}*")):
            os.rename(name, held, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlinks)
    done = [retain(storage, JOB, Policy(keep_last=1), grace_s=0) for _ in range(2)]
    assert [len(one.deleted) for one in done] == [2, 0]
    (left,) = (root / JOB / "epoch-000001").glob("*.gone")
    assert [path.name for path in left.iterdir()] == [held]
    monkeypatch.undo()
    retain(storage, JOB, Policy(keep_last=1))
    assert [path.name for path in left.parent.iterdir()] == [step_dir(JOB, SnapshotId(1, 30)).rpartition("/")[2]]


def test_a_deletion_that_fails_is_said_unless_somebody_has_a_file_of_it_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, pointer = PosixStorage(str(root)), step_dir(JOB, SnapshotId(1, 10))
    save(storage, small_world(rows=40), SnapshotId(1, 10))
    storage.hide(pointer)

    def fails(name: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        storage.drop(pointer)
    monkeypatch.undo()
    (left,) = (root / JOB / "epoch-000001").glob("*.gone")
    storage.sweep(f"{JOB}/epoch-000001", 0.0)
    assert not left.exists()


def test_a_list_of_checkpoints_looks_at_none_of_their_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 512 nodes have some 1500 each, a network file system is asked for each, and a pass of retention lists many times."""
    storage, looked, real = PosixStorage(str(root)), [], posix._entry
    for step in range(1, 11):
        storage.make_dir(directory := step_dir(JOB, SnapshotId(1, step)))
        for name in ("manifest.json", "verified", *(f"n{number}-0000.safetensors" for number in range(20))):
            (root / directory / name).touch()
    monkeypatch.setattr(posix, "_entry", lambda item: looked.append(item.name) or real(item))
    assert [info.verified for info in list_all(storage, JOB)] == [True] * 10
    assert sorted(looked) == ["epoch-000001", *(f"step-{step:010d}" for step in range(1, 11))]


@pytest.mark.parametrize("stray", [".snapshots", "step-0000000010 (copy)", "step-0000000010~", "\udcff"])
def test_what_others_put_among_the_checkpoints_hides_none(root: Path, stray: str) -> None:
    """P12: one directory that a file system or an operator had put there ended each list of the job: nothing was restored from
    storage any more, nothing became durable and nothing was deleted."""
    storage = PosixStorage(str(root))
    for step in (10, 20):
        save(storage, small_world(rows=40), SnapshotId(1, step))
    for above in (root / JOB, root / JOB / "epoch-000001", root / JOB / "leases"):
        (above / stray).mkdir(parents=True)
    attempt = f"{step_dir(JOB, SnapshotId(1, 30))}.a{PART}"
    storage.begin(attempt)
    (root / attempt / f"{stray}{PART}").touch()
    assert [info.snapshot.step for info in list_all(storage, JOB)] == [10, 20]
    assert [snapshot.step for snapshot in retain(storage, JOB, Policy(keep_last=1), grace_s=0).hidden] == [10]
    assert storage.commit_if_absent(attempt, step_dir(JOB, SnapshotId(1, 30)), [], {MANIFEST: b""})
    assert [info.snapshot.step for info in list_all(storage, JOB)] == [20, 30]
    assert (root / JOB / "epoch-000001" / stray).is_dir()


NOT_FOR_US = ["gs://bucket", "az://a--b/x", "az://b.c/x", "file://elsewhere/x", "s3://", "s3://Bucket", "s3://bucket/a b"]


@pytest.mark.parametrize("root", NOT_FOR_US)
def test_a_scheme_that_no_backend_is_for_is_refused(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no configuration was read: `ckptd ls s3://bucket/x` made nothing of it but a directory that is not there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptdError) as caught:
        storage_at(root, create=True)
    assert caught.value.hint and list(tmp_path.iterdir()) == []


def test_the_factory_takes_a_directory(tmp_path: Path) -> None:
    for root in (str(tmp_path / "root"), f"file://{tmp_path}/root"):
        assert storage_at(root, create=True).locate("") == str(tmp_path / "root")
