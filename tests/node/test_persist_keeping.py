"""P12: what was kept is kept no more once that was undone, before its commit or after it; nothing else loses its mark."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist.commits import list_all
from ckptd.persist.forget import forget_on_storage
from ckptd.persist.keeping import NOTE_STALE_S, apply_notes, release
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.names import KEEP, released_dir, step_dir
from ckptd.persist.retention import retain
from ckptd.persist.storage.base import NotFound
from ckptd.persist.storage.posix import PosixStorage
from ckptd.wire.rank import NO_SUCH_STEP, NOT_KEPT, RELEASED
from tests.node.checkpoints import JOB, World, commit_all, epoch_record, save, small_world, write_all

FIRST = SnapshotId(1, 10)


@pytest.fixture
def world() -> World:
    return small_world(rows=40)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    made = PosixStorage(str(tmp_path / "root"))
    claim_epoch(made, JOB, epoch_record(1, 2))
    return made


def kept(storage: PosixStorage) -> list[tuple[int, int]]:
    return [info.snapshot.at for info in list_all(storage, JOB) if info.keep]


def stands(storage: PosixStorage) -> list[int]:
    return [info.snapshot.step for info in list_all(storage, JOB) if not info.hidden]


def notes(storage: PosixStorage) -> list[str]:
    return [entry.name for entry in storage.list(released_dir(JOB))]


def test_what_stands_may_go_once_it_is_released(storage: PosixStorage, world: World) -> None:
    for step in (10, 20, 30):
        save(storage, world, SnapshotId(1, step), keep=step < 30)
    retain(storage, JOB, Policy(keep_last=1))
    assert stands(storage) == [10, 20, 30]
    record = epoch_record(1, 2)
    assert release(storage, JOB, 20, record, {}) == RELEASED
    assert release(storage, JOB, 20, record, {}) == NOT_KEPT
    assert release(storage, JOB, 30, record, {}) == NOT_KEPT
    assert release(storage, JOB, 25, record, {}) == NO_SUCH_STEP
    retain(storage, JOB, Policy(keep_last=1))
    assert stands(storage) == [10, 30] and kept(storage) == [(1, 10)] and notes(storage) == []
    assert release(storage, JOB, 20, record, {}) == NOT_KEPT, "hidden: it might yet come back"
    retain(storage, JOB, Policy(keep_last=1), grace_s=0)
    assert release(storage, JOB, 20, record, {}) == NO_SUCH_STEP


def test_what_is_to_come_is_not_kept_when_it_is_there(storage: PosixStorage, world: World) -> None:
    """Whoever commits it may not know."""
    assert release(storage, JOB, 10, None, {FIRST: True}) == RELEASED
    assert release(storage, JOB, 10, None, {FIRST: True}) == NOT_KEPT, "it is noted already"
    assert notes(storage) == ["1-10"]
    retain(storage, JOB, Policy(keep_last=1))
    assert notes(storage) == ["1-10"]
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step), keep=step == 10)
    assert kept(storage) == [(1, 10)]
    retain(storage, JOB, Policy(keep_last=1))
    assert stands(storage) == [20] and notes(storage) == []


def test_what_is_marked_by_hand_later_stays_marked(storage: PosixStorage, world: World) -> None:
    release(storage, JOB, 10, None, {FIRST: True})
    save(storage, world, FIRST, keep=True)
    retain(storage, JOB, Policy())
    storage.mark(step_dir(JOB, FIRST), KEEP, b"")
    retain(storage, JOB, Policy())
    assert kept(storage) == [(1, 10)]


class Meets(PosixStorage):
    """A release comes while a commit makes its checkpoint visible, or a commit while a release looks."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.outcomes: list[str] = []
        self.commits: list[World] = []

    def commit_if_absent(self, attempt: str, pointer: str, names: Collection[str], beside: Mapping[str, bytes]) -> bool:
        done = super().commit_if_absent(attempt, pointer, names, beside)
        if not self.commits:
            self.outcomes.append(release(self, JOB, 10, None, {FIRST: True}))
        return done

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if path.startswith(released_dir(JOB)) and self.commits:
            save(self, self.commits[0], FIRST, keep=True)
        return super().put_if_absent(path, data)


