"""What did not change is written once: later checkpoints name where it lies, and retention, readers and checks know (D22)."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import doubted
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist import commit as commit_module
from ckptd.persist import report as r
from ckptd.persist import unchanged as unchanged_module
from ckptd.persist.commits import list_all, list_commits, list_jobs, list_stored
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.manifest import Contents
from ckptd.persist.manifest_file import encode, read
from ckptd.persist.names import OF, VERIFIED, step_dir
from ckptd.persist.opening import root_at, verify
from ckptd.persist.pieces import chunks_of
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.storage.base import NotFound, Storage, StorageError
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.sums import FileDamage
from ckptd.persist.unchanged import newest_before, unchanged
from ckptd.persist.verify import VerifyReport, mark_damaged, verify_at
from tests.core.worlds import rows_of
from tests.node.checkpoints import (
    JOB,
    World,
    check_all,
    commit_all,
    epoch_record,
    make_world,
    orders,
    save,
    worlds,
    write_all,
)

STEPS = [SnapshotId(1, step) for step in (10, 20, 30, 40)]
MANY = Policy(keep_last=10)


@pytest.fixture(params=["memory", "posix", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "memory":
        yield MemoryStorage()
    elif request.param == "posix":
        yield PosixStorage(str(tmp_path / "root"))
    else:
        yield storage_at(request.getfixturevalue("bucket"), create=True)


def tuned(step: int, *, frozen: int = 0, ranks: int = 2) -> World:
    """A frozen base of 3 MiB, in rows, and an adapter that is another one after each step. frozen: another one of these."""
    base, adapter = (768, 1024), (64, 16)
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(ranks)}
    for rank, (rows, few) in enumerate(zip(rows_of(base, ranks), rows_of(adapter, ranks), strict=True)):
        items[rank].append(LayoutItem("base.weight", "F32", base, rows, "param", UNIQUE, 1))
        items[rank].append(LayoutItem("adapter.weight", "F32", adapter, few, "param", UNIQUE, 1))
        items[rank].append(LayoutItem("optim.step", "F32", (), Box.whole(()), "optim", MAYBE, 1))
    bytes_of_base = np.random.default_rng(1000 + frozen).integers(0, 256, (*base, 4), np.uint8)
    return make_world(items, seed=step, values={("base.weight", None): bytes_of_base})


def of(storage: Storage, snapshot: SnapshotId) -> set[SnapshotId]:
    found = {info.snapshot: info.of for info in list_all(storage, JOB)}
    return set(found[snapshot])


def own_bytes(storage: Storage, snapshot: SnapshotId) -> int:
    manifest = read(storage, step_dir(JOB, snapshot)).manifest
    return sum(file.size - file.data_start for file in manifest.files if file.of is None)


def check(storage: Storage, snapshot: SnapshotId, world: World) -> None:
    with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
        check_all(checkpoint, world)
    assert verify_at(storage, step_dir(JOB, snapshot)).problems == []


def test_a_frozen_base_is_written_once_and_stays_as_long_as_it_is_needed(storage: Storage) -> None:
    saved = {step: tuned(step.step) for step in STEPS[:3]}
    for step, world in saved.items():
        save(storage, world, step, dedup=True)
    sizes = [own_bytes(storage, step) for step in saved]
    assert sizes[0] > 3 << 20 and max(sizes[1:]) < 16 << 10
    retain_twice(storage)
    assert [info.snapshot for info in list_commits(storage, JOB)] == [STEPS[0], STEPS[2]], "one hop, not a chain"
    check(storage, STEPS[2], saved[STEPS[2]])
    save(storage, unfrozen := tuned(4, frozen=1), STEPS[3], dedup=True)
    assert of(storage, STEPS[3]) == set()
    retain_twice(storage)
    assert [info.snapshot for info in list_commits(storage, JOB)] == [STEPS[3]]
    check(storage, STEPS[3], unfrozen)


def experts(step: int, idle: int) -> World:
    """Four, each a parameter with its optimizer's state on one of two ranks; no token has come to one of them since step 1."""
    items: dict[int, list[LayoutItem]] = {0: [], 1: []}
    for number, (name, role) in enumerate((f"{owner}.{at}.w", owner) for at in range(4) for owner in ("param", "optim")):
        items[number // 4].append(LayoutItem(name, "F32", (64, 1024), Box.whole((64, 1024)), role, UNIQUE, 1))
    still = {(f"{owner}.{idle}.w", None): values_of(owner, idle) for owner in ("param", "optim")}
    return make_world(items, seed=step, values=still)


def values_of(owner: str, number: int) -> np.ndarray:
    return np.random.default_rng([len(owner), ord(owner[0]), number]).integers(0, 256, (64, 1024, 4), np.uint8)


@pytest.mark.parametrize("idle", [0, 3])
def test_an_expert_that_saw_no_token_is_not_written_again(idle: int) -> None:
    """Only what the others have learned is, by both ranks."""
    storage = MemoryStorage()
    for step in STEPS[:2]:
        save(storage, experts(step.step, idle), step, dedup=True)
    contents = read(storage, step_dir(JOB, STEPS[1]))
    where = {key: {contents.manifest.files[chunk.file].of for chunk in contents.index.chunks_at(at)}
             for at, key in enumerate(contents.index.names.keys)}  # fmt: skip
    still = {f"{owner}.{idle}.w" for owner in ("param", "optim")}
    assert where == {key: {STEPS[0] if key in still else None} for key in where} and len(where) == 8
    assert own_bytes(storage, STEPS[1]) - 6 * (256 << 10) < 4096
    check(storage, STEPS[1], experts(STEPS[1].step, idle))


@pytest.mark.parametrize("changed", [None, 0, 1, 700])
def test_what_several_ranks_of_a_node_have_together_is_compared_by_its_bytes(changed: int | None) -> None:
    """One box of two ranks' rows, of which nobody has sums: block by block."""
    storage, snapshots, world = MemoryStorage(), STEPS[:2], tuned(1)
    for snapshot in snapshots:
        commit_all(storage, world, snapshot, write_all(storage, world, snapshot, "a1", nodes=1, dedup=True))
        values = dict(world.values)
        if changed is not None:
            values["base.weight", None] = values["base.weight", None].copy()
            values["base.weight", None][changed, 5] ^= 1
        if snapshot == STEPS[0]:
            world = remade(world, values)
    assert of(storage, STEPS[1]) == ({STEPS[0]} if changed is None else set())
    check(storage, STEPS[1], world)


def test_whoever_compares_is_asked_now_and_then_whether_to_go_on() -> None:
    storage, world, asked = MemoryStorage(), tuned(1), list[None]()
    save(storage, world, STEPS[0])
    chunks = [chunk for pieces in orders(world).values() for chunk in chunks_of(pieces, world.per_rank)]
    unchanged(storage, JOB, STEPS[1], chunks, lambda: asked.append(None))
    assert len(asked) == len(chunks)


def test_off_by_default_and_where_nothing_is_older(storage: Storage) -> None:
    save(storage, tuned(1), STEPS[0], dedup=True)
    save(storage, tuned(2), STEPS[1])
    assert [of(storage, step) for step in STEPS[:2]] == [set(), set()]
    assert own_bytes(storage, STEPS[1]) > 3 << 20


@settings(max_examples=50, deadline=None)  # four checkpoints written and read for each example
@given(worlds(), st.integers(0, 1 << 30))
def test_whatever_changes_each_checkpoint_has_its_own_bytes(world: World, seed: int) -> None:
    """Kept however little it is: then all that is equal is named, in the checkpoint that wrote it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged_module, "KEPT_SHARE_MIN", 0.0)
        storage, saved, chance = MemoryStorage(), {}, Random(seed)
        names = sorted(world.values, key=str)
        for number, step in enumerate(STEPS):
            changed = set(chance.sample(names, chance.randint(0, len(names)))) if number else set()
            values = {
                name: np.random.default_rng([number, at]).integers(0, 256, world.values[name].shape, np.uint8)
                if name in changed
                else world.values[name]
                for at, name in enumerate(names)
            }
            world = remade(world, values)
            save(storage, world, step, dedup=True)
            saved[step] = world
        for step, made in saved.items():
            check(storage, step, made)
            for file in read(storage, step_dir(JOB, step)).manifest.files:
                if file.of is not None:
                    theirs = read(storage, step_dir(JOB, file.of)).manifest.files
                    assert file.path in {one.path for one in theirs if one.of is None}, "no reader goes two hops"


def remade(world: World, values: dict[tuple[str, int | None], np.ndarray]) -> World:
    """The same layouts with other values."""
    items = {
        rank: [LayoutItem(f.key, f.dtype, f.shape, f.box, f.role, f.sharing, f.tier) for f in layout.fragments]
        for rank, layout in world.layouts.items()
    }
    own = frozenset(name for name in world.per_rank if name.startswith("t:"))
    return make_world(items, per_rank=own, objects=world.objects, values=dict(values))


def test_what_is_hardly_anything_of_an_older_checkpoint_is_written_again() -> None:
    """A number that never changes would keep all of it from going."""
    storage = MemoryStorage()
    save(storage, tuned(1), STEPS[0], dedup=True)
    save(storage, tuned(1, frozen=1), STEPS[1], dedup=True)  # the adapter is the same
    assert of(storage, STEPS[1]) == set()


def test_in_another_world_all_is_written(storage: Storage) -> None:
    save(storage, tuned(1), STEPS[0], dedup=True)
    save(storage, world := tuned(2, ranks=3), STEPS[1], dedup=True)
    check(storage, STEPS[1], world)


def test_a_newest_checkpoint_that_is_damaged_is_not_counted_on(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    save(storage, tuned(1), STEPS[0], dedup=True)
    mark_damaged(storage, step_dir(JOB, STEPS[0]), "so it was found")
    save(storage, tuned(2), STEPS[1], dedup=True)
    for side in Path(storage.locate(step_dir(JOB, STEPS[1]))).glob("*.side"):
        side.write_bytes(side.read_bytes()[:20] + b"torn" + side.read_bytes()[24:])
    save(storage, world := tuned(3), STEPS[2], dedup=True)
    assert [of(storage, step) for step in STEPS[:3]] == [set()] * 3
    check(storage, STEPS[2], world)


@pytest.mark.parametrize("found", ["by a mark", "by its absence"])
def test_what_is_damaged_or_gone_in_an_older_checkpoint_is_written_anew(tmp_path: Path, found: str) -> None:
    """Whoever reads one back that names files of another marks that one: else each new one would name the damaged file again."""
    storage = PosixStorage(str(tmp_path))
    for step in STEPS[:2]:
        save(storage, tuned(step.step), step, dedup=True)
    if found == "by a mark":
        mark_damaged(storage, step_dir(JOB, STEPS[1]), "damaged block 0 of base.weight")
    else:
        for path in Path(storage.locate(step_dir(JOB, STEPS[0]))).glob("*.safetensors"):
            path.unlink()
    save(storage, world := tuned(3), STEPS[2], dedup=True)
    assert of(storage, STEPS[2]) == set()
    check(storage, STEPS[2], world)
    save(storage, world := tuned(4), STEPS[3], dedup=True)
    assert of(storage, STEPS[3]) == {STEPS[2]}
    check(storage, STEPS[3], world)


def test_a_file_of_a_doubted_checkpoint_is_not_named_by_way_of_a_good_one(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    for step in STEPS[:3]:
        save(storage, tuned(step.step), step, dedup=True)
    mark_damaged(storage, step_dir(JOB, STEPS[1]), "damaged block 0 of base.weight")
    assert doubted(list_commits(storage, JOB)) == set(STEPS[:2]) and of(storage, STEPS[2]) == {STEPS[0]}
    save(storage, tuned(4), STEPS[3], dedup=True)
    assert of(storage, STEPS[3]) == set()


def test_who_finds_damage_in_an_older_checkpoint_marks_both_and_a_good_look_takes_it_away(tmp_path: Path) -> None:
    """An outside user's: verify left no trace, so all that followed named the damaged file until nothing could be restored."""
    storage = PosixStorage(str(tmp_path))
    for step in STEPS[:2]:
        save(storage, tuned(step.step), step, dedup=True)
    largest = max(Path(storage.locate(step_dir(JOB, STEPS[0]))).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    good = largest.read_bytes()
    largest.write_bytes(good[: len(good) // 2] + b"damaged" + good[len(good) // 2 + 7 :])
    report = verify(storage.locate(step_dir(JOB, STEPS[1])))
    assert report.damaged and report.older == [STEPS[0]]
    assert [info.damaged for info in list_commits(storage, JOB)] == [True, True]
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint, pytest.raises(FileDamage) as caught:
        checkpoint.read("base.weight", Box.whole((768, 1024)), memoryview(bytearray(3 << 20)))
    assert "writes all of it anew" in caught.value.hint
    save(storage, world := tuned(3), STEPS[2], dedup=True)
    assert of(storage, STEPS[2]) == set()
    check(storage, STEPS[2], world)
    largest.write_bytes(good)
    for step in STEPS[:2]:
        assert verify(storage.locate(step_dir(JOB, step))).ok
    assert [info.damaged for info in list_commits(storage, JOB)] == [False] * 3


def test_one_whose_files_were_taken_from_it_is_shown_as_damaged(tmp_path: Path) -> None:
    """Its base was deleted by hand, or it was copied alone."""
    storage = PosixStorage(str(tmp_path))
    for step in STEPS[:2]:
        save(storage, tuned(step.step), step, dedup=True)
    rows, _ = list_stored(storage, lambda job: True)
    assert [(row["of"], row["needed_by"], row["damaged"]) for row in rows] == [(["step 10"], 0, False), ([], 1, False)]
    shutil.rmtree(storage.locate(step_dir(JOB, STEPS[0])))
    (info,) = list_commits(storage, JOB)
    assert info.damaged and not info.verified
    save(storage, world := tuned(3), STEPS[2], dedup=True)
    assert of(storage, STEPS[2]) == set()
    check(storage, STEPS[2], world)


def test_a_checkpoint_or_a_job_is_no_storage_root(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, tuned(1), STEPS[0])
    claim_epoch(storage, JOB, epoch_record())
    for path, what in ((step_dir(JOB, STEPS[0]), "a checkpoint"), (JOB, "a job's directory")):
        with pytest.raises(CkptdError, match=f"{what}, and no storage root") as caught:
            root_at(storage.locate(path))
        assert f"its root is {tmp_path / 'root'}" in caught.value.hint
    assert list_jobs(root_at(str(tmp_path / "root"))) == [JOB]


def test_beside_one_of_a_newer_version_all_is_written(tmp_path: Path) -> None:
    """Its daemons were put back to an older release: their flushes failed."""
    storage = PosixStorage(str(tmp_path))
    save(storage, tuned(1), STEPS[0], dedup=True)
    contents = read(storage, step_dir(JOB, STEPS[0]))
    newer = msgspec.structs.replace(contents.manifest, version=99)
    for name, data in encode(Contents(newer, contents.index)).items():
        (Path(storage.locate(step_dir(JOB, STEPS[0]))) / name).write_bytes(data)
    with pytest.raises(CkptdError, match="version 99"):
        Checkpoint.open(storage, JOB, STEPS[0])
    save(storage, world := tuned(2), STEPS[1], dedup=True)
    assert of(storage, STEPS[1]) == set()
    check(storage, STEPS[1], world)


def test_damage_in_an_older_checkpoint_is_damage_of_those_that_need_it(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    for step in STEPS[:2]:
        save(storage, tuned(step.step), step, dedup=True)
    largest = max(Path(storage.locate(step_dir(JOB, STEPS[0]))).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[struct.unpack("<Q", data[:8])[0] + 8 + 5] ^= 1  # of the largest tensor: the small ones come last
    largest.write_bytes(data)
    report = verify(storage.locate(step_dir(JOB, STEPS[1])))
    assert report.damaged and largest.name in report.problems[0]
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint, pytest.raises(FileDamage, match=r"base\.weight"):
        checkpoint.read("base.weight", Box.whole((768, 1024)), memoryview(bytearray(3 << 20)))


def test_what_was_read_back_of_an_older_checkpoint_is_not_read_again() -> None:
    storage = MemoryStorage()
    for step in STEPS[:2]:
        save(storage, tuned(step.step), step, dedup=True)
    directory = step_dir(JOB, STEPS[1])
    assert verify_at(storage, directory).bytes_read > 3 << 20
    assert verify_at(storage, directory, trusted={STEPS[0]}).bytes_read < 64 << 10
    looked_at: list[set[SnapshotId]] = []
    with pytest.MonkeyPatch.context() as patch:

        def noting(*args: Any, **kwargs: Any) -> VerifyReport:
            looked_at.append(kwargs["trusted"])
            return verify_at(*args, **kwargs)

        patch.setattr("ckptd.persist.retention.verify_at", noting)
        save(storage, tuned(3), STEPS[2], dedup=True)
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        storage.mark(step_dir(JOB, STEPS[0]), VERIFIED, b"")
        save(storage, tuned(4), STEPS[3], dedup=True)
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
    assert looked_at == [set(), {STEPS[0]}]


def test_what_was_read_back_is_read_again_when_one_that_names_it_was_found_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    for step in STEPS[:3]:
        save(storage, tuned(step.step), step, dedup=True)
    storage.mark(step_dir(JOB, STEPS[0]), VERIFIED, b"")
    mark_damaged(storage, step_dir(JOB, STEPS[1]), "damaged block 0 of base.weight")
    looked_at: list[set[SnapshotId]] = []

    def noting(*args: Any, **kwargs: Any) -> VerifyReport:
        looked_at.append(kwargs["trusted"])
        return verify_at(*args, **kwargs)

    monkeypatch.setattr("ckptd.persist.retention.verify_at", noting)
    retain(storage, JOB, Policy(keep_last=1), grace_s=0)
    assert looked_at == [set()]


# --- beside retention ---------------------------------------------------------------------------------------------
def during_commit(patch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """After all was looked at, before the new checkpoint is there."""

    def reached(name: str) -> None:
        if name == "persist.commit.checked":
            happens()

    patch.setattr(commit_module, "failpoint", reached)


def retain_twice(storage: Storage) -> None:
    """The first pass hides, the second one deletes."""
    for _ in range(2):
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)


@pytest.mark.parametrize("guarded", [True, False])
def test_retention_leaves_what_a_commit_is_about_to_need(monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    """Without the committer's lease it goes, and the new checkpoint is worth nothing."""
    storage = MemoryStorage()
    save(storage, tuned(1), STEPS[0], dedup=True)
    reports = write_all(storage, world := tuned(3), STEPS[2], "a1", dedup=True)
    save(storage, tuned(2, frozen=1), STEPS[1])  # from now on the first one may go
    during_commit(monkeypatch, partial(retain_twice, storage))
    if not guarded:
        monkeypatch.setattr(Checkpoint, "open", lambda storage, job, snapshot: Checkpoint.at(storage, step_dir(job, snapshot)))
    commit_all(storage, world, STEPS[2], reports)
    monkeypatch.undo()
    assert (STEPS[0] in {info.snapshot for info in list_commits(storage, JOB)}) == guarded
    if guarded:
        check(storage, STEPS[2], world)
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        check(storage, STEPS[2], world)


def test_a_commit_that_needs_what_has_gone_fails_and_the_next_try_writes_it() -> None:
    storage = MemoryStorage()
    save(storage, tuned(1), STEPS[0], dedup=True)
    reports = write_all(storage, world := tuned(3), STEPS[2], "a1", dedup=True)
    save(storage, tuned(2, frozen=1), STEPS[1])
    retain_twice(storage)
    with pytest.raises(NotFound):
        commit_all(storage, world, STEPS[2], reports)
    save(storage, world, STEPS[2], "a2", dedup=True)
    assert own_bytes(storage, STEPS[2]) > 3 << 20
    check(storage, STEPS[2], world)


@pytest.mark.parametrize("field", ["path", "size", "header_sum", "sums_sum"])
def test_a_writer_that_counts_on_what_is_not_there_is_refused(field: str) -> None:
    storage = MemoryStorage()
    save(storage, tuned(1), STEPS[0], dedup=True)
    first, *others = map(r.decode, write_all(storage, world := tuned(2), STEPS[1], "a1", dedup=True))
    kept = first.kept[0]
    wrong = {"path": "other-0000.safetensors", "size": kept.file.size - 1, "header_sum": "0" * 32, "sums_sum": "0" * 32}[field]
    file = msgspec.structs.replace(kept.file, **{field: wrong})
    first = msgspec.structs.replace(first, kept=[msgspec.structs.replace(kept, file=file), *first.kept[1:]])
    with pytest.raises(CkptdError, match="counts on"):
        commit_all(storage, world, STEPS[1], [r.encode(report) for report in (first, *others)])
    assert [info.snapshot for info in list_commits(storage, JOB)] == STEPS[:1]


def test_files_that_are_named_and_were_deleted_by_hand_are_missed_at_the_commit(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    save(storage, tuned(1), STEPS[0], dedup=True)
    reports = write_all(storage, world := tuned(2), STEPS[1], "a1", dedup=True)
    for path in Path(storage.locate(step_dir(JOB, STEPS[0]))).glob("*.safetensors"):
        path.unlink()
    with pytest.raises(NotFound):
        commit_all(storage, world, STEPS[1], reports)


def test_a_mark_says_whose_files_it_needs(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    for step in STEPS[:2]:
        save(storage, tuned(step.step), step, dedup=True)
    where = Path(storage.locate(step_dir(JOB, STEPS[1])))
    assert (where / f"{OF}1-10").exists()
    copied = shutil.copytree(where, tmp_path / "elsewhere")
    with pytest.raises(CkptdError, match="lies in the checkpoint of step 10"):
        verify_of(copied)


def verify_of(path: Path) -> None:
    with Checkpoint.at(storage_at(str(path)), "") as checkpoint:
        checkpoint.read("base.weight", Box.whole((768, 1024)), memoryview(bytearray(3 << 20)))


def test_one_that_goes_while_it_is_opened_is_none_and_storage_that_is_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    save(storage, tuned(0), STEPS[0])
    errors: list[StorageError] = [NotFound("gone"), StorageError("away")]

    def refuses(*_: Any) -> Checkpoint:
        raise errors.pop(0)

    monkeypatch.setattr(Checkpoint, "at", refuses)
    assert newest_before(storage, JOB, STEPS[1])[0] is None
    with pytest.raises(StorageError, match="away"):
        newest_before(storage, JOB, STEPS[1])
