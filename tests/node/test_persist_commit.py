"""The commit: coverage is proved, files are checked through the committer's own mount, the first commit wins (D13)."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.messages import WritePiece
from ckptd.core.retention import CommitInfo
from ckptd.persist import manifest as m
from ckptd.persist import report as r
from ckptd.persist.commit import commit
from ckptd.persist.commits import list_all, list_commits
from ckptd.persist.index import Chunk, Index, Tensor
from ckptd.persist.manifest_file import decode, encode
from ckptd.persist.names import INDEX, KEEP, MANIFEST, PART, attempt_dir, epoch_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import Entry, NotFound, Storage, StorageError
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.storage.tree import COMMITTERS_MAX
from ckptd.persist.sums import FileDamage
from ckptd.persist.writer import write_pieces
from tests.descriptors import opened, opened_since
from tests.node.checkpoints import JOB, check_all, commit_all, epoch_record, save, small_world, write_all

SNAPSHOT = SnapshotId(1, 10)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(str(tmp_path / "root"))


def attempt_of(storage: Storage) -> str:
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        return checkpoint.manifest.attempt


def names_of_epoch(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.list(epoch_dir(JOB, 1))]


def test_only_the_commit_makes_it_visible(storage: PosixStorage) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    written = storage.list(attempt_dir(JOB, SNAPSHOT, "a1"))
    assert written
    assert all(entry.name.endswith(PART) for entry in written), "no stock reader may see an uncommitted file"
    assert list_commits(storage, JOB) == []
    commit_all(storage, world, SNAPSHOT, reports, keep=True)
    assert list_commits(storage, JOB) == [CommitInfo(SNAPSHOT, keep=True)]
    assert names_of_epoch(storage) == ["step-0000000010"]
    names = [entry.name for entry in storage.list(step_dir(JOB, SNAPSHOT))]
    assert not any(name.endswith(PART) for name in names)
    assert {KEEP, MANIFEST} < set(names)


def test_a_commit_may_be_repeated(storage: PosixStorage) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    for _ in range(3):
        commit_all(storage, world, SNAPSHOT, reports)
    assert names_of_epoch(storage) == ["step-0000000010"]
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


def test_the_first_commit_wins_and_the_loser_cleans_up(storage: PosixStorage) -> None:
    world = small_world()
    first, second = (write_all(storage, world, SNAPSHOT, attempt) for attempt in ("a1", "a2"))
    commit_all(storage, world, SNAPSHOT, second, "a2")
    commit_all(storage, world, SNAPSHOT, first, "a1", keep=True)
    assert attempt_of(storage) == "a2"
    assert names_of_epoch(storage) == ["step-0000000010"]
    assert list_commits(storage, JOB) == [CommitInfo(SNAPSHOT, keep=True)], "the loser may know more"


def test_what_is_to_be_kept_is_so_where_another_attempt_is_faster(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits between our last look and our own commit, and knows nothing of it."""
    world, real = small_world(), storage.commit_if_absent
    first, second = (write_all(storage, world, SNAPSHOT, attempt) for attempt in ("a1", "a2"))

    def after_the_other(*ours: Any) -> bool:
        monkeypatch.setattr(storage, "commit_if_absent", real)
        commit_all(storage, world, SNAPSHOT, first, "a1")
        return real(*ours)

    monkeypatch.setattr(storage, "commit_if_absent", after_the_other)
    commit_all(storage, world, SNAPSHOT, second, "a2", keep=True)
    assert (attempt_of(storage), list_commits(storage, JOB)) == ("a1", [CommitInfo(SNAPSHOT, keep=True)])


def test_a_list_says_which_capture_of_a_step_storage_has(storage: PosixStorage) -> None:
    """P1: what memory has of another one does not fill its gaps. There is one of each step, the first that was committed."""
    world, first = small_world(), replace(SNAPSHOT, grant=7)
    save(storage, world, first, "a1")
    save(storage, world, replace(SNAPSHOT, grant=12), "a2")
    (info,) = list_commits(storage, JOB)
    assert (info.snapshot, info.captured, attempt_of(storage)) == (SNAPSHOT, first, "a1")
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        assert checkpoint.manifest.snapshot == first


