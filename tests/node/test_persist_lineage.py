"""Epoch claims: one winner per number, durable, readable after damage (design D10, P12); preflight of a storage."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptd.core import failpoint
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.persist.commits import list_stored
from ckptd.persist.lineage import claim_epoch, copy_claim, highest_epoch, newest_record
from ckptd.persist.names import MANIFEST, epochs_dir, record_path, step_dir
from ckptd.persist.preflight import check_tokens, place_token, probe
from ckptd.persist.storage.base import StorageError
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.storage.posix_file import PosixReader
from tests.chaos import points
from tests.node.checkpoints import JOB, commit_all, epoch_record, save, small_world, write_all
from tests.node.memory_tree import MemoryTree


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(str(tmp_path / "root"))


def test_nothing_was_ever_claimed(storage: PosixStorage) -> None:
    assert newest_record(storage, JOB) is None
    assert highest_epoch(storage, JOB) == 0


def test_claims_grow(storage: PosixStorage) -> None:
    first, second = epoch_record(1, 2), epoch_record(2, 3, ancestry=(SnapshotId(1, 40),))
    assert claim_epoch(storage, JOB, first) == (True, 1)
    assert newest_record(storage, JOB) == first
    assert claim_epoch(storage, JOB, second) == (True, 2)
    assert newest_record(storage, JOB) == second
    assert claim_epoch(storage, JOB, second) == (True, 2), "the same claim again"
    assert claim_epoch(storage, JOB, epoch_record(2, nonce="rival")) == (False, 2)
    assert claim_epoch(storage, JOB, first) == (False, 2), "an earlier run is told that it is superseded"
    assert claim_epoch(storage, "1000/other", first) == (True, 1)


def test_a_number_below_the_highest_is_not_taken(storage: PosixStorage) -> None:
    """P12: nothing of it is left, for whoever reads the lineage later."""
    claim_epoch(storage, JOB, epoch_record(3))
    assert claim_epoch(storage, JOB, epoch_record(2)) == (False, 3)
    assert [entry.name for entry in storage.list(epochs_dir(JOB))] == ["epoch-000003.json"]


def test_a_claim_is_durable_whoever_made_its_directories(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: they may be those of a process that died before it synced them; asked again it is the same."""
    storage.make_dir(epochs_dir(JOB))
    synced: list[str] = []
    real = storage.sync_dir
    monkeypatch.setattr(storage, "sync_dir", lambda path: (synced.append(path), real(path)))
    for _ in range(2):
        synced.clear()
        assert claim_epoch(storage, JOB, epoch_record(3)) == (True, 3)
        assert {epochs_dir(JOB), JOB, JOB.partition("/")[0], ""} <= set(synced)


def test_checkpoints_are_listed_although_nobody_can_say_what_was_left_behind(storage: PosixStorage) -> None:
    """A damaged claim of an epoch that committed nothing: the running daemon listed nothing of such a job."""
    claim_epoch(storage, JOB, epoch_record(1))
    save(storage, small_world(rows=40), SnapshotId(1, 10))
    storage.put_if_absent(record_path(JOB, 2), b"garbage")
    rows, errors = list_stored(storage, lambda job: job == JOB)
    assert ([(row["step"], row["abandoned"]) for row in rows], len(errors)) == ([(10, False)], 1)
    assert list_stored(storage, lambda job: job != JOB) == ([], [])


def test_only_one_of_many_wins(storage: PosixStorage) -> None:
    start = threading.Barrier(8)

    def race(index: int) -> tuple[bool, int]:
        start.wait()
        return claim_epoch(storage, JOB, epoch_record(5, nonce=f"run{index}"))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(race, range(8)))
    assert [ok for ok, _ in results].count(True) == 1
    assert {highest for _, highest in results} == {5}
    record = newest_record(storage, JOB)
    assert record is not None
    assert results[int(record.nonce.removeprefix("run"))][0], "the record is the winner's"


