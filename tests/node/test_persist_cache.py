"""What was read of durable checkpoints stays on a local disk, and nothing that lies there is believed (`cache_dir`, P1)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.persist.cache import Cache
from ckptd.persist.names import DATA, ENCODED
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.factory import storage_at
from tests import places
from tests.node.checkpoints import JOB, World, check_all, save, small_world
from tests.node.test_persist_encoded import a_world
from tests.object_server import ObjectServer

SNAPSHOT, NEXT = SnapshotId(1, 10), SnapshotId(1, 20)
ROOM = 64 << 20
PAGES = 64 << 10  # what file systems count for the ends of files


@pytest.fixture
def world(bucket: str) -> World:
    made = small_world()
    save(storage_at(bucket, create=True), made, SNAPSHOT)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", lambda whole: ROOM)


def read_all(bucket: str, world: World, cache: Cache | None, snapshot: SnapshotId = SNAPSHOT) -> tuple[int, int]:
    """Bytes of all tensors, and how many of them the cache had. All of them are right."""
    total = known = 0
    with Checkpoint.open(storage_at(bucket), JOB, snapshot, cache) as checkpoint:
        check_all(checkpoint, world)
        for tensor in checkpoint.index.tensors():
            for box in checkpoint.boxes(tensor.key, tensor.rank):
                nbytes = box.volume * world.values[tensor.key, tensor.rank].shape[-1]
                known += checkpoint.read(tensor.key, box, memoryview(bytearray(nbytes)), tensor.rank)
                total += nbytes
    return total, known


def asked(objects: ObjectServer, since: int) -> int:
    """Requests for bytes of data files, since so many."""
    return sum(
        request.method == "GET" and (DATA in request.path or ENCODED in request.path) for request in objects.requests[since:]
    )


def files(cache: Cache) -> list[Path]:
    return sorted(cache.directory.iterdir())


def held(cache: Cache) -> int:
    return sum(path.stat().st_blocks * 512 for path in files(cache))


def test_what_was_read_once_is_not_asked_for_again(bucket: str, world: World, objects: ObjectServer, cache: Cache) -> None:
    total, known = read_all(bucket, world, cache)
    assert known == total, "what a checkpoint's reader reads twice it has after the first time"
    since = len(objects.requests)
    again = Cache(cache.directory, lambda whole: ROOM)
    assert read_all(bucket, world, again) == (total, total)
    assert asked(objects, since) == 0
    assert read_all(bucket, world, None) == (total, 0)
    assert asked(objects, since) > 0


def test_what_was_compressed_is_kept_as_it_was_sent(bucket: str, objects: ObjectServer, cache: Cache) -> None:
    world = a_world()
    save(storage_at(bucket, create=True), world, SNAPSHOT, compress=True)
    total, _ = read_all(bucket, world, cache)
    assert held(cache) < 0.9 * total
    since = len(objects.requests)
    assert read_all(bucket, world, cache) == (total, total)
    assert asked(objects, since) == 0


@pytest.mark.parametrize("what", ["flipped", "short", "empty", "another's"])
def test_what_is_wrong_there_is_read_from_the_store_and_mended(
    what: str, bucket: str, world: World, objects: ObjectServer, cache: Cache
) -> None:
    total, _ = read_all(bucket, world, cache)
    for path in files(cache):
        data = bytearray(path.read_bytes())
        if what == "flipped":
            data[:: 1 << 18] = bytes(byte ^ 1 for byte in data[:: 1 << 18])
        changed = {"flipped": data, "short": data[: len(data) // 2], "empty": b"", "another's": data[::-1]}
        path.write_bytes(changed[what])
    since = len(objects.requests)
    read_all(bucket, world, cache)
    assert asked(objects, since) > 0
    since = len(objects.requests)
    assert read_all(bucket, world, cache) == (total, total)
    assert asked(objects, since) == 0


def test_it_holds_what_it_may_and_lets_go_of_the_oldest(bucket: str, world: World, objects: ObjectServer, tmp_path: Path) -> None:
    total, _ = read_all(bucket, world, None)
    room = total * 3 // 2
    cache = Cache(tmp_path / "cache", lambda whole: room)
    read_all(bucket, world, cache)
    before = files(cache)
    other = small_world(seed=1)
    save(storage_at(bucket), other, NEXT)
    for _ in range(2):  # what the first could not keep, as no file's room was free yet
        read_all(bucket, other, cache, NEXT)
        assert held(cache) <= room + PAGES
    assert {*files(cache)} - {*before}
    since = len(objects.requests)
    assert read_all(bucket, other, cache, NEXT) == (total, total)
    assert asked(objects, since) == 0
    read_all(bucket, world, cache)


def test_one_that_is_too_small_keeps_what_fits(bucket: str, tmp_path: Path) -> None:
    world = small_world(rows=12_000)
    save(storage_at(bucket, create=True), world, SNAPSHOT)
    cache = Cache(tmp_path / "cache", lambda whole: ROOM // 4)
    total, known = read_all(bucket, world, cache)
    assert 0 < known < total
    for _ in range(2):
        assert held(cache) <= ROOM // 4 + PAGES
        read_all(bucket, world, cache)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with places.small_disk(tmp_path / "disk", "2m") as place:
        yield place


@places.for_root
def test_a_full_disk_is_no_reason_not_to_restore(
    small_disk: Path, bucket: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(small_disk / "cache", lambda whole: ROOM)
    for _ in range(2):
        read_all(bucket, world, cache)
    assert caplog.text.count("is not kept in") == 1


def test_what_was_deleted_by_hand_is_made_anew(bucket: str, world: World, cache: Cache, objects: ObjectServer) -> None:
    total, _ = read_all(bucket, world, cache)
    shutil.rmtree(cache.directory)
    read_all(bucket, world, cache)
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    since = len(objects.requests)
    assert read_all(bucket, world, cache) == (total, total) and asked(objects, since) == 0


def test_a_directory_that_others_may_look_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    with pytest.raises(CkptdError, match="others may look into"):
        Cache(tmp_path / "open", lambda whole: ROOM)
    with pytest.raises(CkptdError, match="cannot be made"):
        Cache(tmp_path / "file" / "below", lambda whole: ROOM)


def test_the_budget_is_a_share_of_its_file_system(tmp_path: Path) -> None:
    asked_for: list[int] = []
    Cache(tmp_path / "cache", lambda whole: asked_for.append(whole) or 1)
    assert asked_for[0] > 1 << 20