def test_two_committers_at_the_same_instant(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have finished their directories; only the exclusive rename decides. Fails when move_dir is not exclusive."""
    world = small_world()
    reports = {attempt: write_all(storage, world, SNAPSHOT, attempt) for attempt in ("a1", "a2")}
    ready = threading.Barrier(2)
    moved: list[bool] = []
    real = PosixStorage.move_dir

    def together(self: PosixStorage, source: str, target: str) -> bool:
        if target != step_dir(JOB, SNAPSHOT):  # the loser clears up
            return real(self, source, target)
        ready.wait()
        moved.append(real(self, source, target))
        return moved[-1]

    monkeypatch.setattr(PosixStorage, "move_dir", together)
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(lambda attempt: commit_all(storage, world, SNAPSHOT, reports[attempt], attempt), reports)
        )
    assert names_of_epoch(storage) == ["step-0000000010"]
    assert sorted(moved) == [False, True]
    winner = attempt_of(storage)
    stems = {
        r.decode(report).files[0].path.rpartition("-")[0]
        for report in reports[winner]
        if r.decode(report).files
    }
    found = {
        entry.name.rpartition("-")[0]
        for entry in storage.list(step_dir(JOB, SNAPSHOT))
        if entry.name not in (MANIFEST, INDEX)
    }
    assert stems == found, "files of both attempts in one checkpoint"


def test_two_committers_of_one_attempt(storage: PosixStorage) -> None:
    """A steward and its successor commit the same reports at once."""
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    start = threading.Barrier(4)

    def run(_: int) -> None:
        start.wait()
        commit_all(storage, world, SNAPSHOT, reports)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


class Swept(PosixStorage):
    """Other committers of the attempt sweep an unfinished file so often, just before it is published."""

    def __init__(self, root: str, name: str, times: int) -> None:
        super().__init__(root)
        self._name, self._left = name, times
        self.listed = 0

    def publish(self, source: str, target: str) -> bool:
        if target.endswith(f"/{self._name}") and self._left:
            self._left -= 1
            self.unlink(source)
        return super().publish(source, target)

    def entries(self, path: str) -> list[Entry]:
        self.listed += path == attempt_dir(JOB, SNAPSHOT, "a1")
        return super().entries(path)


@pytest.mark.parametrize("name", [MANIFEST, KEEP])
@pytest.mark.parametrize("times", [1, COMMITTERS_MAX - 1])
def test_a_committer_whose_unfinished_file_was_swept_sweeps_nobody_again(
    tmp_path: Path, name: str, times: int
) -> None:
    """Four of them swept each other for longer than each tried (the suite, once)."""
    world = small_world()
    storage = Swept(str(tmp_path / "root"), name, times)
    commit_all(storage, world, SNAPSHOT, write_all(storage, world, SNAPSHOT, "a1"), keep=True)
    assert storage.listed == 1
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


def test_a_repeated_order_leaves_no_stranger(storage: PosixStorage) -> None:
    """The same node wrote twice for one attempt: only what was reported becomes part of the checkpoint."""
    world = small_world()
    write_all(storage, world, SNAPSHOT, "a1")
    reports = write_all(storage, world, SNAPSHOT, "a1")
    commit_all(storage, world, SNAPSHOT, reports)
    known = {file.path for report in reports for file in r.decode(report).files}
    known |= {side.path for report in reports if (side := r.decode(report).side)}
    assert {entry.name for entry in storage.list(step_dir(JOB, SNAPSHOT))} == known | {MANIFEST, INDEX}


def test_a_committer_that_died_between_link_and_unlink_leaves_no_second_name(storage: PosixStorage) -> None:
    world = small_world(rows=40)
    reports = write_all(storage, world, SNAPSHOT, "a1")
    for path in Path(storage.locate(attempt_dir(JOB, SNAPSHOT, "a1"))).iterdir():
        os.link(path, path.with_name(path.name.removesuffix(PART)))
    commit_all(storage, world, SNAPSHOT, reports)
    assert not [entry.name for entry in storage.list(step_dir(JOB, SNAPSHOT)) if entry.name.endswith(PART)]
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


# --- refusals -----------------------------------------------------------------------------------------------------
def nothing_committed(storage: Storage) -> None:
    assert list_commits(storage, JOB) == []
    assert "step-0000000010" not in names_of_epoch(storage)


def test_a_missing_report_is_a_gap(storage: PosixStorage) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    for kept in (reports[:1], reports[1:], []):
        with pytest.raises(CkptdError, match="not written"):
            commit_all(storage, world, SNAPSHOT, kept)
    nothing_committed(storage)


def test_a_missing_rank_is_refused(storage: PosixStorage) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    with pytest.raises(CkptdError, match="layouts of ranks"):
        commit(
            storage,
            JOB,
            SNAPSHOT,
            "a1",
            epoch_record(),
            reports,
            {0: world.layouts[0]},
            world.per_rank,
            False,
        )
    nothing_committed(storage)


def test_a_slice_written_twice_is_refused(storage: PosixStorage) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    piece = world.held(WritePiece(0, world.layouts[0].layout_id, ((0, 1),), False))
    reports.append(write_pieces(storage, JOB, SNAPSHOT, "a1", "n9", [piece], threading.Event()))
    with pytest.raises(CkptdError, match="two files hold"):
        commit_all(storage, world, SNAPSHOT, reports)
    nothing_committed(storage)


@pytest.mark.parametrize("told", [frozenset(), frozenset({"t:model.norm", "t:model.mean", "o:rng"})])
def test_writers_and_committer_must_agree_what_is_per_rank(
    storage: PosixStorage, told: frozenset[str]
) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    with pytest.raises(CkptdError, match="which this snapshot does not have"):
        commit(storage, JOB, SNAPSHOT, "a1", epoch_record(), reports, world.layouts, told, False)
    nothing_committed(storage)


def test_objects_that_were_to_be_equal_but_are_not(storage: PosixStorage) -> None:
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    with pytest.raises(CkptdError, match="object rng differs"):
        commit(
            storage,
            JOB,
            SNAPSHOT,
            "a1",
            epoch_record(),
            reports,
            world.layouts,
            world.per_rank - {"o:rng"},
            False,
        )
    nothing_committed(storage)


def test_a_node_that_wrote_somewhere_else(tmp_path: Path) -> None:
    """Two mounts of one name that are not one storage: found out before anything becomes visible."""
    here, there = PosixStorage(str(tmp_path / "here")), PosixStorage(str(tmp_path / "there"))
    world = small_world()
    reports = write_all(here, world, SNAPSHOT, "a1")
    write_all(there, world, SNAPSHOT, "a1")
    with pytest.raises(CkptdError, match="what node n0 wrote is not here") as caught:
        commit_all(there, world, SNAPSHOT, reports)
    assert "preflight" in caught.value.hint
    nothing_committed(there)


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("kind", ["truncate", "header", "sums", "side", "missing"])
def test_files_are_checked_before_the_commit(storage: PosixStorage, kind: str, writer: int) -> None:
    """P4: of every writer, not only of the first one."""
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    suffix = ".side.part" if kind in ("sums", "side") else ".safetensors.part"
    directory = Path(storage.locate(attempt_dir(JOB, SNAPSHOT, "a1")))
    side, files = r.decode(reports[writer]).side, r.decode(reports[writer]).files
    assert side is not None and files
    name = side.path if kind in ("sums", "side") else files[0].path
    victim = directory / f"{name}{PART}"
    assert victim.name.endswith(suffix)
    if kind == "truncate":
        with victim.open("r+b") as file:
            file.truncate(victim.stat().st_size - 1)
    elif kind == "missing":
        victim.unlink()
    else:
        flip(victim, -1 if kind == "side" else 40)
    before = opened()
    with pytest.raises(CkptdError) as caught:
        commit_all(storage, world, SNAPSHOT, reports)
    assert victim.name.removesuffix(PART) in caught.value.where
    assert kind != "truncate" or "bytes, here are" in str(caught.value), "both sizes are told"
    assert opened_since(before) == [], "no file stays open"
    nothing_committed(storage)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_vanished_under_the_hands_of_a_commit_is_looked_for_once_more(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another committer of this attempt may have been there."""
    world = small_world()
    reports = write_all(storage, world, SNAPSHOT, "a1")
    real, moved = storage.move_dir, []

    def gone_at_first(source: str, to: str) -> bool:
        moved.append(source)
        if len(moved) == 1:
            raise NotFound("gone")
        return real(source, to)

    monkeypatch.setattr(storage, "move_dir", gone_at_first)
    commit_all(storage, world, SNAPSHOT, reports)
    assert list_commits(storage, JOB) == [CommitInfo(SNAPSHOT)]


def test_a_commit_that_retention_hides_at_once_was_made(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something newer is durable, too: nobody shall write this one again."""
    real = storage.commit_if_absent

    def and_hidden(attempt: str, pointer: str, *rest: Any) -> bool:
        return real(attempt, pointer, *rest) and storage.hide(pointer)

    monkeypatch.setattr(storage, "commit_if_absent", and_hidden)
    save(storage, small_world(rows=40))
    assert list_all(storage, JOB) == [CommitInfo(SNAPSHOT, hidden=True)]


def test_a_mark_that_came_with_a_second_attempt_is_durable(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4, P12: retention would delete it after a power cut."""
    world = small_world()
    first, second = (write_all(storage, world, SNAPSHOT, attempt) for attempt in ("a1", "a2"))
    commit_all(storage, world, SNAPSHOT, first, "a1")
    synced: list[str] = []
    real = storage.sync_dir
    monkeypatch.setattr(storage, "sync_dir", lambda path: (synced.append(path), real(path)))
    commit_all(storage, world, SNAPSHOT, second, "a2", keep=True)
    assert step_dir(JOB, SNAPSHOT) in synced


def test_a_commit_leaves_no_file_open(storage: PosixStorage) -> None:
    save(storage, small_world())
    before = opened()
    save(storage, small_world(), SnapshotId(1, 20))
    assert opened_since(before) == []


def test_malformed_reports(storage: PosixStorage) -> None:
    world = small_world()
    good = write_all(storage, world, SNAPSHOT, "a1")
    newer = r.encode(msgspec.structs.replace(r.decode(good[0]), version=r.REPORT_VERSION + 1))
    for bad in (b"", b"\x93", b"\x80", good[0][:-3], newer):
        with pytest.raises(CkptdError):
            commit_all(storage, world, SNAPSHOT, [bad, good[1]])
    evil = r.decode(good[0])
    assert evil.side
    evil = msgspec.structs.replace(evil, side=msgspec.structs.replace(evil.side, path="../../x.side"))
    with pytest.raises(StorageError, match="unsafe"):
        commit_all(storage, world, SNAPSHOT, [r.encode(evil), good[1]])
    nothing_committed(storage)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda file: {"sums_sum": bytes(16)}, "the block sums do not match"),
        (lambda file: {"sums_at": 1 << 30}, "bytes at 1073741824 in a file of"),
        (lambda file: {"path": f"{file.path}.txt"}, "reports a file named"),
    ],
)
def test_reports_that_files_do_not_bear_out(storage: PosixStorage, changed: Any, match: str) -> None:
    """P10: a writer's word is not enough, whatever happened to its memory."""
    world = small_world()
    good = write_all(storage, world, SNAPSHOT, "a1")
    report = r.decode(good[0])
    first, *rest = report.files
    bad = msgspec.structs.replace(report, files=[msgspec.structs.replace(first, **changed(first)), *rest])
    with pytest.raises(CkptdError, match=match):
        commit_all(storage, world, SNAPSHOT, [r.encode(bad), good[1]])
    nothing_committed(storage)


