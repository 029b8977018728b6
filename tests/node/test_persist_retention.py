"""P12: retention deletes only what a newer, read-back checkpoint replaces, never under a reader's hands."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist import lease as lease_module
from ckptd.persist import retention
from ckptd.persist.commits import list_commits, list_durable
from ckptd.persist.lease import Lease
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.names import attempt_dir, epoch_dir, epochs_dir, leases_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import Retained, retain
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.storage.posix_file import PosixReader
from tests.node.checkpoints import JOB, World, check_all, epoch_record, save, small_world, write_all

STEPS = (10, 20, 30, 40)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(str(tmp_path / "root"))


@pytest.fixture
def world() -> World:
    return small_world(rows=40)


def fill(storage: PosixStorage, world: World, steps: tuple[int, ...] = STEPS, epoch: int = 1) -> None:
    for step in steps:
        save(storage, world, SnapshotId(epoch, step))


def steps_left(storage: PosixStorage) -> list[int]:
    return [info.snapshot.step for info in list_commits(storage, JOB)]


def now(storage: PosixStorage, policy: Policy, grace_s: float = 0, **options: Any) -> Retained:
    return retain(storage, JOB, policy, grace_s=grace_s, **options)


def test_a_job_that_has_nothing(storage: PosixStorage) -> None:
    assert now(storage, Policy()) == Retained()
    assert storage.list("") == [entry for entry in storage.list("") if entry.name.startswith(".")]


def test_what_died_before_it_had_its_name_goes(storage: PosixStorage, world: World) -> None:
    """Found by power cuts: one such file per cut, for ever. Those of others who are at work stay."""
    claim_epoch(storage, JOB, epoch_record(1, 2))
    fill(storage, world, (10,))
    left = [f"{JOB}/clock-0a1b.77.part", f"{JOB}/clock-0a1b", f"{epochs_dir(JOB)}/epoch-000002.json.99.part"]
    left.append(f"{step_dir(JOB, SnapshotId(1, 10))}/verified.77.part")
    for path in left:
        storage.put_if_absent(path, b"")
    now(storage, Policy())
    assert all(storage.open(path).close() is None for path in left)
    now(storage, Policy(), attempt_stale_s=0)
    assert [entry.name for entry in storage.list(JOB)] == ["epoch-000001", "epochs"]
    assert [entry.name for entry in storage.list(epochs_dir(JOB))] == ["epoch-000001.json"]
    names = [entry.name for entry in storage.list(step_dir(JOB, SnapshotId(1, 10)))]
    assert not [name for name in names if name.endswith(".part")]


def once_one_is_deleted(storage: PosixStorage) -> threading.Event:
    """Set when the first directory is gone."""
    cancelled, delete = threading.Event(), storage.delete_tree

    def called_off(path: str) -> None:
        delete(path)
        cancelled.set()

    storage.delete_tree = called_off  # type: ignore[method-assign]
    return cancelled


def test_a_pass_that_is_called_off_stops_before_the_next_checkpoint(
    storage: PosixStorage, world: World
) -> None:
    fill(storage, world)
    now(storage, Policy(keep_last=1), grace_s=3600)  # hides three
    with pytest.raises(CkptdError, match="called off"):
        now(storage, Policy(keep_last=1), cancelled=once_one_is_deleted(storage))
    left = [entry.name for entry in storage.list(epoch_dir(JOB, 1))]
    assert len([name for name in left if name.startswith("step-")]) == 3  # one of four is deleted
    assert steps_left(storage) == [40]


@pytest.mark.parametrize("what", ["dropped", "attempts"])
def test_a_pass_that_is_called_off_leaves_the_rest_of_what_others_left(
    storage: PosixStorage, world: World, what: str
) -> None:
    """Deleting one takes its time; whoever called it off waits for no more than that."""
    for step in (10, 20, 30):
        if what == "attempts":
            write_all(storage, world, SnapshotId(1, step), "dead")
        else:
            save(storage, world, SnapshotId(1, step))
            directory = Path(storage.locate(step_dir(JOB, SnapshotId(1, step))))
            (directory / "manifest.json").rename(directory / "manifest.dropped")
    with pytest.raises(CkptdError, match="called off"):
        now(storage, Policy(), attempt_stale_s=0, cancelled=once_one_is_deleted(storage))
    assert len(storage.list(epoch_dir(JOB, 1))) == 2


def test_a_pass_that_is_called_off_while_it_reads_back_reveals_nothing(
    storage: PosixStorage, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not read to its end is no reason to take back what an earlier pass hid rightly."""
    fill(storage, world, (10, 20))
    now(storage, Policy(keep_last=1), grace_s=3600)
    Path(storage.locate(f"{step_dir(JOB, SnapshotId(1, 20))}/verified")).unlink()  # as if there had been no room for it
    cancelled, real = threading.Event(), storage.open_file

    def called_off(path: str) -> PosixReader:
        if path.endswith(".safetensors"):
            cancelled.set()
        return real(path)

    monkeypatch.setattr(storage, "open_file", called_off)
    with pytest.raises(CkptdError, match="called off"):
        now(storage, Policy(keep_last=1), cancelled=cancelled)
    assert steps_left(storage) == [20]