def test_a_checkpoint_without_a_claim_takes_its_number(storage: PosixStorage) -> None:
    """Storage was away when the epoch opened, and back when it was flushed: the number is used all the same."""
    world = small_world()
    snapshot = SnapshotId(4, 10)
    record = epoch_record(4)
    commit_all(storage, world, snapshot, write_all(storage, world, snapshot, "a1"), record=record)
    assert highest_epoch(storage, JOB) == 4
    assert newest_record(storage, JOB) == record, "told by the manifest"
    assert claim_epoch(storage, JOB, epoch_record(3)) == (False, 4)
    assert claim_epoch(storage, JOB, record) == (True, 4), "nobody else has claimed it"
    assert storage.open(record_path(JOB, 4)).close() is None, (
        "the claim, for whoever comes when the checkpoint is gone"
    )


def test_an_epoch_that_never_got_to_storage_is_passed_over(storage: PosixStorage) -> None:
    """Claimed while storage was away, died in its first flush: its number is used, but there is nothing in it."""
    first = epoch_record(1, 2)
    claim_epoch(storage, JOB, first)
    write_all(storage, small_world(), SnapshotId(2, 10), "a1")
    assert highest_epoch(storage, JOB) == 2
    assert newest_record(storage, JOB) == first
    assert claim_epoch(storage, JOB, epoch_record(2)) == (True, 2)