@pytest.mark.parametrize("amid", ["the commit", "the release"])
def test_a_release_beside_the_commit(tmp_path: Path, world: World, amid: str) -> None:
    storage = Meets(str(tmp_path / "root"))
    claim_epoch(storage, JOB, epoch_record(1, 2))
    if amid == "the commit":
        save(storage, world, FIRST, keep=True)
    else:
        storage.commits.append(world)
        storage.outcomes.append(release(storage, JOB, 10, None, {FIRST: True}))
    assert storage.outcomes == [RELEASED]
    assert kept(storage) == []


def test_another_attempt_that_was_to_be_kept_marks_what_stands(storage: PosixStorage, world: World) -> None:
    save(storage, world, FIRST)
    commit_all(storage, world, FIRST, write_all(storage, world, FIRST, "a2"), "a2", keep=True)
    assert kept(storage) == [(1, 10)]


def test_a_line_that_was_left_behind_keeps_its_own(storage: PosixStorage, world: World) -> None:
    """The job went back to step 10, and has come to step 20 again."""
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step), keep=True)
    second = epoch_record(2, 2, [FIRST])
    claim_epoch(storage, JOB, second)
    assert release(storage, JOB, 20, second, {}) == NO_SUCH_STEP
    assert release(storage, JOB, 20, second, {SnapshotId(1, 20): True}) == NO_SUCH_STEP and notes(storage) == []
    commit_all(storage, world, SnapshotId(2, 20), write_all(storage, world, SnapshotId(2, 20), "a1"), keep=True, record=second)
    assert release(storage, JOB, 20, second, {}) == RELEASED
    assert kept(storage) == [(1, 10), (1, 20)]
    with pytest.raises(CkptdError, match=r"(?s)epoch 2 of this job was opened elsewhere.*ask a daemon on which the job runs now"):
        release(storage, JOB, 10, epoch_record(1, 2), {})
    assert release(storage, JOB, 10, epoch_record(3, 2, [SnapshotId(2, 20), FIRST]), {}) == RELEASED, "its claim is still to come"


def test_a_note_of_what_never_came_goes(storage: PosixStorage) -> None:
    release(storage, JOB, 10, None, {FIRST: True})
    (entry,) = storage.list(released_dir(JOB))
    apply_notes(storage, JOB, entry.mtime_s + NOTE_STALE_S - 1)
    assert notes(storage) == ["1-10"]
    apply_notes(storage, JOB, entry.mtime_s + NOTE_STALE_S)
    assert notes(storage) == []
    release(storage, JOB, 10, None, {FIRST: True})
    forget_on_storage(storage, JOB, 1)
    assert notes(storage) == []


def test_what_comes_and_was_not_to_be_kept_has_nothing_to_undo(storage: PosixStorage) -> None:
    assert release(storage, JOB, 10, None, {FIRST: False}) == NOT_KEPT
    assert notes(storage) == ["1-10"], "another rank may have said that it is to be kept"


@pytest.mark.parametrize("claimed", [False, True])
def test_what_a_later_epoch_left_behind_is_no_step_of_the_job(storage: PosixStorage, world: World, claimed: bool) -> None:
    """Whether storage or who asks knows of that epoch."""
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step), keep=True)
    later = epoch_record(2, 2, [FIRST])
    if claimed:
        claim_epoch(storage, JOB, later)
    assert release(storage, JOB, 20, None if claimed else later, {}) == NO_SUCH_STEP
    assert release(storage, JOB, 10, None if claimed else later, {}) == RELEASED


def test_what_retention_drops_meanwhile_was_not_kept(
    storage: PosixStorage, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(storage, world, FIRST, keep=True)

    def gone(pointer: str, name: str) -> bool:
        raise NotFound("gone", where=pointer)

    monkeypatch.setattr(storage, "unmark", gone)
    assert release(storage, JOB, 10, None, {}) == NOT_KEPT