def test_keep_last(storage: PosixStorage, world: World) -> None:
    fill(storage, world)
    done = now(storage, Policy(keep_last=2))
    assert steps_left(storage) == [30, 40]
    assert done.hidden == [SnapshotId(1, 10), SnapshotId(1, 20)]
    assert done.verified == [SnapshotId(1, 40), SnapshotId(1, 30)]
    assert [entry.name for entry in storage.list(epoch_dir(JOB, 1))] == ["step-0000000030", "step-0000000040"]
    assert [info.verified for info in list_commits(storage, JOB)] == [True, True]
    again = now(storage, Policy(keep_last=2))
    assert (again.hidden, again.verified) == ([], []), "nothing is read twice"


def test_keep_every_and_marked_ones(storage: PosixStorage, world: World) -> None:
    save(storage, world, SnapshotId(1, 5), keep=True)
    fill(storage, world)
    now(storage, Policy(keep_last=1, keep_every_steps=20))
    assert steps_left(storage) == [5, 20, 40]
    (Path(storage.locate(step_dir(JOB, SnapshotId(1, 5)))) / "keep").unlink()  # the operator lets it go
    now(storage, Policy(keep_last=1, keep_every_steps=20))
    assert steps_left(storage) == [20, 40]


def test_nothing_is_read_back_when_nothing_can_go(storage: PosixStorage, world: World) -> None:
    fill(storage, world, (10, 20))
    assert now(storage, Policy(keep_last=3)).verified == []


