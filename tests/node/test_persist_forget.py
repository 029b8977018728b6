"""What storage has of a forgotten job, whatever the storage is (D19, D22)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.life import is_grave
from ckptd.core.policy import Policy
from ckptd.persist.commits import list_all, list_durable
from ckptd.persist.forget import forget_on_storage
from ckptd.persist.lineage import claim_epoch, highest_epoch, newest_record
from ckptd.persist.names import epoch_dir, step_dir
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, epoch_record, save, small_world

HIGHEST_ELSEWHERE = 40  # that nodes know of an epoch which never was on storage


@pytest.fixture(params=["posix", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return PosixStorage(str(tmp_path / "root")) if request.param == "posix" else MemoryStorage()


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
    assert forget_on_storage(storage, JOB, 0) == (left.number + 1, 0), "once more, as after a death in its middle"
    assert highest_epoch(storage, JOB) == left.number + 1
    assert list_durable(storage, JOB, Policy()) == []
