"""P1, P9, P10: whatever was captured, however sharded, any box of it reads back bit-exact; sources are verified first."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import arm
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import BLOCK_BYTES, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist.names import attempt_dir, step_dir
from ckptd.persist.opening import verify
from ckptd.persist.packing import split_box
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import Storage, StorageError
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.strided import extent, slabs
from ckptd.persist.sums import SlotDamage
from ckptd.persist.verify import verify_at
from ckptd.persist.writer import Cancelled, write_pieces
from tests.core.worlds import boxes_in, cells, rows_of, shapes
from tests.node.checkpoints import (
    JOB,
    World,
    check_all,
    commit_all,
    make_world,
    orders,
    save,
    small_world,
    worlds,
    write_all,
)

SNAPSHOT = SnapshotId(1, 10)
thorough = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(
    world=worlds(),
    nodes=st.integers(1, 3),
    bytes_max=st.sampled_from((64, 500, 1 << 32)),
    seed=st.integers(0, 99),
)
@thorough
def test_any_world_reads_back_in_any_box(world: World, nodes: int, bytes_max: int, seed: int) -> None:
    storage = MemoryStorage()
    reports = write_all(storage, world, SNAPSHOT, "a1", nodes, bytes_max)
    commit_all(storage, world, SNAPSHOT, reports)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world, seed)
        catalogue = checkpoint.catalogue()
        assert catalogue.per_rank == world.per_rank
        own: dict[str, list[int]] = {}
        for key, rank in world.values:
            own.setdefault(key, []).extend([rank] if rank is not None else [])
        assert catalogue.own == {key: tuple(sorted(ranks)) for key, ranks in own.items() if ranks}
        for (key, rank), values in world.values.items():
            entry = catalogue.tensor(key, rank or 0)
            assert entry is not None
            assert (entry.shape, entry.dtype) == (values.shape[:-1], world.dtypes[key, rank])
    report = verify_at(storage, step_dir(JOB, SNAPSHOT))
    assert report.ok, report.problems


def test_real_files_with_many_blocks(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    world = small_world(4, rows=6000)
    save(storage, world)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)
        assert checkpoint.boxes("model.head") == checkpoint.boxes("model.wide")
    directory = storage.locate(step_dir(JOB, SNAPSHOT))
    report = verify(directory)
    assert report.ok, report.problems
    assert report.bytes_read == sum(path.stat().st_size for path in Path(directory).glob("n*"))


def test_boxes_larger_than_a_segment_in_every_direction(tmp_path: Path) -> None:
    """Contiguous runs (several threads), columns (strided), single rows longer than the scratch."""
    shape = (3, 5, 1 << 20)
    items = {0: [LayoutItem("w", "F32", shape, Box.whole(shape), "param", UNIQUE, 1)]}
    world = make_world(items)
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, world)
    boxes = [
        Box.whole(shape),
        Box((0, 1, 0), (3, 3, 1 << 20)),
        Box((0, 0, 77), (3, 5, 1000)),
        Box((1, 0, 5), (2, 5, (1 << 20) - 9)),
        Box((2, 4, 12345), (1, 1, 900_000)),
        Box((0, 0, 3), (1, 1, 1)),
    ]
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        for box in boxes:
            dest = bytearray(box.volume * 4)
            checkpoint.read("w", box, memoryview(dest))
            assert dest == world.bytes_of("w", None, box)


def test_shards_of_one_node_become_one_chunk() -> None:
    storage = MemoryStorage()
    world = small_world(4)
    reports = write_all(storage, world, SNAPSHOT, "a1", nodes=1)
    commit_all(storage, world, SNAPSHOT, reports)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        assert checkpoint.boxes("model.wide") == [Box.whole((600, 1024))]
        assert checkpoint.boxes("model.tall") == [Box.whole((512, 32))]
        check_all(checkpoint, world)


def test_a_tensor_larger_than_a_file_is_cut(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    world = small_world(1)
    reports = write_all(storage, world, SNAPSHOT, "a1", 1, bytes_max=1 << 20)
    commit_all(storage, world, SNAPSHOT, reports)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        assert len(checkpoint.boxes("model.wide")) == 3
        assert all(file.size - file.data_start <= 1 << 20 for file in checkpoint.manifest.files)
        check_all(checkpoint, world)


def test_equal_objects_are_stored_once_and_unequal_ones_per_rank() -> None:
    storage = MemoryStorage()
    items = {
        rank: [LayoutItem("w", "F32", (4,), box, "param", UNIQUE, 1)]
        for rank, box in enumerate(rows_of((4,), 2))
    }
    objects = {0: {"same": b"x" * 100, "own": b"zero", "only0": b"a"}, 1: {"same": b"x" * 100, "own": b"one"}}
    world = make_world(items, objects=objects)
    save(storage, world)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        refs = {(ref.name, tuple(ref.ranks or ())) for ref in checkpoint.manifest.objects}
        assert refs == {("same", ()), ("own", (0,)), ("own", (1,)), ("only0", (0,))}
        assert checkpoint.object_bytes("same") == checkpoint.object_bytes("same", 1) == b"x" * 100
        assert checkpoint.object_bytes("own", 1) == b"one"
        assert checkpoint.catalogue().objects == {"same": (0, 1), "own": (0, 1), "only0": (0,)}
        for name, rank in (("own", None), ("only0", 1), ("none", None), ("same", 7)):
            if (name, rank) == ("same", 7):
                continue
            with pytest.raises(CkptdError):
                checkpoint.object_bytes(name, rank)


def test_asking_for_what_is_not_there() -> None:
    storage = MemoryStorage()
    world = small_world()
    save(storage, world)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        asks = [
            ("none", Box((), ()), 0, None),  # no such tensor
            ("model.wide", Box((599, 0), (2, 1024)), 8192, None),  # leaves the shape
            ("model.wide", Box((0, 0), (1, 1024)), 4095, None),  # too short a destination
            ("model.mean", Box((0,), (3,)), 24, None),  # each rank's own: which?
            ("model.mean", Box((0,), (3,)), 24, 5),  # no such rank
        ]
        for key, box, nbytes, rank in asks:
            with pytest.raises(CkptdError):
                checkpoint.read(key, box, memoryview(bytearray(nbytes)), rank)
    with pytest.raises(CkptdError, match="no such checkpoint"):
        Checkpoint.open(storage, JOB, SnapshotId(1, 11))
    with pytest.raises(CkptdError, match="no such checkpoint"):
        Checkpoint.open(storage, "1000/other", SNAPSHOT)
    assert storage.list("1000/other") == []


# --- the writer -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks_here", [1, 2])
def test_a_damaged_slot_is_named_and_nothing_is_left(ranks_here: int) -> None:
    """P10: memory that changed since the capture never reaches the disk, alone or merged with another slot."""
    storage = MemoryStorage()
    world = small_world(2)
    payload, record = world.slots[1]
    fragment = next(f for f in record.layout.fragments if f.key == "model.wide")
    payload[fragment.offset + BLOCK_BYTES + 17] ^= 1
    held = [world.held(WritePiece(rank, world.layouts[rank].layout_id, None, True)) for rank in range(2)][
        2 - ranks_here :
    ]
    with pytest.raises(SlotDamage) as caught:
        write_pieces(storage, JOB, SNAPSHOT, "a1", "n0", held, threading.Event(), per_rank=world.per_rank)
    assert (caught.value.slot, caught.value.rank, caught.value.key) == (101, 1, "model.wide")
    assert storage.list(attempt_dir(JOB, SNAPSHOT, "a1")) == []


def test_damaged_objects_are_named() -> None:
    world = small_world(1)
    world.slots[0][0][3] ^= 1
    with pytest.raises(SlotDamage) as caught:
        write_all(MemoryStorage(), world, SNAPSHOT, "a1")
    assert (caught.value.rank, caught.value.key) == (0, "")


def test_damage_after_the_check_is_found_by_the_reader() -> None:
    """A chunk of one fragment keeps the sums of its capture, so a bit that flips on the way to the disk is found."""
    storage = MemoryStorage()
    world = small_world(1)
    real = MemoryStorage.put

    class Flipping(MemoryStorage):
        def put(self, path: str):  # type: ignore[no-untyped-def]
            out = real(self, path)
            write = out.write

            def flip(data: bytes | memoryview) -> None:
                changed = bytearray(data)
                if len(changed) >= BLOCK_BYTES:
                    changed[12345] ^= 4
                write(bytes(changed))

            out.write = flip  # type: ignore[method-assign]
            return out

    storage = Flipping()
    save(storage, world)
    assert any(
        "damaged block 0 of model.wide" in p for p in verify_at(storage, step_dir(JOB, SNAPSHOT)).problems
    )


def test_progress_and_cancel(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    world = small_world(1, rows=8000)
    held = orders(world, 1)["n0"]
    seen: list[tuple[int, int]] = []
    write_pieces(
        storage,
        JOB,
        SNAPSHOT,
        "a1",
        "n0",
        held,
        threading.Event(),
        lambda *at: seen.append(at),
        per_rank=world.per_rank,
    )
    assert seen[-1][0] == seen[-1][1] > 8000 * 4096
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    cancelled = threading.Event()
    with pytest.raises(Cancelled):
        write_pieces(
            storage,
            JOB,
            SNAPSHOT,
            "a2",
            "n0",
            held,
            cancelled,
            lambda *_: cancelled.set(),
            per_rank=world.per_rank,
        )
    assert storage.list(attempt_dir(JOB, SNAPSHOT, "a2")) == []


def test_a_failing_thread_stops_the_other_one(tmp_path: Path) -> None:
    """The cause is raised, not the echo, and nothing stays behind."""
    world = small_world(2, rows=40_000)  # two data files
    payload, record = world.slots[1]
    fragment = next(f for f in record.layout.fragments if f.key == "model.wide")
    payload[fragment.offset] ^= 1
    storage = PosixStorage(str(tmp_path / "root"))
    held = [world.held(WritePiece(rank, world.layouts[rank].layout_id, None, True)) for rank in range(2)]
    for piece in held:
        assert piece.record.layout.world == 2
    with pytest.raises(SlotDamage):
        write_pieces(
            storage,
            JOB,
            SNAPSHOT,
            "a1",
            "n0",
            held,
            threading.Event(),
            per_rank=world.per_rank,
            bytes_max=96 << 20,
        )
    assert storage.list(attempt_dir(JOB, SNAPSHOT, "a1")) == []


def test_too_little_space_is_noticed_before_the_first_byte() -> None:
    storage = MemoryStorage(capacity_bytes=10 << 20)
    with pytest.raises(StorageError, match="free") as caught:
        write_all(storage, small_world(), SNAPSHOT, "a1")
    assert caught.value.hint
    assert storage.list("") == []


def test_orders_that_cannot_be_filled() -> None:
    world = small_world(2)
    whole = WritePiece(0, world.layouts[0].layout_id, None, True)
    held = world.held(whole)
    stale = type(held)(WritePiece(0, "another", None, True), held.payload, held.record)
    prefix = type(held)(whole, held.payload[:5000], held.record)
    for wrong in (stale, prefix):
        with pytest.raises(CkptdError):
            write_pieces(MemoryStorage(), JOB, SNAPSHOT, "a1", "n0", [wrong], threading.Event())


def test_a_tier_prefix_is_enough_for_its_fragments() -> None:
    """A replica that holds only the objects and the fragments of its tier writes those."""
    items = [
        LayoutItem("w", "F32", (8,), Box.whole((8,)), "param", UNIQUE, 2),
        LayoutItem("v", "F32", (8,), Box.whole((8,)), "param", UNIQUE, 1),
    ]
    world = make_world({0: items})
    layout = world.layouts[0]
    payload, record = world.slots[0]
    prefix = memoryview(payload)[: layout.live_bytes(2)]
    piece = type(world.held(WritePiece(0, layout.layout_id, ((0, 1),), True)))
    storage: Storage = MemoryStorage()
    replica = type(record)(layout, record.sums[: -16 * 1], record.objects_bytes, tier=2)
    reports = [
        write_pieces(storage, JOB, SNAPSHOT, "a1", "n0", [held], threading.Event())
        for held in (
            piece(WritePiece(0, layout.layout_id, ((0, 1),), True), prefix, replica),
            piece(WritePiece(0, layout.layout_id, ((1, 2),), False), memoryview(payload), record),
        )
    ]
    commit_all(storage, world, SNAPSHOT, reports)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    arm("persist.write.chunk:error")
    try:
        with pytest.raises(RuntimeError):
            write_all(storage, small_world(), SNAPSHOT, "a1")
    finally:
        arm("")
    assert storage.list(attempt_dir(JOB, SNAPSHOT, "a1")) == []


# --- geometry ---------------------------------------------------------------------------------------------------
@given(data=st.data(), shape=shapes, limit=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_slabs_tile_the_box_within_the_limit(data: st.DataObject, shape: tuple[int, ...], limit: int) -> None:
    outer = Box.whole(shape)
    inner = data.draw(boxes_in(shape))
    if inner.volume == 0:
        return
    parts = list(slabs(outer, inner, 2, limit))
    assert sum(part.volume for part in parts) == inner.volume
    assert cells(parts) == cells([inner])
    for part in parts:
        start, stop = extent(outer, part, 2)
        assert stop - start <= limit or part.volume == 1


@given(data=st.data(), shape=shapes, limit=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_cut_boxes_are_contiguous_and_small(data: st.DataObject, shape: tuple[int, ...], limit: int) -> None:
    box = data.draw(boxes_in(shape))
    parts = split_box(box, limit)
    assert all(part.volume <= limit for part in parts)
    assert list(itertools.chain.from_iterable(cells([p]) for p in parts)) is not None
    assert cells(parts) == cells([box])
    for part in parts:
        if part.volume:
            start, stop = extent(box, part, 1)
            assert stop - start == part.volume
