"""P1, P4, P6: whenever everything dies, readers find the old checkpoint or the new one, never part of one; P11; P12."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.core import failpoint
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist.commits import list_commits, list_durable
from ckptd.persist.lineage import claim_epoch, newest_record
from ckptd.persist.names import (
    DATA,
    KEEP,
    MANIFEST,
    PART,
    attempt_dir,
    epoch_dir,
    step_dir,
)
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.storage.base import Sight, Storage, read_file
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.storage.tree import DROPPED, HIDDEN
from ckptd.persist.verify import verify_at
from tests.node.checkpoints import (
    JOB,
    World,
    check_all,
    commit_all,
    epoch_record,
    make_world,
    save,
    small_world,
    write_all,
)
from tests.node.crash_storage import CrashStorage, PowerCut

OLD, NEW = SnapshotId(1, 10), SnapshotId(1, 20)
REPO = Path(__file__).resolve().parents[2]


def tiny_world(seed: int) -> World:
    from ckptd.core.state_map.box import Box
    from ckptd.core.state_map.layout import MAYBE, UNIQUE
    from ckptd.core.state_map.layout_build import LayoutItem

    items = {
        rank: [
            LayoutItem("w", "F32", (4, 6), Box((2 * rank, 0), (2, 6)), "param", UNIQUE, 1),
            LayoutItem("n", "BF16", (3,), Box.whole((3,)), "param", MAYBE, 1),
        ]
        for rank in range(2)
    }
    return make_world(items, seed=seed)


def expect_whole(storage: Storage, snapshots: set[SnapshotId], worlds: dict[SnapshotId, World]) -> None:
    """Everything that is listed opens, verifies and holds its own step's bytes."""
    for snapshot in snapshots:
        report = verify_at(storage, step_dir(JOB, snapshot))
        assert report.ok, (snapshot, report.problems)
        with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
            check_all(checkpoint, worlds[snapshot])


def listed(storage: Storage) -> set[SnapshotId]:
    return {info.snapshot for info in list_commits(storage, JOB)}


def no_partial_directory(storage: Storage, epoch: int = 1) -> None:
    """A stock reader loads every data file it finds in a step directory: there must be a manifest beside them."""
    for entry in storage.list(epoch_dir(JOB, epoch)):
        names = [inner.name for inner in storage.list(f"{epoch_dir(JOB, epoch)}/{entry.name}")]
        if any(name.endswith(DATA) for name in names) and "." not in entry.name:
            assert not {MANIFEST, HIDDEN, DROPPED}.isdisjoint(names), names


# --- power cuts at every operation, on the model ------------------------------------------------------------------
def crashed(cut_at: int, seed: int) -> tuple[CrashStorage, bool, list[str]]:
    """OLD committed, then the power is cut while NEW is written and committed. done: the commit had returned."""
    storage = CrashStorage()
    claim_epoch(storage, JOB, epoch_record(1, 2))
    save(storage, tiny_world(1), OLD)
    before = storage.operations
    storage.cut_at = before + cut_at if cut_at else 0
    done = False
    try:
        save(storage, tiny_world(2), NEW)
        done = True
    except PowerCut:
        pass
    return storage.restarted(seed), done, storage.trace[before:]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.chaos)])
def test_a_power_cut_at_every_operation_leaves_old_or_new(seeds: range) -> None:
    """Some hundreds of crash states: each operation of write and commit, several fates of what was not synced."""
    worlds = {OLD: tiny_world(1), NEW: tiny_world(2)}
    total = len(crashed(0, 0)[2])
    assert total > 30
    outcomes = set()
    for cut_at in range(1, total + 2):
        for seed in seeds:
            after, done, trace = crashed(cut_at, seed)
            found = listed(after)
            assert OLD in found, trace[-1]
            assert not done or NEW in found, "acknowledged, then lost"
            no_partial_directory(after)
            expect_whole(after, found, worlds)
            outcomes.add(found == {OLD, NEW})
            if seed == 0:
                save(after, worlds[NEW], NEW, "a2")  # the retry under another attempt
                expect_whole(after, listed(after), worlds)
                assert listed(after) == {OLD, NEW}
    assert outcomes == {True, False}


