"""What storage has of a forgotten job, whatever the storage is (D19, D22)."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptd.cli.listing import of_storage
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol.life import grave, is_grave
from ckptd.persist import forget
from ckptd.persist.commits import list_all, list_durable
from ckptd.persist.forget import forget_on_storage
from ckptd.persist.lineage import claim_epoch, forgotten_epoch, highest_epoch, newest_record
from ckptd.persist.names import epoch_dir, epoch_of_record, epochs_dir, step_dir
from ckptd.persist.retention import retain
from ckptd.persist.storage.base import NotFound, Pointer, Storage, StorageError
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, epoch_record, save, small_world
from tests.node.crash_storage import CrashStorage

HIGHEST_ELSEWHERE = 40  # that nodes know of an epoch which never was on storage


@pytest.fixture(params=["posix", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return PosixStorage(str(tmp_path / "root")) if request.param == "posix" else MemoryStorage()


def claims(storage: Storage) -> list[int | None]:
    return [epoch_of_record(entry.name) for entry in storage.list(epochs_dir(JOB))]


def test_nothing_is_left_but_a_grave_and_nobody_commits_what_was_before(storage: Storage) -> None:
    world = small_world(rows=40)
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step))
    assert claim_epoch(storage, JOB, epoch_record(1))[0]
    hidden = step_dir(JOB, SnapshotId(1, 10))
    storage.hide(hidden)
    storage.begin(f"{hidden}.dead.part")  # an attempt that died
    assert forget_on_storage(storage, JOB, HIGHEST_ELSEWHERE) == (HIGHEST_ELSEWHERE + 1, 1)
    assert list_all(storage, JOB) == [] and storage.list(epoch_dir(JOB, 1)) == []
    left = newest_record(storage, JOB)
    assert left is not None and is_grave(left) and left.number == HIGHEST_ELSEWHERE + 1
    assert claim_epoch(storage, JOB, epoch_record(1)) == (False, left.number), "who was away"
    assert claims(storage) == [left.number], "those of its starts name their nodes"
    assert forget_on_storage(storage, JOB, 0) == (left.number + 1, 0), "once more, as after a death in its middle"
    assert claims(storage) == [left.number + 1]
    assert highest_epoch(storage, JOB) == left.number + 1
    assert list_durable(storage, JOB, Policy()) == []


def dug(storage: Storage) -> int:
    """Two checkpoints, one of them hidden; the grave is claimed, and whoever did that died. The grave's epoch."""
    world = small_world(rows=40)
    assert claim_epoch(storage, JOB, epoch_record(1))[0]
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step))
    storage.hide(step_dir(JOB, SnapshotId(1, 10)))
    assert claim_epoch(storage, JOB, grave(2, "forgotten-now"))[0]
    return 2


def test_what_lies_below_a_grave_is_no_checkpoint_any_more(storage: Storage) -> None:
    """P15: it was listed as durable, of a job that restored nothing; and what was hidden came back."""
    assert forgotten_epoch(storage, JOB) == 0
    assert dug(storage) == forgotten_epoch(storage, JOB)
    assert list_all(storage, JOB) == list_durable(storage, JOB, Policy()) == []
    if isinstance(storage, PosixStorage):
        assert of_storage(storage.root) == {"rows": [], "errors": []}


def test_the_next_pass_of_retention_deletes_it_and_leaves_the_new_start_alone(storage: Storage) -> None:
    """Also when its grave is not the newest claim any more."""
    dug(storage)
    assert claim_epoch(storage, JOB, epoch_record(3))[0]
    save(storage, small_world(rows=40), SnapshotId(3, 5))
    retain(storage, JOB, Policy())
    assert [info.snapshot for info in list_all(storage, JOB)] == [SnapshotId(3, 5)]
    assert storage.list(epoch_dir(JOB, 1)) == []
    assert forget_on_storage(storage, JOB, 0) == (4, 1), "what the new start had"


def test_an_order_touches_nothing_of_a_start_that_came_after_its_grave(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes for minutes, and the job may begin anew meanwhile."""
    dug(storage)
    whole, begun = storage.pointers, False

    def pointers(path: str) -> Sequence[Pointer]:
        nonlocal begun
        if not begun:
            begun = True
            assert claim_epoch(storage, JOB, epoch_record(4))[0]
            save(storage, small_world(rows=40), SnapshotId(4, 5))
        return whole(path)

    monkeypatch.setattr(storage, "pointers", pointers)
    assert forget_on_storage(storage, JOB, 0) == (3, 1)
    assert [info.snapshot for info in list_all(storage, JOB)] == [SnapshotId(4, 5)]


def test_an_order_that_was_carried_out_survives_a_power_cut() -> None:
    """Whoever gave it was told that all is gone: neither claims nor directories of epochs come back."""
    for seed in range(8):
        storage = CrashStorage()
        dug(storage)
        assert forget_on_storage(storage, JOB, 0) == (3, 1)
        after = storage.restarted(seed)
        assert ([entry.name for entry in after.list(JOB)], claims(after)) == (["epochs"], [3])


def test_it_survives_one_also_where_no_epoch_was_claimed() -> None:
    """Storage was away when the epoch opened."""
    for seed in range(20):
        storage = CrashStorage()
        save(storage, small_world(rows=40), SnapshotId(1, 10))
        forget_on_storage(storage, JOB, 0)
        assert [entry.name for entry in storage.restarted(seed).list(JOB)] == ["epochs"]


def test_an_order_that_gets_no_number_deletes_nothing(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a grave whoever was away would commit what was to be forgotten."""
    save(storage, small_world(rows=40), SnapshotId(1, 10))
    monkeypatch.setattr(forget, "claim_epoch", lambda *_: (False, 9))
    with pytest.raises(CkptdError, match="every epoch number"):
        forget_on_storage(storage, JOB, 0)
    assert [info.snapshot for info in list_all(storage, JOB)] == [SnapshotId(1, 10)]


def test_a_grave_that_storage_does_not_give_is_not_taken_for_none(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P15: what was forgotten would be listed. One that is gone by now is none: whoever deleted it has dug a newer one."""
    dug(storage)
    raised: list[StorageError] = [StorageError("open: Input/output error", errno=errno.EIO)]

    def fails(path: str) -> None:
        raise raised[0]

    monkeypatch.setattr(storage, "open", fails)
    with pytest.raises(StorageError, match="Input/output"):
        list_all(storage, JOB)
    raised[0] = NotFound("open: no such file", errno=errno.ENOENT)
    assert forgotten_epoch(storage, JOB) == 0