def test_an_epoch_whose_claim_is_lost_is_not_passed_over_while_its_checkpoints_cannot_be_read(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: the job would go on from an older epoch. A copy that can be read is enough."""
    world, opens = small_world(rows=40), storage.open_file
    claim_epoch(storage, JOB, epoch_record(1, 2))
    for step in (10, 20):
        save(storage, world, SnapshotId(2, step))
    stale: list[str] = []

    def opened(path: str) -> PosixReader:
        if path in stale:
            raise StorageError("open the file", where=path, errno=errno.ESTALE)
        return opens(path)

    monkeypatch.setattr(storage, "open_file", opened)
    for step in (10, 20):
        record = newest_record(storage, JOB)
        assert record is not None and record.number == 2
        stale.append(f"{step_dir(JOB, SnapshotId(2, step))}/{MANIFEST}")
    with pytest.raises(StorageError, match="open the file"):
        newest_record(storage, JOB)


@pytest.mark.parametrize("at", [20, 60, 100])
def test_a_damaged_claim_is_found(storage: PosixStorage, at: int) -> None:
    claim_epoch(storage, JOB, epoch_record(1))
    path = Path(storage.locate(record_path(JOB, 1)))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CkptdError) as caught:
        newest_record(storage, JOB)
    assert str(path) in str(caught.value)


def test_a_claim_of_a_newer_version_is_refused(storage: PosixStorage) -> None:
    import msgspec

    from ckptd.persist import lineage
    from ckptd.persist.sums import digest

    claim_epoch(storage, JOB, epoch_record(1))
    body = msgspec.json.encode({"format": lineage.FORMAT, "version": 99, "record": epoch_record(1)})
    text = b'{"xxh3_128":"' + digest(body).hex().encode() + b'","claim":' + body + b"}\n"
    Path(storage.locate(record_path(JOB, 1))).write_bytes(text)
    with pytest.raises(CkptdError, match="version 99"):
        newest_record(storage, JOB)


def test_a_claim_that_is_whole_and_no_record_is_an_error_of_ours(storage: PosixStorage) -> None:
    from ckptd.persist.sums import digest

    claim_epoch(storage, JOB, epoch_record(1))
    body = b'{"format": "ckptd", "version": 1}'
    text = b'{"xxh3_128":"' + digest(body).hex().encode() + b'","claim":' + body + b"}\n"
    Path(storage.locate(record_path(JOB, 1))).write_bytes(text)
    with pytest.raises(CkptdError, match="cannot read the epoch record"):
        newest_record(storage, JOB)


def test_storage_that_does_not_answer_is_no_proof_of_anything(storage: PosixStorage, tmp_path: Path) -> None:
    """D11: a vanished storage must not look like a job without checkpoints."""
    claim_epoch(storage, JOB, epoch_record(1))
    (tmp_path / "root").rename(tmp_path / "away")
    for call in (
        lambda: newest_record(storage, JOB),
        lambda: claim_epoch(storage, JOB, epoch_record(2)),
        lambda: highest_epoch(storage, JOB),
    ):
        with pytest.raises(StorageError, match="vanished"):
            call()


# --- preflight ------------------------------------------------------------------------------------------------------
def test_a_good_storage(storage: PosixStorage) -> None:
    assert probe(storage) > 0
    assert probe(MemoryStorage()) > 0
    assert [entry.name for entry in storage.list("preflight")] == []


def test_a_probe_meets_no_failpoint(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each daemon probes its storage when it starts: trials that were to kill it in a commit, or in retention, killed it there."""
    monkeypatch.setattr(failpoint, "_armed", dict.fromkeys(points.met(), "error"))
    assert probe(storage) > 0


def test_tokens_find_the_node_that_writes_elsewhere(tmp_path: Path) -> None:
    shared, other = PosixStorage(str(tmp_path / "shared")), PosixStorage(str(tmp_path / "local"))
    tokens = {"a": place_token(shared, "a"), "b": place_token(shared, "b"), "c": place_token(other, "c")}
    assert check_tokens(shared, tokens) == ["c"]
    assert check_tokens(other, tokens) == ["a", "b"]
    tokens["a"] = place_token(shared, "a")
    assert check_tokens(shared, tokens) == ["c"]


def test_nodes_of_almost_the_same_name_do_not_take_each_others_token(storage: PosixStorage) -> None:
    tokens = {node: place_token(storage, node) for node in ("gpu.1", "gpu_1", "g" * 99 + "1", "g" * 99 + "2")}
    assert check_tokens(storage, tokens) == []


def test_storage_without_exclusive_names(storage: PosixStorage) -> None:
    class Overwriting(MemoryTree):
        def publish(self, source: str, target: str) -> bool:
            self.unlink(target)
            return super().publish(source, target)

    class Unlinked(MemoryTree):
        def publish(self, source: str, target: str) -> bool:
            raise StorageError("publish: Operation not supported", where=target)

    class Replacing(MemoryTree):
        def move_dir(self, source: str, target: str) -> bool:
            self.delete_tree(target)
            return super().move_dir(source, target)

    class Full(MemoryTree):
        def publish(self, source: str, target: str) -> bool:
            raise StorageError("no room", where=target, errno=errno.ENOSPC)

    with pytest.raises(StorageError, match="no room"):
        probe(Full())  # which is nothing that another file system would mend
    for bad in (Overwriting(), Unlinked(), Replacing()):
        with pytest.raises(CkptdError) as caught:
            probe(bad)
        assert caught.value.hint
        assert bad.list("preflight") == []


def test_a_claim_that_is_copied_is_durable_and_says_which_run_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any epoch, also below the highest; asked again it is the same."""
    storage, secured = MemoryStorage(), list[str]()
    secure = storage.secure
    monkeypatch.setattr(storage, "secure", lambda path: (secured.append(path), secure(path))[1])
    for number in (3, 1, 3):
        assert copy_claim(storage, JOB, epoch_record(number))
    assert secured == [epochs_dir(JOB)] * 3
    assert not copy_claim(storage, JOB, epoch_record(3, nonce="rival"))
    assert newest_record(storage, JOB) == epoch_record(3)


def test_a_claim_is_copied_to_where_nothing_is_yet(storage: PosixStorage) -> None:
    assert copy_claim(storage, JOB, epoch_record(2)) and newest_record(storage, JOB) == epoch_record(2)
