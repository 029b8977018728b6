"""Chunks that were compressed: they come back bit by bit, damage is found and named, and what gains nothing is left as it is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors import safe_open

from ckptd.config import Config
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import BLOCK_BYTES, MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist import encoding
from ckptd.persist import writer as writer_module
from ckptd.persist.index import CODEC_MAX, ENCODED_BYTES_MAX, Chunk, Index, Tensor
from ckptd.persist.names import step_dir
from ckptd.persist.opening import verify
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.sums import FileDamage
from tests.core.worlds import rows_of
from tests.node import format_reader
from tests.node.checkpoints import JOB, World, check_all, make_world, save
from tests.node.test_example_reader import SCRIPT, _expect_equal
from tests.node.test_persist_damage import flip
from tests.peak import peak_below

SNAPSHOT, NEXT = SnapshotId(1, 10), SnapshotId(1, 20)
RANKS = 3
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.zeros": ("F32", (300, 400)), "model.half": ("BF16", (900, 1000)), "model.double": ("F64", (300, 900)),
    "model.odd": ("U8", (7, 60_001)), "model.wide": ("F32", (3, 1_100_000)), "optim.step": ("F32", ()),
    "model.noise": ("I64", (500, 300)), "model.none": ("F32", (0, 4)), "model.few": ("F8_E4M3", (5,)),
}  # fmt: skip
ENCODED = {"model.zeros", "model.half", "model.double", "model.odd", "model.wide"}


def values_of(key: str, dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """As weights are: signs and exponents of few kinds; a tensor of noise; one of nothing but zeros."""
    noise, item = np.random.default_rng([seed, len(key)]), ITEMSIZE[dtype]
    if key == "model.noise":
        return noise.integers(0, 256, (*shape, item), np.uint8)
    if key == "model.zeros":
        return np.zeros((*shape, item), np.uint8)
    drawn = noise.normal(0, 0.02, shape).astype(np.float64 if dtype == "F64" else np.float32)
    raw = np.ascontiguousarray(drawn).view(np.uint8).reshape(*shape, drawn.itemsize)
    return np.ascontiguousarray(raw[..., -item:])


def a_world(seed: int = 0) -> World:
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(RANKS)}
    for key, (dtype, shape) in SHAPES.items():
        for rank, box in enumerate(rows_of(shape, RANKS) if len(shape) == 2 and shape[0] else [Box.whole(shape)] * RANKS):
            sharing = UNIQUE if len(shape) == 2 and shape[0] else MAYBE
            items[rank].append(LayoutItem(key, dtype, shape, box, "param", sharing, 1))
    found = {(key, None): values_of(key, dtype, shape, seed) for key, (dtype, shape) in SHAPES.items()}
    return make_world(items, values=found, aliases=[("model.head", "model.half")])


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    made = PosixStorage(str(tmp_path / "root"))
    save(made, a_world(), SNAPSHOT, compress=True)
    return made


def folder(storage: Storage, snapshot: SnapshotId = SNAPSHOT) -> Path:
    return Path(storage.locate(step_dir(JOB, snapshot)))


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_it_comes_back_and_is_smaller(storage: PosixStorage) -> None:
    world = a_world()
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world, seed=1)
        encoded = {checkpoint.index.names.keys[at] for at in checkpoint.index.tensor[checkpoint.index.codec > 0]}
    assert encoded == ENCODED
    assert verify(str(folder(storage))).ok
    save(storage, world, NEXT)
    assert size(folder(storage)) < 0.85 * size(folder(storage, NEXT))
    with Checkpoint.open(storage, JOB, NEXT) as checkpoint:
        assert not checkpoint.index.codec.any() and not list(folder(storage, NEXT).glob("*.encoded"))


def test_readers_that_have_nothing_of_ckptd(storage: PosixStorage) -> None:
    world, reader = a_world(), runpy.run_path(str(SCRIPT))["Checkpoint"](str(folder(storage)))
    found = format_reader.tensors_of(folder(storage))
    for (key, rank), values in world.values.items():
        assert np.array_equal(found[key, rank], values), key
        if not key.endswith("few"):
            _expect_equal(reader.read(key), world.dtypes[key, rank], values)
    stock = set[str]()
    for path in folder(storage).glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            stock |= {*file.keys()}
    assert stock == SHAPES.keys() - ENCODED


@pytest.mark.parametrize("seed", range(6))
def test_any_flipped_bit_is_found_and_its_file_named(storage: PosixStorage, seed: int) -> None:
    noise = Random(seed)
    path = noise.choice(sorted(folder(storage).glob("*.encoded")))
    flip(path, noise.randrange(path.stat().st_size), noise.randrange(8))
    report = verify(str(folder(storage)))
    assert report.damaged and path.name in "\n".join(report.problems)
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint, pytest.raises(FileDamage, match=path.name):
        check_all(checkpoint, a_world())


@pytest.mark.parametrize("frame", [b"no frame at all", encoding.encode(memoryview(bytes(400)), 4)], ids=["garbage", "of others"])
def test_a_frame_that_is_none_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame: bytes) -> None:
    """Its sums are right: whoever wrote it was wrong."""
    made = PosixStorage(str(tmp_path / "root"))
    monkeypatch.setattr(encoding, "encode", lambda values, item: frame)
    save(made, a_world(), SNAPSHOT, compress=True)
    with Checkpoint.open(made, JOB, SNAPSHOT) as checkpoint, pytest.raises(FileDamage, match="cannot be decoded"):
        check_all(checkpoint, a_world())


def test_what_is_not_compressed_is_not_named_again_and_the_other_way_round(storage: PosixStorage) -> None:
    """`dedup` behind a step that was compressed compares only what was not."""
    save(storage, a_world(), NEXT, dedup=True)
    with Checkpoint.open(storage, JOB, NEXT) as checkpoint:
        check_all(checkpoint, a_world())
        kept = {
            checkpoint.index.names.keys[tensor] for tensor, file in zip(checkpoint.index.tensor, checkpoint.index.file, strict=True)
            if checkpoint.manifest.files[file].of is not None
        }  # fmt: skip
    assert not kept & ENCODED


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    shape = (64, 1 << 20)
    items = {0: [LayoutItem("w", "F32", shape, Box.whole(shape), "param", UNIQUE, 1)]}
    world = make_world(items, values={("w", None): np.zeros((*shape, 4), np.uint8)})
    made = PosixStorage(str(tmp_path / "root"))
    with peak_below(8 * ENCODED_BYTES_MAX):
        save(made, world, SNAPSHOT, compress=True)
        dest = memoryview(bytearray(4 << 20))
        with Checkpoint.open(made, JOB, SNAPSHOT) as checkpoint:
            checkpoint.read("w", Box((3, 0), (1, 1 << 20)), dest)
    assert size(folder(made)) < 1 << 20


# --- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (Chunk(0, 0, 9, 0, (0,), (2,), codec=1), "larger than it may be"),  # than its values
        (Chunk(0, 0, 9, 0, (0,), (ENCODED_BYTES_MAX // 4 + 1,), codec=1), "larger than it may be"),
        (Chunk(0, 0, 9, 0, (0,), (2,), codec=0), "another length"),
    ],
)
def test_a_manifest_that_lies(storage: PosixStorage, chunk: Chunk, why: str) -> None:
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint:
        manifest = checkpoint.manifest
    from ckptd.persist.manifest import Contents, check

    index = Index.of([(Tensor("w", "F32", (chunk.sizes[0],), "param"), [chunk])])
    with pytest.raises(ValueError, match=why):
        check(Contents(manifest, index))


def test_a_codec_of_a_newer_ckptd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PosixStorage(str(tmp_path / "root"))
    real = writer_module.write_encoded
    monkeypatch.setattr(writer_module, "write_encoded", lambda *args: (*real(*args)[:2], CODEC_MAX + 1))
    save(made, a_world(), SNAPSHOT, compress=True)
    with pytest.raises(CkptdError, match="cannot decode"):
        Checkpoint.open(made, JOB, SNAPSHOT)


def test_without_the_library(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    without = pytest.raises(CkptdError, match=r"need zstandard.*\n.*ckptd\[compress\]")
    with Checkpoint.open(storage, JOB, SNAPSHOT) as checkpoint, without:
        check_all(checkpoint, a_world())
    with pytest.raises(CkptdError, match="need zstandard"):
        save(MemoryStorage(), a_world(), SNAPSHOT, compress=True)
    with pytest.raises(ValueError, match="compress needs zstandard"):
        Config(state_dir=tmp_path, plain_loopback=True, compress=True)


def test_dedup_is_the_other_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compress or dedup"):
        Config(state_dir=tmp_path, plain_loopback=True, compress=True, dedup=True)


def test_a_block_border_inside_a_frame(tmp_path: Path) -> None:
    """Of a chunk that stays larger than a block when it is encoded."""
    shape = (2 * BLOCK_BYTES // 2,)
    values = np.random.default_rng(0).integers(0, 256, (*shape, 2), np.uint8)
    values[:, 1] &= 3
    world = make_world({0: [LayoutItem("w", "BF16", shape, Box.whole(shape), "param", UNIQUE, 1)]}, values={("w", None): values})
    made = PosixStorage(str(tmp_path / "root"))
    save(made, world, SNAPSHOT, compress=True)
    with Checkpoint.open(made, JOB, SNAPSHOT) as checkpoint:
        assert checkpoint.index.codec.tolist() == [1] and checkpoint.index.nbytes[0] > BLOCK_BYTES
        check_all(checkpoint, world)
