"""Of large tables the rows that changed are written, and every reader, check and retention knows what they need (`row_deltas`)."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist import rows
from ckptd.persist.commits import list_commits
from ckptd.persist.index import RAW, ROWS
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.names import step_dir
from ckptd.persist.opening import verify
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.row_deltas import RowDeltas
from ckptd.persist.rows import Place
from ckptd.persist.storage.base import Storage, StorageError
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.sums import FileDamage
from ckptd.persist.verify import verify_at
from ckptd.persist.writer import SPARE_BYTES
from tests.core.worlds import rows_of
from tests.node import format_reader
from tests.node.checkpoints import (
    JOB,
    World,
    check_all,
    commit_all,
    epoch_record,
    make_world,
    random_box,
    save,
    write_all,
)
from tests.node.test_persist_damage import flip

COUNT, WIDTH = 60_000, 64  # rows of 256 bytes: 15 MiB, two pieces on each of two ranks
TABLES = ("model.emb*", "optim.emb*")
STEPS = [SnapshotId(1, step) for step in range(10, 300, 10)]


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(str(tmp_path / "root"))


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (COUNT, WIDTH, 4), np.uint8)


def trained(before: np.ndarray, count: int, seed: int) -> np.ndarray:
    """So many rows were looked up."""
    noise, after = np.random.default_rng(1000 + seed), before.copy()
    which = noise.choice(len(before), count, replace=False)
    after[which] = noise.integers(0, 256, (count, *before.shape[1:]), np.uint8)
    return after


def a_world(values: np.ndarray, *, ranks: int = 2, seed: int = 0) -> World:
    """A table in rows, a dense matrix, a vector as long as the table, and a table of rows that are too short."""
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(ranks)}
    shapes = {"model.emb": (COUNT, WIDTH), "model.dense": (64, 64), "optim.emb.sum": (COUNT,), "model.emb.short": (400, 3)}
    for key, shape in shapes.items():
        for rank, box in enumerate(rows_of(shape, ranks)):
            items[rank].append(LayoutItem(key, "F32", shape, box, "param", UNIQUE, 1))
    return make_world(items, seed=seed, values={("model.emb", None): values})


def codecs(storage: Storage, snapshot: SnapshotId) -> dict[str, set[int]]:
    with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
        index = checkpoint.index
        return {key: {chunk.codec for chunk in index.chunks_at(at)} for at, key in enumerate(index.names.keys)}


def encoded_bytes(storage: PosixStorage, snapshot: SnapshotId) -> int:
    return sum(path.stat().st_size for path in folder(storage, snapshot).glob("*.encoded"))


def folder(storage: PosixStorage, snapshot: SnapshotId) -> Path:
    return Path(storage.locate(step_dir(JOB, snapshot)))


def needs(storage: Storage, snapshot: SnapshotId) -> set[SnapshotId]:
    return {of for info in list_commits(storage, JOB) if info.snapshot == snapshot for of in info.of}


def test_only_the_rows_that_changed_are_written(storage: PosixStorage) -> None:
    """And no chain of them: each needs the one that is whole."""
    values = table()
    for number, snapshot in enumerate(STEPS[:4]):
        values = values if number == 0 else trained(values, COUNT // 100, number)
        world = a_world(values, seed=number)
        save(storage, world, snapshot, row_deltas=TABLES)
        with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
            check_all(checkpoint, world, seed=number)
        found = codecs(storage, snapshot)
        assert found.pop("model.emb") == {ROWS} and set().union(*found.values()) == {RAW}
        assert needs(storage, snapshot) == ({STEPS[0]} if number else set())
        if number:  # what changed since the whole one
            assert encoded_bytes(storage, snapshot) < number * (COUNT // 100) * (4 * WIDTH + 8) + 4096
    assert verify(str(folder(storage, STEPS[3]))).ok


def test_a_bucket_has_it_as_well(bucket: str) -> None:
    storage, values = storage_at(bucket, create=True), table()
    save(storage, a_world(values), STEPS[0], row_deltas=TABLES)
    world = a_world(trained(values, 100, 1))
    save(storage, world, STEPS[1], row_deltas=TABLES)
    assert needs(storage, STEPS[1]) == {STEPS[0]} and verify_at(storage, step_dir(JOB, STEPS[1])).ok
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint:
        check_all(checkpoint, world)


def test_a_reader_from_the_page_alone(storage: PosixStorage) -> None:
    values = table()
    for number, snapshot in enumerate(STEPS[:2]):
        world = a_world(trained(values, number * 500, number))
        save(storage, world, snapshot, row_deltas=TABLES)
        found = format_reader.tensors_of(folder(storage, snapshot))
        assert all(np.array_equal(found[name], its) for name, its in world.values.items())


def test_it_is_whole_again_when_changes_add_up(storage: PosixStorage) -> None:
    """A tenth of the rows each time, always others: never is more written in all than twice the least that could be."""
    values, written, wholes = table(), 0, []
    for number, snapshot in enumerate(STEPS[:8]):
        save(storage, a_world(values), snapshot, row_deltas=TABLES)
        written += encoded_bytes(storage, snapshot)
        if not needs(storage, snapshot):
            wholes.append(number)
        values = trained(values, COUNT // 10, number)
    assert wholes == [0, 5], "after 0.1 + 0.19 + 0.27 + 0.34 of it, whose sum and 0.34 again are more than it"
    assert written < 8 * values.nbytes / 2


def test_tables_that_change_unlike_each_other_need_one_older_checkpoint(storage: PosixStorage) -> None:
    """P12: else the whole pieces of each would keep other ones' bases, and those again others, without an end."""
    record, policy, count = epoch_record(1, 2), Policy(keep_last=1), 500
    claim_epoch(storage, JOB, record)
    tables = {f"model.emb{at}": table(at)[:count] for at in range(4)}
    for number, snapshot in enumerate(STEPS[:16]):
        boxes = rows_of((count, WIDTH), 2)
        items = {
            rank: [LayoutItem(key, "F32", (count, WIDTH), boxes[rank], "param", UNIQUE, 1) for key in tables] for rank in range(2)
        }
        world = make_world(items, values={(key, None): values for key, values in tables.items()})
        save(storage, world, snapshot, row_deltas=TABLES)
        retain(storage, JOB, policy, epoch=record, grace_s=0)
        assert len(needs(storage, snapshot)) <= 1 and len(list_commits(storage, JOB)) <= 2
        with Checkpoint.open(storage, JOB, snapshot) as checkpoint:
            check_all(checkpoint, world)
        tables = {key: trained(values, count * (at + 1) ** 2 // 50, number) for at, (key, values) in enumerate(tables.items())}


@pytest.mark.parametrize("dedup", [False, True])
def test_an_older_step_that_comes_late_needs_no_newer_one(storage: PosixStorage, dedup: bool) -> None:
    """P12: kept by the trainer, its flush had failed a few times; what it needed went with the newer one."""
    record, policy, values = epoch_record(1, 2), Policy(keep_last=1), table()
    claim_epoch(storage, JOB, record)
    how: dict[str, Any] = {"dedup": True} if dedup else {"row_deltas": TABLES}
    save(storage, a_world(values), STEPS[1], **how)
    first = a_world(values if dedup else trained(values, 10, 1), seed=1)
    save(storage, first, STEPS[0], keep=True, **how)
    assert needs(storage, STEPS[0]) == set()
    for number in range(2, 5):
        save(storage, a_world(table(number), seed=number), STEPS[number], **how)
        retain(storage, JOB, policy, epoch=record, grace_s=0)
    with Checkpoint.open(storage, JOB, STEPS[0]) as checkpoint:
        check_all(checkpoint, first)


def test_other_boxes_are_written_whole(storage: PosixStorage) -> None:
    values = table()
    save(storage, a_world(values), STEPS[0], row_deltas=TABLES)
    world = a_world(values, ranks=3)
    save(storage, world, STEPS[1], row_deltas=TABLES)
    assert needs(storage, STEPS[1]) == set()
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint:
        check_all(checkpoint, world)


def test_beside_dedup(storage: PosixStorage) -> None:
    """A table that did not change at all is rows, none of them; what is no table is named where it
    lies, which is not where little was written beside the table."""
    world = a_world(table())
    for snapshot in STEPS[:3]:
        save(storage, world, snapshot, row_deltas=TABLES, dedup=True)
    assert needs(storage, STEPS[2]) == {STEPS[0], STEPS[1]} and not list(folder(storage, STEPS[2]).glob("*.safetensors"))
    assert encoded_bytes(storage, STEPS[2]) < 1000
    with Checkpoint.open(storage, JOB, STEPS[2]) as checkpoint:
        check_all(checkpoint, world)


def test_retention_keeps_what_rows_are_of(storage: PosixStorage) -> None:
    """P12: the whole one goes when nothing that stays needs it."""
    values, policy = table(), Policy(keep_last=1)
    record = epoch_record(1, 2)
    claim_epoch(storage, JOB, record)
    for number in range(3):
        save(storage, a_world(trained(values, 100 * number, number)), STEPS[number], row_deltas=TABLES)
        retain(storage, JOB, policy, epoch=record, grace_s=0)
    assert {info.snapshot for info in list_commits(storage, JOB)} == {STEPS[0], STEPS[2]}
    with Checkpoint.open(storage, JOB, STEPS[2]) as checkpoint:
        check_all(checkpoint, a_world(trained(values, 200, 2)))
    for number in (3, 4):  # nothing as it was: what the first of them cost says that it is time
        save(storage, a_world(table(number)), STEPS[number], row_deltas=TABLES)
        retain(storage, JOB, policy, epoch=record, grace_s=0)
    assert {info.snapshot for info in list_commits(storage, JOB)} == {STEPS[4]}


@pytest.mark.parametrize("which", [0, 1], ids=["whole", "rows"])
@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_bit_is_found_and_its_file_named(storage: PosixStorage, which: int, seed: int) -> None:
    """P10: also of the whole one, of which this checkpoint has no chunk."""
    values, noise = table(), np.random.default_rng(seed)
    for number, snapshot in enumerate(STEPS[:2]):
        save(storage, a_world(trained(values, 500 * number, number)), snapshot, row_deltas=TABLES)
    path = noise.choice(sorted(folder(storage, STEPS[which]).glob("*.encoded")))
    flip(path, int(noise.integers(path.stat().st_size)), int(noise.integers(8)))
    report = verify(str(folder(storage, STEPS[1])))
    assert report.damaged and path.name in "\n".join(report.problems)
    assert bool(report.older) == (which == 0)
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint, pytest.raises(FileDamage, match=path.name):
        check_all(checkpoint, a_world(values))


def test_nothing_is_counted_on_that_cannot_be_read(storage: PosixStorage, caplog: pytest.LogCaptureFixture) -> None:
    """P10: sums of rows that are damaged say nothing, and the next checkpoint is whole."""
    values = table()
    save(storage, a_world(values), STEPS[0], row_deltas=TABLES)
    for path in folder(storage, STEPS[0]).glob("*.encoded"):
        flip(path, rows.HEAD.size + 5, 1)
    world = a_world(trained(values, 10, 1))
    with caplog.at_level(logging.WARNING):
        save(storage, world, STEPS[1], row_deltas=TABLES)
    assert "written whole" in caplog.text
    assert [info.damaged for info in list_commits(storage, JOB) if info.snapshot == STEPS[0]] == [True], "lists say so"
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint:
        check_all(checkpoint, world)


def test_a_whole_one_that_went_fails_the_commit(storage: PosixStorage) -> None:
    """P1, P12: between the writing and the commit."""
    values = table()
    save(storage, a_world(values), STEPS[0], row_deltas=TABLES)
    world = a_world(trained(values, 10, 1))
    reports = write_all(storage, world, STEPS[1], "a1", row_deltas=TABLES)
    shutil.rmtree(folder(storage, STEPS[0]))
    with pytest.raises(CkptdError):
        commit_all(storage, world, STEPS[1], reports)
    save(storage, world, STEPS[1], "a2", row_deltas=TABLES)
    assert needs(storage, STEPS[1]) == set()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_of_any_table_come_back(data: st.DataObject) -> None:
    """The frames by themselves."""
    dims = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    item = data.draw(st.sampled_from([1, 2, 4, 8]))
    width = data.draw(st.integers(rows.ROW_BYTES_MIN // item, 2 * rows.ROW_BYTES_MIN // item))
    box = Box((0,) * (len(dims) + 1), (*dims, width))
    noise = np.random.default_rng(data.draw(st.integers(0, 99)))
    before = noise.integers(0, 256, (box.volume // width, width * item), np.uint8)
    which = np.array(sorted(data.draw(st.sets(st.integers(0, len(before) - 1)))), np.int64)
    after = before.copy()
    after[which] ^= 1
    whole = memoryview(rows.whole(before.reshape(-1).data, bytes(16 * len(before))))
    assert rows.fits(box, item) and len(whole) == rows.whole_of(box, item)
    assert bytes(rows.decode(whole, box, item, lambda *_: whole)) == before.tobytes()
    place = Place("n0-00-0001.encoded", 7, 3)
    frame = memoryview(rows.changes(after.reshape(-1).data, width * item, which, place))
    assert rows.place_in(frame) == place
    asked = []

    def base(*which_one: object) -> memoryview:
        asked.append(which_one)
        return whole

    assert bytes(rows.decode(frame, box, item, base)) == after.tobytes()
    assert asked == [(place, len(whole))]
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ValueError, match=r".*"):
        rows.decode(frame[:cut], box, item, base)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_do_harm(noise: bytes, changes: bool) -> None:
    """P13: whoever wrote them, with sums that are right."""
    box, frame = Box((0, 0), (4, 16)), memoryview(bytes([changes, 0, 0, 0]) + noise)
    whole = memoryview(rows.whole(bytes(256), bytes(64)))  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):
        assert len(rows.decode(frame, box, 4, lambda *_: whole)) == 256


def test_room_is_asked_for_the_sums_as_well(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first byte: 16 of 256 bytes are beside each row."""
    world = a_world(table())
    state = sum(values.nbytes for values in world.values.values())
    monkeypatch.setattr(PosixStorage, "free_bytes", lambda self: state + SPARE_BYTES + (64 << 10))  # and the objects
    with pytest.raises(StorageError, match="needed"):
        write_all(storage, world, STEPS[0], "a1", nodes=1, row_deltas=TABLES)


def test_what_is_asked_for_and_cannot_be_stays_as_it_is(storage: PosixStorage) -> None:
    """Vectors, and rows whose sums would be much of them."""
    deltas = RowDeltas(storage, JOB, STEPS[0], TABLES)
    assert not deltas.kept()
    deltas.close()
    assert [rows.fits(Box((0,) * len(sizes), sizes), 4) for sizes in ((9,), (9, 15), (9, 16), (2, 9, 16), ())] == [
        False, False, True, True, False,
    ]  # fmt: skip


def test_boxes_of_a_table_are_read_by_themselves(storage: PosixStorage) -> None:
    values = table()
    save(storage, a_world(values), STEPS[0], row_deltas=TABLES)
    world, noise = a_world(trained(values, 300, 1)), random.Random(3)
    save(storage, world, STEPS[1], row_deltas=TABLES)
    with Checkpoint.open(storage, JOB, STEPS[1]) as checkpoint:
        for _ in range(5):
            box = random_box(noise, (COUNT, WIDTH))
            dest = bytearray(box.volume * 4)
            checkpoint.read("model.emb", box, memoryview(dest))
            assert dest == world.bytes_of("model.emb", None, box)
