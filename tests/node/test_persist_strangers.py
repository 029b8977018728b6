"""What somebody else did to a storage root: a step under the name of another, pointers overwritten, objects in the way. Nothing
wrong is read for right, nothing goes through it, and what is beside it is as it was (P4, P12)."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import obstore
import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist import retention
from ckptd.persist.commits import list_all, list_commits, list_stored
from ckptd.persist.names import epoch_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import Retained, retain
from ckptd.persist.storage.base import StorageError
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.object_pointer import POINTER_BYTES_MAX
from ckptd.persist.storage.object_store import ObjectStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.storage.tree import DROPPED, HIDDEN
from ckptd.persist.sums import FileDamage
from ckptd.persist.verify import verify_at
from ckptd.recover.stored import is_away
from tests.node.checkpoints import JOB, World, check_all, save, small_world
from tests.object_server import ObjectServer

STEPS = (10, 20, 30)


@pytest.fixture
def world() -> World:
    return small_world(rows=40)


def fill(storage: PosixStorage | ObjectStorage, world: World) -> None:
    for step in STEPS:
        save(storage, world, SnapshotId(1, step))


def at(step: int) -> str:
    return step_dir(JOB, SnapshotId(1, step))


# --- a directory ----------------------------------------------------------------------------------------------------
def test_a_step_under_the_name_of_another_is_damage(tmp_path: Path, world: World) -> None:
    """It was restored as that other one, verified."""
    storage = PosixStorage(str(tmp_path / "root"))
    fill(storage, world)
    shutil.rmtree(storage.locate(at(30)))
    shutil.copytree(storage.locate(at(20)), storage.locate(at(30)))
    report = verify_at(storage, at(30))
    assert report.damaged and "it is step 20 of epoch 1, under the name of another" in report.problems[0]
    with pytest.raises(FileDamage):
        Checkpoint.open(storage, JOB, SnapshotId(1, 30))
    shutil.copytree(Path(storage.locate(at(20))).parent, Path(storage.locate(at(20))).parent.with_name("epoch-000002"))
    assert verify_at(storage, step_dir(JOB, SnapshotId(2, 20))).damaged
    shutil.copytree(storage.locate(at(20)), tmp_path / "a copy")
    with Checkpoint.at(storage_at(str(tmp_path / "a copy")), "") as checkpoint:
        check_all(checkpoint, world)


def test_a_sweep_takes_what_was_being_deleted_and_leaves_what_is_hidden(tmp_path: Path, world: World) -> None:
    """`ckptd gc`, without a policy. Retention's own sweep leaves that to the step before it."""
    storage = PosixStorage(str(tmp_path / "root"))
    fill(storage, world)
    dropped, hidden = (at(step) for step in (10, 20))
    assert storage.hide(hidden) and storage.hide(dropped)
    storage.move_file(f"{dropped}/{HIDDEN}", f"{dropped}/{DROPPED}")  # whoever dropped it died behind that
    run = retention._Pass(storage, JOB, Policy(), None, 0.0, 0.0, Retained(), threading.Event())
    run.sweep(0.0)
    assert len(storage.list(epoch_dir(JOB, 1))) == 3
    assert retention.sweep(storage, JOB, 0.0) == [storage.locate(dropped)]
    assert [entry.name for entry in storage.list(epoch_dir(JOB, 1))] == [f"step-{step:010d}" for step in (20, 30)]
    assert storage.reveal(hidden) and [info.snapshot.step for info in list_commits(storage, JOB)] == [20, 30]


def test_a_file_that_is_away_is_named_once(tmp_path: Path, world: World) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    fill(storage, world)
    gone, *_ = sorted(Path(storage.locate(at(30))).glob("*.side"))
    gone.unlink()
    problems = verify_at(storage, at(30)).problems
    assert problems and len(set(problems)) == len(problems)


# --- a bucket -------------------------------------------------------------------------------------------------------
def pointer(storage: ObjectStorage, step: int) -> bytes:
    return bytes(obstore.get(storage._store, f"{at(step)}.pointer").bytes())