def test_names_that_are_no_names(storage: PosixStorage) -> None:
    world = small_world()
    for job in ("gpt", "../gpt", "1000/../gpt", "1000/" + "x" * 101, "1000/.gpt", "x/gpt"):
        with pytest.raises(CkptdError):
            list_commits(storage, job)
    for attempt in ("", "a/b", "..", "x" * 65):
        with pytest.raises(CkptdError):
            write_all(storage, world, SNAPSHOT, attempt)


def test_a_damaged_checkpoint_of_that_name_is_put_aside(storage: PosixStorage) -> None:
    """First commit wins, but what cannot be read has not won."""
    world = small_world()
    save(storage, world)
    flip(Path(storage.locate(f"{step_dir(JOB, SNAPSHOT)}/{MANIFEST}")), 300)
    with pytest.raises(FileDamage):
        Checkpoint.open(storage, JOB, SNAPSHOT)
    save(storage, world, attempt="a2")
    assert attempt_of(storage) == "a2"


def test_a_directory_in_the_way_is_not_success(storage: PosixStorage) -> None:
    world = small_world()
    storage.make_dir(f"{step_dir(JOB, SNAPSHOT)}/somebody")
    with pytest.raises(StorageError, match="in the way"):
        save(storage, world)


def test_the_manifest_holds_the_lineage(storage: PosixStorage) -> None:
    world = small_world()
    record = epoch_record(3, 2, ancestry=(SnapshotId(2, 7), SnapshotId(1, 5)))
    snapshot = replace(SNAPSHOT, epoch=3)
    commit_all(storage, world, snapshot, write_all(storage, world, snapshot, "a1"), record=record)
    with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
        assert checkpoint.manifest.epoch == record
        assert checkpoint.manifest.aliases == {"model.head": "model.wide"}
        assert checkpoint.manifest.world == 2


def test_ten_thousand_tensors() -> None:
    """Manifest and index stay small: 10,000 tensors of 8 chunks."""
    files = [
        m.DataFile(f"f{i}.safetensors", 1 << 40, 4096, "0" * 32, 1 << 20, 0, 16, "0" * 32) for i in range(8)
    ]
    keys = [f"model.layers.{i}.attention.weight" for i in range(10_000)]
    chunks = [
        [Chunk(c, 4096 + i * 1024, 16 << 20, i * 16, (c * 1024, 0), (1024, 8192)) for c in range(8)]
        for i in range(10_000)
    ]
    storage = MemoryStorage()
    save(storage, small_world())
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        manifest = msgspec.structs.replace(checkpoint.manifest, files=files)
    tensors = [Tensor(key, "BF16", (8192, 8192), "param") for key in keys]
    made = encode(m.Contents(manifest, Index.of(list(zip(tensors, chunks, strict=True)))))
    assert sum(map(len, made.values())) < 4 << 20
    read = decode(made[MANIFEST], lambda: made[INDEX], "x").index
    assert list(read.tensors()) == tensors
    assert [read.tensor_at(at) for at in range(len(tensors))] == tensors
    assert [read.chunks_at(at) for at in range(len(tensors))] == chunks