def test_the_model_finds_a_missing_directory_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the last syncs an acknowledged checkpoint can be lost: the test above would see it."""
    monkeypatch.setattr(CrashStorage, "secure", lambda *_: None)
    lost = 0
    for seed in range(8):
        after, done, _ = crashed(0, seed)
        lost += done and NEW not in listed(after)
    assert lost


def test_the_model_finds_a_manifest_before_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsync of the data files the manifest may survive them."""
    from tests.node.crash_storage import CrashWriter

    monkeypatch.setattr(CrashWriter, "finish", lambda self: len(self._file.data))
    torn = 0
    for seed in range(8):
        after, _, _ = crashed(0, seed)
        torn += any(not verify_at(after, step_dir(JOB, snapshot)).ok for snapshot in listed(after))
    assert torn


def test_a_power_cut_in_retention_never_takes_the_last() -> None:
    """P12: at every operation of a pass at least one checkpoint is listed and intact."""
    worlds = {SnapshotId(1, step): tiny_world(step) for step in (10, 20, 30)}

    def run(cut_at: int, seed: int) -> tuple[CrashStorage, int]:
        storage = CrashStorage()
        claim_epoch(storage, JOB, epoch_record(1, 2))
        for snapshot, world in worlds.items():
            save(storage, world, snapshot)
        before = storage.operations
        storage.cut_at = before + cut_at if cut_at else 0
        with suppress(PowerCut):
            retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        return storage.restarted(seed), storage.operations - before

    total = run(0, 0)[1]
    for cut_at in range(1, total + 1):
        for seed in range(4):
            after, _ = run(cut_at, seed)
            found = listed(after)
            assert SnapshotId(1, 30) in found
            expect_whole(after, found, worlds)
            no_partial_directory(after)
            retain(after, JOB, Policy(keep_last=1), grace_s=0)
            assert listed(after) == {SnapshotId(1, 30)}
            assert [entry.name for entry in after.list(epoch_dir(JOB, 1))] == ["step-0000000030"]


def half_committed(monkeypatch: pytest.MonkeyPatch) -> CrashStorage:
    """OLD is durable; the committer of NEW died when it had made it visible, before it synced the directory."""
    storage = CrashStorage()
    claim_epoch(storage, JOB, epoch_record(1, 2))
    save(storage, tiny_world(1), OLD)
    monkeypatch.setattr(failpoint, "_armed", {"persist.commit.visible": "error"})
    with pytest.raises(failpoint.FailpointError):
        save(storage, tiny_world(2), NEW)
    monkeypatch.undo()
    assert listed(storage) == {OLD, NEW}
    return storage