def overwrite(storage: ObjectStorage, step: int, how: str) -> None:
    said = json.loads(pointer(storage, step))
    data = {
        "another's": pointer(storage, 20), "garbage": b"garbage", "empty": b"", "list": b"[" * 5000,
        "newer": json.dumps(said | {"version": 2}).encode(), "sight": json.dumps(said | {"sight": "foo"}).encode(),
        "no attempt": json.dumps(said | {"attempt": "", "sight": "dropped"}).encode(),
        "above": json.dumps(said | {"attempt": "../x/step-0000000030.a.part"}).encode(),
        "another's, dropped": json.dumps(json.loads(pointer(storage, 20)) | {"sight": "dropped"}).encode(),
        "huge": b" " * (POINTER_BYTES_MAX + 1),
    }[how]  # fmt: skip
    obstore.put(storage._store, f"{at(step)}.pointer", data)


def everything(storage: ObjectStorage) -> dict[str, int]:
    return {meta["path"]: meta["size"] for page in obstore.list(storage._store) for meta in page if "clock" not in meta["path"]}


def test_an_object_that_stops_lists_is_named_with_what_to_do(bucket: str, objects: ObjectServer, world: World) -> None:
    fill(ObjectStorage(bucket), world)
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    odd = f"{prefix}/{epoch_dir(JOB, 1)}//odd"
    objects.client.put_object(Bucket=name, Key=odd, Body=b"")
    storage = storage_at(bucket)
    with pytest.raises(StorageError, match="//odd") as caught:
        storage.discard(JOB)
    assert "delete it" in caught.value.hint
    objects.client.delete_object(Bucket=name, Key=odd)
    assert [info.snapshot.step for info in list_commits(storage, JOB)] == [10, 20, 30]


@pytest.mark.parametrize(
    "how", ["another's", "garbage", "empty", "list", "newer", "sight", "no attempt", "above", "another's, dropped", "huge"]
)
def test_a_pointer_that_was_overwritten_costs_its_own_step_alone(bucket: str, world: World, how: str) -> None:
    """All of the job was unreadable; or another step's bytes were read as this one's; or what it named was deleted, the whole epoch
    for a name that is empty."""
    fill(ObjectStorage(bucket), world)
    overwrite(storage_at(bucket), 30, how)  # type: ignore[arg-type]
    storage = storage_at(bucket)
    assert isinstance(storage, ObjectStorage)
    assert [(info.snapshot.step, info.damaged) for info in list_commits(storage, JOB)] == [(10, False), (20, False), (30, True)]
    rows, errors = list_stored(storage, lambda job: True)
    assert len(rows) == 3 and not errors
    with pytest.raises(StorageError, match="pointer") as caught:
        Checkpoint.open(storage, JOB, SnapshotId(1, 30))
    assert not is_away(caught.value), "another step is to be taken"
    assert not verify_at(storage, at(30)).ok and verify_at(storage, at(20)).ok
    before = everything(storage)
    assert retention.sweep(storage, JOB, 1e12) == []
    assert not any((storage.hide(at(30)), storage.reveal(at(30)), storage.drop(at(30))))
    assert everything(storage) == before
    retain(storage, JOB, Policy(keep_last=1), grace_s=0, attempt_stale_s=0)
    assert [info.snapshot.step for info in list_all(storage, JOB)] == [20, 30]
    with Checkpoint.open(storage, JOB, SnapshotId(1, 20)) as checkpoint:
        check_all(checkpoint, world)
    assert not [path for path in before.keys() - everything(storage).keys() if "step-0000000030" in path]
    with pytest.raises(CkptdError):
        storage.mark(at(30), "keep", b"")


@pytest.mark.parametrize("key", [epoch_dir(JOB, 1), JOB, JOB.partition("/")[0]])
def test_an_object_in_the_way_of_a_prefix_hides_nothing(bucket: str, world: World, key: str) -> None:
    storage = storage_at(bucket, create=True)
    assert isinstance(storage, ObjectStorage)
    fill(storage, world)
    obstore.put(storage._store, key, b"")
    fresh = storage_at(bucket)
    rows, errors = list_stored(fresh, lambda job: True)
    assert sorted(row["step"] for row in rows) == list(STEPS) and not errors