def damage(storage: PosixStorage, step: int) -> None:
    path = sorted(Path(storage.locate(step_dir(JOB, SnapshotId(1, step)))).glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 8
    path.write_bytes(data)


def test_a_damaged_newest_does_not_replace_the_older_ones(storage: PosixStorage, world: World) -> None:
    fill(storage, world)
    damage(storage, 40)
    done = now(storage, Policy(keep_last=1))
    assert 30 in steps_left(storage), "the newest that can be restored"
    assert any("step-0000000040" in problem for problem in done.problems)
    with Checkpoint.open(storage, JOB, SnapshotId(1, 30)) as checkpoint:
        check_all(checkpoint, world)


def test_when_all_are_damaged_all_stay(storage: PosixStorage, world: World) -> None:
    fill(storage, world)
    for step in STEPS:
        damage(storage, step)
    done = now(storage, Policy(keep_last=1))
    assert steps_left(storage) == list(STEPS)
    assert len(done.problems) >= len(STEPS)
    assert done.hidden == []


def test_a_branch_that_was_left_goes(storage: PosixStorage, world: World) -> None:
    """Epoch 2 forked from step 20: the steps of epoch 1 beyond it can never be restored again. Until it has a checkpoint of its own
    they can still be copied (P15: docs/OPERATIONS.md)."""
    claim_epoch(storage, JOB, epoch_record(1))
    fill(storage, world)
    claim_epoch(storage, JOB, epoch_record(2, ancestry=(SnapshotId(1, 20),)))
    now(storage, Policy(keep_last=3))
    assert steps_left(storage) == list(STEPS)
    fill(storage, world, (30, 40), epoch=2)
    now(storage, Policy(keep_last=3))
    assert [info.snapshot for info in list_commits(storage, JOB)] == [
        SnapshotId(1, 20), SnapshotId(2, 30), SnapshotId(2, 40)
    ]  # fmt: skip


def test_grace_for_readers_without_a_lease(storage: PosixStorage, world: World) -> None:
    fill(storage, world, (10, 20))
    done = retain(storage, JOB, Policy(keep_last=1), grace_s=60)
    assert done.hidden == [SnapshotId(1, 10)]
    assert done.deleted == []
    assert steps_left(storage) == [20], "hidden at once"
    directory = Path(storage.locate(step_dir(JOB, SnapshotId(1, 10))))
    assert list(directory.glob("*.safetensors")), "deleted later"
    with pytest.raises(CkptdError, match="no such checkpoint"):
        Checkpoint.open(storage, JOB, SnapshotId(1, 10))
    age(directory)
    assert len(retain(storage, JOB, Policy(keep_last=1), grace_s=60).deleted) == 1
    assert not directory.exists()


def test_a_pass_says_what_it_kept(storage: PosixStorage, world: World) -> None:
    fill(storage, world)
    assert now(storage, Policy(keep_last=2)).kept == [SnapshotId(1, 30), SnapshotId(1, 40)]


def test_a_pass_needs_no_list_that_shows_at_once_what_it_made(
    storage: PosixStorage, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may not, for a minute. The pass ended with StopIteration, of which its future was never told."""
    fill(storage, world, (10, 20))
    entries = storage.entries
    known = {entry.name for path in (JOB, epoch_dir(JOB, 1)) for entry in entries(path)}
    monkeypatch.setattr(storage, "entries", lambda path: [entry for entry in entries(path) if entry.name in known])
    assert now(storage, Policy(keep_last=1)).deleted == [storage.locate(step_dir(JOB, SnapshotId(1, 10)))]


def age(directory: Path) -> None:
    """Nothing happened to it for 100 seconds."""
    old = time.time() - 100
    for path in (*directory.iterdir(), directory):
        os.utime(path, (old, old))


def test_the_grace_begins_when_the_manifest_is_out_of_sight(
    storage: PosixStorage, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the pass before hung, or since when it is dead: whoever opened it meanwhile without a lease reads on."""
    fill(storage, world, (10, 20))
    directory, move = Path(storage.locate(step_dir(JOB, SnapshotId(1, 10)))), storage.move_file

    def hangs(source: str, target: str) -> None:
        age(directory)
        move(source, target)

    monkeypatch.setattr(storage, "move_file", hangs)
    for _ in range(2):
        done = retain(storage, JOB, Policy(keep_last=1), grace_s=60)
        assert (done.deleted, done.waiting) == ([], True), "or no pass comes when its grace is over"
    assert list(directory.glob("*.safetensors"))
    age(directory)
    done = retain(storage, JOB, Policy(keep_last=1), grace_s=60)
    assert (len(done.deleted), done.waiting) == (1, False)


def test_a_reader_is_waited_for(storage: PosixStorage, world: World) -> None:
    fill(storage, world, (10, 20))
    checkpoint = Checkpoint.open(storage, JOB, SnapshotId(1, 10))
    now(storage, Policy(keep_last=1))
    assert steps_left(storage) == [10, 20], "whoever reads it may be about to go on from it"
    check_all(checkpoint, world)  # opens its files only now
    checkpoint.close()
    now(storage, Policy(keep_last=1))
    assert not Path(storage.locate(step_dir(JOB, SnapshotId(1, 10)))).exists()
    assert storage.list(leases_dir(JOB)) == []


def test_a_dead_readers_lease_runs_out(storage: PosixStorage, world: World) -> None:
    fill(storage, world, (10, 20))
    Checkpoint.open(storage, JOB, SnapshotId(1, 10))  # never closed
    now(storage, Policy(keep_last=1), stale_s=900)
    directory = Path(storage.locate(step_dir(JOB, SnapshotId(1, 10))))
    assert directory.exists()
    for path in Path(storage.locate(leases_dir(JOB))).iterdir():
        os.utime(path, (1, 1))
    now(storage, Policy(keep_last=1), stale_s=900)
    assert not directory.exists()


def test_a_lease_is_renewed_while_reading(
    storage: PosixStorage, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage, world, (10,))
    with Checkpoint.open(storage, JOB, SnapshotId(1, 10)) as checkpoint:
        before = storage.list(leases_dir(JOB))
        check_all(checkpoint, world)
        assert storage.list(leases_dir(JOB)) == before
        monkeypatch.setattr(lease_module, "LEASE_REFRESH_S", 0.0)
        check_all(checkpoint, world)
        after = storage.list(leases_dir(JOB))
        assert len(after) == 1
        assert after != before


def test_readers_that_race_with_retention_see_all_or_nothing(storage: PosixStorage, world: World) -> None:
    """Open and read while retention hides and deletes: either the right bytes or a clean refusal."""
    import threading

    problems: list[BaseException] = []
    read = 0
    for turn in range(12):
        snapshots = [SnapshotId(1, 100 * turn + 10), SnapshotId(1, 100 * turn + 20)]
        for snapshot in snapshots:
            save(storage, world, snapshot)
        start = threading.Barrier(2)

        def reader(start: threading.Barrier = start, snapshot: SnapshotId = snapshots[0]) -> None:
            nonlocal read
            start.wait()
            try:
                with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
                    check_all(checkpoint, world)
                    read += 1
            except CkptdError as error:
                if "no such checkpoint" not in str(error):
                    problems.append(error)

        thread = threading.Thread(target=reader)
        thread.start()
        start.wait()
        now(storage, Policy(keep_last=1))
        thread.join()
    assert not problems


def test_aborted_attempts_are_swept_when_they_are_old(storage: PosixStorage, world: World) -> None:
    fill(storage, world, (10,))
    write_all(storage, world, SnapshotId(1, 20), "dead")
    now(storage, Policy())
    directory = Path(storage.locate(attempt_dir(JOB, SnapshotId(1, 20), "dead")))
    assert directory.exists(), "somebody may still be writing"
    empty = Path(storage.locate(attempt_dir(JOB, SnapshotId(1, 30), "young")))
    empty.mkdir()
    for path in directory.iterdir():
        os.utime(path, (1, 1))
    assert now(storage, Policy()).deleted == [str(directory)]
    assert not directory.exists()
    assert empty.exists(), "somebody is about to write"
    assert steps_left(storage) == [10]


def test_what_is_not_ours_is_left_alone(storage: PosixStorage, world: World) -> None:
    fill(storage, world)
    foreign = Path(storage.locate(epoch_dir(JOB, 1))) / "notes"
    foreign.mkdir()
    (foreign / "file").write_bytes(b"x")
    now(storage, Policy(keep_last=1), attempt_stale_s=0)
    assert (foreign / "file").exists()


class Meanwhile(PosixStorage):
    """Something happens elsewhere when a checkpoint has just gone out of sight."""

    happens: Callable[[], object] = staticmethod(lambda: None)

    def move_file(self, source: str, target: str) -> None:
        super().move_file(source, target)
        if target.endswith("manifest.gone"):
            call, self.happens = self.happens, lambda: None
            call()


@pytest.fixture
def meanwhile(tmp_path: Path, world: World) -> Meanwhile:
    storage = Meanwhile(str(tmp_path / "root"))
    claim_epoch(storage, JOB, epoch_record(1))
    fill(storage, world)
    return storage


def back_to_10() -> EpochRecord:
    """A start of the job that goes on from step 10."""
    return epoch_record(2, ancestry=(SnapshotId(1, 10),))


def test_what_a_new_start_claims_while_it_is_hidden_comes_back(meanwhile: Meanwhile) -> None:
    """Its claim came before retention looked, after it hid: one of them sees the other."""
    meanwhile.happens = lambda: claim_epoch(meanwhile, JOB, back_to_10())
    done = now(meanwhile, Policy(keep_last=2))
    assert "epoch 2 was claimed" in done.ended
    assert (done.hidden, done.revealed) == ([], [SnapshotId(1, 10)])
    assert steps_left(meanwhile) == list(STEPS)


def test_what_somebody_is_about_to_open_comes_back(meanwhile: Meanwhile) -> None:
    leases: list[Lease] = []
    meanwhile.happens = lambda: leases.append(Lease.take(meanwhile, JOB, SnapshotId(1, 10)))
    assert now(meanwhile, Policy(keep_last=2)).hidden == [SnapshotId(1, 20)]
    assert steps_left(meanwhile) == [10, 30, 40]


def test_a_pass_that_is_called_off_once_it_hid_one_takes_that_back(meanwhile: Meanwhile) -> None:
    """It has not looked yet who needs it."""
    cancelled = threading.Event()
    meanwhile.happens = cancelled.set
    with pytest.raises(CkptdError, match="called off"):
        now(meanwhile, Policy(keep_last=1), cancelled=cancelled)
    assert steps_left(meanwhile) == list(STEPS)


def test_what_comes_back_while_it_is_hidden_again_never_loses_its_manifest(meanwhile: Meanwhile) -> None:
    """Of two passes one reveals while the other hides: it finds the manifest there once more, under its first name only."""
    pointer = step_dir(JOB, SnapshotId(1, 10))
    meanwhile.happens = lambda: meanwhile.reveal(pointer)
    assert meanwhile.hide(pointer)
    assert steps_left(meanwhile) == [20, 30, 40]
    assert meanwhile.reveal(pointer)
    assert steps_left(meanwhile) == list(STEPS)


def test_what_somebody_is_about_to_open_when_its_grace_is_over_is_not_deleted(
    storage: PosixStorage, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: the pass had looked before the lease came."""
    fill(storage, world, (10, 20))
    now(storage, Policy(keep_last=1), grace_s=3600)
    real, leases = retention.list_pointers, []

    def leased_before(*args: Any) -> Any:
        leases.append(Lease.take(storage, JOB, SnapshotId(1, 10)))
        return real(*args)

    monkeypatch.setattr(retention, "list_pointers", leased_before)
    assert now(storage, Policy(keep_last=1)).deleted == []
    monkeypatch.undo()
    assert now(storage, Policy(keep_last=1)).revealed == [SnapshotId(1, 10)]
    with Checkpoint.open(storage, JOB, SnapshotId(1, 10)) as checkpoint:
        check_all(checkpoint, world)


def test_a_retention_that_died_before_it_looked_is_made_up_for(meanwhile: Meanwhile) -> None:
    """The new start is killed, too, before it commits: nobody retains, and whoever comes next finds what it needs."""

    def power_off() -> None:
        claim_epoch(meanwhile, JOB, back_to_10())
        os.rename(meanwhile.root, f"{meanwhile.root}.away")

    meanwhile.happens = power_off
    with pytest.raises(CkptdError):
        now(meanwhile, Policy(keep_last=2))
    os.rename(f"{meanwhile.root}.away", meanwhile.root)
    assert steps_left(meanwhile) == [20, 30, 40]
    assert [info.snapshot.step for info in list_durable(meanwhile, JOB, Policy(keep_last=2))] == list(STEPS)


def test_what_a_newer_epoch_needs_is_not_deleted_any_more(meanwhile: Meanwhile) -> None:
    """Hidden rightly, and then a start goes back to an older branch: the next pass reveals instead of deleting."""
    assert now(meanwhile, Policy(keep_last=1), grace_s=60).hidden == [
        SnapshotId(1, step) for step in (10, 20, 30)
    ]
    claim_epoch(meanwhile, JOB, epoch_record(2, ancestry=(SnapshotId(1, 25),)))
    done = now(meanwhile, Policy(keep_last=1))
    assert ([s.step for s in done.revealed], done.deleted) == ([10, 20, 30], []), (
        "none of its branch was read back yet"
    )
    now(meanwhile, Policy(keep_last=1))
    assert steps_left(meanwhile) == [20, 30, 40], "the branch that was left stays until the new one has a checkpoint"


def test_an_epoch_without_a_claim_retains_nothing(meanwhile: Meanwhile) -> None:
    """Neither one that storage never heard of, nor another start of the same number, nor one that is superseded."""
    for epoch in (epoch_record(7), epoch_record(1, nonce="another")):
        done = now(meanwhile, Policy(keep_last=1), epoch=epoch)
        assert done.ended and not done.verified
    claim_epoch(meanwhile, JOB, epoch_record(2, ancestry=(SnapshotId(1, 40),)))
    assert now(meanwhile, Policy(keep_last=1), epoch=epoch_record(1)).ended
    assert steps_left(meanwhile) == list(STEPS)


def test_a_hiding_of_an_earlier_version_that_died_in_between_is_finished(
    storage: PosixStorage, world: World
) -> None:
    """It hid by link and unlink."""
    fill(storage, world, (10, 20))
    directory = Path(storage.locate(step_dir(JOB, SnapshotId(1, 10))))
    os.link(directory / "manifest.json", directory / "manifest.gone")
    assert steps_left(storage) == [10, 20]
    assert now(storage, Policy(keep_last=1), grace_s=60).hidden == [SnapshotId(1, 10)]
    assert sorted(p.name for p in directory.glob("manifest*")) == ["manifest.gone"]
