"""Deaths between any two requests to a bucket: nothing acknowledged is lost, nothing torn is listed, all is deleted in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist.commits import list_commits
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.names import VERIFIED, epoch_dir
from ckptd.persist.retention import retain
from ckptd.persist.storage import object_store
from ckptd.persist.storage.base import Sight, StorageError, read_file
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.object_store import ObjectStorage
from tests.node.checkpoints import JOB, World, epoch_record, save
from tests.node.storage_conformance import ONE, OTHER, POINTER, TOP, begin, commit, committed, names
from tests.node.test_persist_crash import expect_whole, tiny_world
from tests.object_server import Fault, Faults, ObjectServer, Request

OLD, NEW = SnapshotId(1, 10), SnapshotId(1, 20)
EVERY = [9, pytest.param(1, marks=pytest.mark.chaos)]  # so many requests lie between two deaths


def dying(number: int, *, done: bool) -> Faults:
    """From this request on, counted from now, nobody hears of whoever sent them. done: of the first one only the answer is lost."""
    seen = [0]

    def found(request: Request) -> Fault | None:
        seen[0] += 1
        if seen[0] < number:
            return None
        return Fault(status=418, done=done and seen[0] == number)

    return found


def after_deaths(
    objects: ObjectServer, root: Callable[[], str], act: Callable[[ObjectStorage], object], every: int = 1
) -> Iterator[tuple[ObjectStorage, bool]]:
    """``act`` in a new place each time, dead at one request after the other: what is found afterwards, and whether it was done."""
    number, done = 1, False
    while not done:
        for late in (False, True):
            storage = storage_at(root(), create=True)
            with objects.failing(dying(number, done=late)):
                try:
                    act(storage)
                    done = True
                except StorageError:
                    done = False
            yield storage_at(storage.root, marked=True, identity=storage.identity), done
        number += every


@pytest.fixture
def place(bucket: str) -> Callable[[], str]:
    """A storage root of its own each time."""
    turns = iter(range(10_000))
    return lambda: f"{bucket}/{next(turns)}"


@pytest.mark.parametrize("every", EVERY)
def test_whoever_dies_in_a_commit_leaves_all_of_it_or_nothing(
    objects: ObjectServer, place: Callable[[], str], every: int
) -> None:
    outcomes = set()
    for storage, done in after_deaths(objects, place, lambda storage: commit(storage, begin(storage, ONE)), every):
        found = [pointer.sight for pointer in storage.pointers(TOP)]
        outcomes.add(len(found))
        assert found or not done, "acknowledged, then lost"
        if found:
            assert committed(storage) == f"manifest of {ONE}" and read_file(storage, f"{POINTER}/b.side", 100)
            continue
        assert commit(storage, begin(storage, OTHER))
        storage.discard(ONE)
        assert committed(storage) == f"manifest of {OTHER}" and names(storage, TOP) == ["step-0000000010"]
    assert outcomes == {0, 1}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("what", ["drop", "discard"])
def test_whoever_dies_in_deleting_is_made_up_for(
    objects: ObjectServer, place: Callable[[], str], monkeypatch: pytest.MonkeyPatch, what: str, every: int
) -> None:
    """Nothing half deleted is ever shown, and the next one deletes the rest."""
    monkeypatch.setattr(object_store, "DROP_TURN_S", 0.0)

    def deleted(storage: ObjectStorage) -> None:
        if what == "discard":
            storage.discard(ONE)
            return
        storage.hide(POINTER)
        storage.drop(POINTER)

    def prepared() -> str:
        root = place()
        storage = storage_at(root, create=True)
        begin(storage, ONE)
        if what == "drop":
            assert commit(storage, ONE)
            storage.mark(POINTER, VERIFIED, b"sum")
        return root

    for storage, _ in after_deaths(objects, prepared, deleted, every):
        for pointer in storage.pointers(TOP):
            if pointer.sight is not Sight.DROPPED:
                assert read_file(storage, f"{POINTER}/a.safetensors", 100)
        if what == "drop":
            deleted(storage)
        else:
            storage.discard(ONE)
            for pointer in storage.pointers(TOP):
                assert pointer.sight is Sight.DROPPED and storage.drop(POINTER)
        assert storage.list(TOP) == []
        left = [key for key in objects.keys(storage.root) if not key.startswith(object_store.OWN)]
        assert left == [], left
        assert commit(storage, begin(storage, OTHER)), "its name is free"


def listed(storage: ObjectStorage) -> set[SnapshotId]:
    return {info.snapshot for info in list_commits(storage, JOB)}


@pytest.mark.chaos
def test_a_death_at_every_request_leaves_old_or_new(objects: ObjectServer, place: Callable[[], str]) -> None:
    """P1, P4: of whole writes and commits; what is acknowledged is never lost, what is listed is never torn."""
    worlds: dict[SnapshotId, World] = {OLD: tiny_world(1), NEW: tiny_world(2)}
    outcomes = set()

    def prepared() -> str:
        storage = storage_at(root := place(), create=True)
        claim_epoch(storage, JOB, epoch_record(1, 2))
        save(storage, worlds[OLD], OLD)
        return root

    for storage, done in after_deaths(objects, prepared, lambda storage: save(storage, worlds[NEW], NEW)):
        found = listed(storage)
        assert OLD in found and (NEW in found or not done)
        expect_whole(storage, found, worlds)
        save(storage, worlds[NEW], NEW, "a2")
        assert listed(storage) == {OLD, NEW}
        expect_whole(storage, listed(storage), worlds)
        outcomes.add(found == {OLD, NEW})
    assert outcomes == {True, False}


@pytest.mark.chaos
def test_a_death_in_retention_never_takes_the_last(
    objects: ObjectServer, place: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: at every request of a pass at least one checkpoint is listed and intact, and the next pass ends what was begun."""
    monkeypatch.setattr(object_store, "DROP_TURN_S", 0.0)
    worlds = {SnapshotId(1, step): tiny_world(step) for step in (10, 20, 30)}
    newest = SnapshotId(1, 30)

    def prepared() -> str:
        storage = storage_at(root := place(), create=True)
        claim_epoch(storage, JOB, epoch_record(1, 2))
        for snapshot, world in worlds.items():
            save(storage, world, snapshot)
        return root

    for storage, _ in after_deaths(objects, prepared, lambda s: retain(s, JOB, Policy(keep_last=1), grace_s=0), every=13):
        assert newest in listed(storage)
        expect_whole(storage, listed(storage), worlds)
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        assert listed(storage) == {newest}
        assert names(storage, epoch_dir(JOB, 1)) == ["step-0000000030"]