@pytest.mark.chaos
def test_nothing_goes_for_a_commit_that_a_power_cut_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: retention on another node sees it, counts it as the last one, and hides the old one."""
    worlds = {OLD: tiny_world(1), NEW: tiny_world(2)}
    before = half_committed(monkeypatch).operations
    for cut_at in range(1, 30):
        for seed in range(8):
            storage = half_committed(monkeypatch)
            storage.cut_at = before + cut_at
            with suppress(PowerCut):
                retain(storage, JOB, Policy(keep_last=1), grace_s=0)
            found = listed(storage.restarted(seed))
            assert found, f"nothing is left: operation {cut_at}, seed {seed}"
            expect_whole(storage.restarted(seed), found, worlds)


def test_what_was_read_back_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: from then on an older one may go for it, whether its committer lived to sync its directory or not."""
    for seed in range(8):
        storage = half_committed(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(failpoint, "_armed", {"persist.retain.verified": "error"})
            with pytest.raises(failpoint.FailpointError):
                retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        assert listed(storage.restarted(seed)) == {OLD, NEW}


def test_what_is_listed_as_durable_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: a new steward reads the list and tells the ranks; without the syncs it may tell them of a half committed one."""
    lost = 0
    for seed in range(8):
        storage = half_committed(monkeypatch)
        lost += NEW not in listed(storage.restarted(seed))
        assert {info.snapshot for info in list_durable(storage, JOB, Policy())} == {OLD, NEW}
        assert listed(storage.restarted(seed)) == {OLD, NEW}
    assert lost, "the model takes nothing back"


def committed_beside_one_that_dies(
    ours: str, before: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> CrashStorage:
    """The committer of a1 dies when it has made it visible: before ours looks, or just before ours would do so."""
    storage, dead = CrashStorage(), False
    reports = {attempt: write_all(storage, world, NEW, attempt) for attempt in ("a1", "a2")}
    rename = storage.move_dir

    def other_dies() -> None:
        nonlocal dead
        dead = True
        with monkeypatch.context() as patch:
            patch.setattr(failpoint, "_armed", {"persist.commit.visible": "error"})
            with pytest.raises(failpoint.FailpointError):
                commit_all(storage, world, NEW, reports["a1"], "a1")

    def move_dir(source: str, target: str) -> bool:
        if not dead:
            other_dies()
        return rename(source, target)

    if before:
        other_dies()
    monkeypatch.setattr(storage, "move_dir", move_dir)
    commit_all(storage, world, NEW, reports[ours], ours)
    assert dead
    return storage


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("ours", ["a1", "a2"])
def test_what_another_committer_made_visible_is_durable_when_our_commit_returns(
    ours: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: of the same attempt or of another; it died before it synced the directory, and ours tells the ranks."""
    world = tiny_world(2)
    for seed in range(8):
        after = committed_beside_one_that_dies(ours, before, world, monkeypatch).restarted(seed)
        assert listed(after) == {NEW}, "acknowledged, then lost"
        expect_whole(after, {NEW}, {NEW: world})


def test_it_is_so_although_a_third_committer_takes_our_attempt_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside the checkpoint: whoever takes it away syncs that directory, but perhaps when ours has returned."""
    monkeypatch.setattr(CrashStorage, "discard", lambda storage, path: None)
    for seed in range(8):
        after = committed_beside_one_that_dies("a2", False, tiny_world(2), monkeypatch).restarted(seed)
        assert listed(after) == {NEW}


def test_what_a_method_of_a_storage_did_survives_a_power_cut_when_it_returns() -> None:
    """Nobody who relies on it asks in what order others did what to the same directory."""
    storage, pointer, path = CrashStorage(), step_dir(JOB, NEW), f"{attempt_dir(JOB, OLD, 'a1')}/file{DATA}"

    def cuts() -> list[CrashStorage]:
        return [storage.restarted(seed) for seed in range(8)]

    storage.begin(attempt_dir(JOB, OLD, "a1"))
    writer = storage.put(path)
    writer.write(b"bytes")
    writer.finish()
    assert all(read_file(after, path, 100) == b"bytes" for after in cuts())
    storage.discard(attempt_dir(JOB, OLD, "a1"))

    def seen(storage: CrashStorage) -> list[tuple[Sight, bool, bool]]:
        return [(p.sight, KEEP in p.marks, p.hidden_s is not None) for p in storage.pointers(epoch_dir(JOB, 1))]

    save(storage, tiny_world(2), NEW)
    storage.mark(pointer, KEEP, b"")
    shown, hidden = [(Sight.SHOWN, True, False)], [(Sight.HIDDEN, True, True)]
    assert all(seen(after) == shown for after in cuts())
    assert storage.unmark(pointer, KEEP)
    assert all(seen(after) == [(Sight.SHOWN, False, False)] for after in cuts())
    storage.mark(pointer, KEEP, b"")
    steps = (storage.hide, hidden), (storage.reveal, shown), (storage.hide, hidden), (storage.drop, [])
    for step, wanted in steps:
        assert step(pointer)
        assert all(seen(after) == wanted for after in cuts()), step.__name__


# --- kill -9 of real processes --------------------------------------------------------------------------------------
def child(
    root: Path, what: str, step: int, failpoint: str, wrap: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    command = [*wrap, sys.executable, "-m", "tests.node.persist_child", str(root), what, str(step)]
    environment = {**os.environ, "CKPTD_FAILPOINT": failpoint, "PYTHONPATH": str(REPO)}
    return subprocess.run(command, env=environment, cwd=REPO, capture_output=True, timeout=200)


WRITE_POINTS = [f"persist.write.{name}" for name in ("begin", "chunk", "synced", "report")]
COMMIT_POINTS = [
    f"persist.commit.{name}"
    for name in ("checked", "named", "synced", "manifest", "complete", "visible", "done")
]


@pytest.mark.chaos
@pytest.mark.parametrize("point", WRITE_POINTS + COMMIT_POINTS)
def test_kill_9_at_every_step(tmp_path: Path, point: str) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    worlds = {OLD: small_world(2, seed=1), NEW: small_world(2, seed=20)}
    save(storage, worlds[OLD], OLD)
    result = child(tmp_path / "root", "save", 20, f"{point}:kill")
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    found = listed(storage)
    assert OLD in found
    assert (NEW in found) == (point in ("persist.commit.visible", "persist.commit.done"))
    expect_whole(storage, found, worlds)
    no_partial_directory(storage)
    if point.startswith(
        "persist.commit"
    ):  # the same attempt, again: the committer's successor has the same reports
        reports = [(tmp_path / "root" / f"report{index}").read_bytes() for index in range(2)]
        commit_all(storage, worlds[NEW], NEW, reports, "child")
    else:
        save(storage, worlds[NEW], NEW, "another")
    assert listed(storage) == {OLD, NEW}
    expect_whole(storage, {OLD, NEW}, worlds)
    retain(storage, JOB, Policy(), attempt_stale_s=0)
    assert [entry.name for entry in storage.list(epoch_dir(JOB, 1))] == ["step-0000000010", "step-0000000020"]


@pytest.mark.parametrize(
    "point", ["persist.retain.verified", "persist.retain.hidden", "persist.retain.moved"]
)
def test_kill_9_in_retention(tmp_path: Path, point: str) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    worlds = {OLD: small_world(2, seed=1), NEW: small_world(2, seed=20)}
    for snapshot, world in worlds.items():
        save(storage, world, snapshot)
    assert child(tmp_path / "root", "retain", 0, f"{point}:kill").returncode == -signal.SIGKILL
    assert NEW in listed(storage)
    expect_whole(storage, listed(storage), worlds)
    retain(storage, JOB, Policy(keep_last=1), grace_s=0)
    assert listed(storage) == {NEW}
    assert [entry.name for entry in storage.list(epoch_dir(JOB, 1))] == ["step-0000000020"]


def test_kill_9_after_a_claim(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    assert child(tmp_path / "root", "claim", 3, "persist.claim.published:kill").returncode == -signal.SIGKILL
    assert newest_record(storage, JOB) == epoch_record(3)
    assert claim_epoch(storage, JOB, epoch_record(3)) == (True, 3)
    assert claim_epoch(storage, JOB, epoch_record(3, nonce="other")) == (False, 3)


# --- fsync (P11) ----------------------------------------------------------------------------------------------------
def strace(when: str) -> tuple[str, ...]:
    tool = shutil.which("strace")
    if tool is None:
        pytest.skip("strace is not installed")
    return (
        tool,
        "-f",
        "-qq",
        "-o",
        os.devnull,
        "-e",
        "trace=fsync",
        "-e",
        f"inject=fsync:error=EIO:when={when}",
    )


@pytest.fixture
def prepared(tmp_path: Path) -> PosixStorage:
    """The attempt's directory is there, so that the first fsync of each thread is that of a file."""
    storage = PosixStorage(str(tmp_path / "root"))
    storage.make_dir(attempt_dir(JOB, NEW, "child"))
    return storage


def test_a_failed_fsync_is_final_for_its_name(prepared: PosixStorage) -> None:
    """Every file whose fsync failed is written anew under another name; the first name is never reported."""
    result = child(Path(prepared.root), "write", 20, "", strace("1"))
    if b"ptrace" in result.stderr.lower():
        pytest.skip("ptrace is not permitted here")
    assert result.returncode == 0, result.stderr.decode()
    names = [entry.name for entry in prepared.list(attempt_dir(JOB, NEW, "child"))]
    assert all(name.endswith(PART) for name in names)
    assert not any("-0000." in name for name in names), "a name whose fsync failed was kept"
    reports = [Path(prepared.root, f"report{index}").read_bytes() for index in range(2)]
    world = small_world(2, seed=20)
    commit_all(prepared, world, NEW, reports, "child")
    expect_whole(prepared, {NEW}, {NEW: world})


def test_when_fsync_keeps_failing_nothing_is_acknowledged(prepared: PosixStorage) -> None:
    result = child(Path(prepared.root), "write", 20, "", strace("1+"))
    if b"ptrace" in result.stderr.lower():
        pytest.skip("ptrace is not permitted here")
    assert result.returncode == 1
    assert b"SyncFailed" in result.stderr
    assert b"hint" in result.stderr
    assert not Path(prepared.root, "report0").exists()
    assert prepared.list(attempt_dir(JOB, NEW, "child")) == []


def test_reports_of_two_writers_are_needed(tmp_path: Path) -> None:
    """The helper above writes what it says."""
    storage = PosixStorage(str(tmp_path / "root"))
    assert len(write_all(storage, small_world(2, seed=20), NEW, "a1")) == 2
