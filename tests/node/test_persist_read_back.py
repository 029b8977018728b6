"""Before older checkpoints go the newest is read back: by its writers, each its own files, what they left by who retains (P12)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist.commits import list_commits
from ckptd.persist.names import DAMAGED, DATA, READ, step_dir, writer_of
from ckptd.persist.retention import Retained, retain
from ckptd.persist.storage.base import StorageError
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.verify import read_back
from tests.node.checkpoints import JOB, save, small_world
from tests.node.test_persist_damage import flip

OLD, NEW = SnapshotId(1, 10), SnapshotId(1, 20)
ONE = Policy(keep_last=1)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    made = PosixStorage(str(tmp_path / "root"))
    for snapshot in (OLD, NEW):
        save(made, small_world(rows=40), snapshot)
    return made


def path_of(storage: PosixStorage, snapshot: SnapshotId = NEW) -> Path:
    return Path(storage.locate(step_dir(JOB, snapshot)))


def writers(storage: PosixStorage) -> list[str]:
    return sorted({writer_of(path.name) for path in path_of(storage).glob("*.side")})


def read(storage: PosixStorage, writer: str) -> list[str]:
    return read_back(storage, step_dir(JOB, NEW), writer).problems


def retained(storage: PosixStorage, writers_s: float = 0.0) -> Retained:
    return retain(storage, JOB, ONE, grace_s=0, writers_s=writers_s)


def shown(storage: PosixStorage) -> list[SnapshotId]:
    return [info.snapshot for info in list_commits(storage, JOB)]


def test_who_retains_waits_for_all_writers(storage: PosixStorage) -> None:
    first, second = writers(storage)
    for writer in {writer_of(path.name) for path in path_of(storage, OLD).glob("*.side")}:
        assert read_back(storage, step_dir(JOB, OLD), writer).ok
    done = retained(storage, writers_s=600)
    assert (done.unread, done.verified) == (True, [OLD]), "what is read counts meanwhile: the newest may never be, or not in time"
    assert read(storage, first) == []
    assert retained(storage, writers_s=600).unread
    assert shown(storage) == [OLD, NEW], "nothing goes for what is not read"
    assert read(storage, second) == []
    done = retained(storage, writers_s=600)
    assert (done.unread, done.verified, shown(storage)) == (False, [NEW], [NEW])


@pytest.mark.parametrize("suffix", [DATA, ".side"])
@pytest.mark.parametrize("of_first", [True, False])
def test_what_its_writer_has_read_is_not_read_again(storage: PosixStorage, suffix: str, of_first: bool) -> None:
    """Damage that came after that shows it: of the one's files, which nobody reads any more, and of the other's."""
    first, second = writers(storage)
    assert read(storage, first) == []
    file = next(path_of(storage).glob(f"{first if of_first else second}-*{suffix}"))
    flip(file, file.stat().st_size - 20)
    done = retained(storage)
    found = [problem for problem in done.problems if file.name in problem]
    if of_first and suffix == DATA:
        assert (done.problems, done.verified) == ([], [NEW])
    elif not of_first:
        assert found and shown(storage) == [OLD, NEW], done.problems


def test_who_is_not_waited_for_has_its_files_read_at_once(storage: PosixStorage) -> None:
    first, second = writers(storage)
    assert read(storage, first) == []
    for awaited in (second, first):
        done = retain(storage, JOB, ONE, grace_s=0, writers_s=600, waits_for=lambda writer, name=awaited: writer == name)
        assert done.unread == (awaited == second)
    assert shown(storage) == [NEW]


def test_after_their_time_what_they_left_is_read_by_who_retains(storage: PosixStorage) -> None:
    assert read(storage, writers(storage)[0]) == []
    done = retained(storage)
    assert (done.unread, done.verified, shown(storage)) == (False, [NEW], [NEW])


def test_a_writer_that_finds_damage_leaves_no_mark(storage: PosixStorage) -> None:
    first, second = writers(storage)
    file = next(path_of(storage).glob(f"{first}-*{DATA}"))
    flip(file, file.stat().st_size - 20)
    assert file.name in read(storage, first)[0]
    assert read(storage, second) == [], "it reads its own files alone"
    assert [path.name for path in path_of(storage).glob(f"{READ}*")] == [f"{READ}{second}"]
    assert [info.damaged for info in list_commits(storage, JOB)] == [False, True], "lists say so"
    done = retained(storage)
    assert (done.problems, done.verified, shown(storage)) == ([], [OLD], [OLD, NEW]), "it is not counted on, and not read again"


def test_who_retains_says_of_what_it_finds_damaged_that_it_is(storage: PosixStorage) -> None:
    file = next(path_of(storage).glob(f"*{DATA}"))
    flip(file, file.stat().st_size - 20)
    assert file.name in retained(storage).problems[0]
    assert [info.damaged for info in list_commits(storage, JOB)] == [False, True]
    assert file.name in (path_of(storage) / DAMAGED).read_text()


def test_what_is_out_of_reach_is_not_called_damaged(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = writers(storage)

    def away(*args: object) -> object:
        raise StorageError("does not answer", where="root")

    monkeypatch.setattr(storage, "open", away)
    assert "does not answer" in read(storage, first)[0]
    assert not (path_of(storage) / DAMAGED).exists()


def test_who_wrote_for_another_attempt_or_comes_too_late_or_is_called_off_marks_nothing(storage: PosixStorage) -> None:
    report = read_back(storage, step_dir(JOB, NEW), "n0-00000000")
    assert (report.problems, report.files) == ([], 0)
    assert read_back(storage, step_dir(JOB, SnapshotId(1, 30)), "n0-00000000").problems == []
    cancelled = threading.Event()
    cancelled.set()
    assert read_back(storage, step_dir(JOB, NEW), writers(storage)[0], cancelled=cancelled).problems == ["cancelled"]
    assert not list(path_of(storage).glob(f"{READ}*"))
