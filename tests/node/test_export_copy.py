"""`ckptd export --to ckptd`: a copy below another root, and with `--quantize` one that says that it is lossy."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.export.export import Report, Request, export
from ckptd.persist import quantized
from ckptd.persist.commits import list_commits
from ckptd.persist.index import QUANTIZED, RAW
from ckptd.persist.lineage import claim_epoch, newest_record
from ckptd.persist.names import step_dir
from ckptd.persist.opening import verify
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.sums import FileDamage
from tests import places
from tests.core.worlds import rows_of
from tests.node import format_reader
from tests.node.checkpoints import JOB, World, check_all, epoch_record, make_world, save, small_world
from tests.node.commands import Cli
from tests.node.started import Started
from tests.node.test_example_reader import SCRIPT
from tests.node.test_persist_damage import flip
from tests.waiting import until

PART_BYTES = 1 << 20
SNAPSHOT, NEXT = SnapshotId(1, 10), SnapshotId(1, 20)
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.emb": ("F32", (901, 64)), "model.emb16": ("BF16", (500, 33)), "model.half": ("F16", (3, 50, 7)),
    "model.bias": ("F32", (77,)), "model.scale": ("F32", ()), "model.ids": ("I64", (40, 8)), "model.odd": ("F32", (8, 64)),
    "model.none": ("F32", (0, 4)), "model.thin": ("F32", (5, 0)), "model.wide": ("F32", (2, 2_500_000)),
}  # fmt: skip


def values_of(key: str, seed: int = 0) -> np.ndarray:
    dtype, shape = SHAPES[key]
    noise = np.random.default_rng([seed, len(key)])
    if dtype == "I64":
        return noise.integers(0, 256, (*shape, 8), np.uint8)
    drawn = noise.normal(0, 0.02, shape).astype(np.float32)
    if key == "model.odd":
        drawn[3, 5] = np.nan
    item = 4 if dtype == "F32" else 2
    return np.frombuffer(quantized.from_float(drawn, dtype), np.uint8).reshape(*shape, item).copy()


def a_world() -> World:
    items: dict[int, list[LayoutItem]] = {0: [], 1: []}
    for key, (dtype, shape) in SHAPES.items():
        shared = len(shape) < 2 or not shape[0]
        for rank, box in enumerate([Box.whole(shape)] * 2 if shared else rows_of(shape, 2)):
            items[rank].append(LayoutItem(key, dtype, shape, box, "param", MAYBE if shared else UNIQUE, 1))
    return make_world(items, values={(key, None): values_of(key) for key in SHAPES}, aliases=[("model.head", "model.emb")])


def saved(root: Path | str, world: World, snapshot: SnapshotId = SNAPSHOT, **how: bool) -> tuple[Storage, str]:
    storage = storage_at(str(root), create=True)
    save(storage, world, snapshot, **how)
    return storage, storage.locate(step_dir(JOB, snapshot))


def copied(source: str, root: Path | str, *quantize: str, part: str | None = None) -> Report:
    return export(Request(source, str(root), "ckptd", part=part, quantize=quantize))


def floats(checkpoint: Checkpoint, key: str) -> quantized.Floats:
    dtype, shape = SHAPES[key]
    data = bytearray(int(np.prod(shape)) * (4 if dtype == "F32" else 2))
    checkpoint.read(key, Box.whole(shape), memoryview(data))
    return quantized.to_float(memoryview(data), dtype).reshape(shape)


# --- a copy ---------------------------------------------------------------------------------------------------------
def test_it_is_the_same_and_needs_nothing_of_the_first(tmp_path: Path, bucket: str) -> None:
    """Each rank's own values, tied ones and objects; what lay in an older checkpoint; to a directory and to a bucket."""
    world = small_world()
    first, _ = saved(tmp_path / "root", world)
    _, source = saved(tmp_path / "root", world, NEXT, dedup=True)
    assert any(info.of for info in list_commits(first, JOB))
    for root in (tmp_path / "copy", bucket):
        report = copied(source, root)
        assert report.nbytes == report.written > 0 == report.reused and report.notes == []
        storage = storage_at(str(root))
        assert report.dest == storage.locate(step_dir(JOB, NEXT))
        with Checkpoint.open(storage, JOB, NEXT) as checkpoint:
            check_all(checkpoint, world)
            manifest = checkpoint.manifest
            assert not any(file.of for file in manifest.files) and manifest.lossy == []
            assert (manifest.world, manifest.per_rank) == (len(world.layouts), sorted(world.per_rank))
        assert verify(report.dest).ok
        assert newest_record(storage, JOB) == manifest.epoch
        assert [info.snapshot for info in list_commits(storage, JOB)] == [NEXT]


def test_what_was_compressed_or_lies_in_a_bucket_is_copied_as_well(tmp_path: Path, bucket: str) -> None:
    world = a_world()
    _, source = saved(bucket, world, compress=True)
    copied(source, tmp_path / "copy")
    with Checkpoint.open(PosixStorage(str(tmp_path / "copy")), JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)
        assert not checkpoint.index.codec.any(), "stock readers see all of it"


def test_parts_and_a_kill(tmp_path: Path) -> None:
    """Two processes share it; one that was killed is gone on from."""
    world = small_world(rows=4000)
    _, source = saved(tmp_path / "root", world)
    run = ("export", source, tmp_path / "copy", "--to", "ckptd", "--json")
    Started(*run, part_bytes=PART_BYTES, dies_at=2).killed()
    assert list_commits(PosixStorage(str(tmp_path / "copy")), JOB) == []
    part, last = (Started(*run, *more, part_bytes=PART_BYTES).report() for more in (["--part", "2/2"], []))
    assert part["written"] > 2 * PART_BYTES and part["reused"] == 0
    assert last["reused"] >= part["written"] + PART_BYTES and last["written"] + last["reused"] == last["nbytes"]
    with Checkpoint.open(PosixStorage(str(tmp_path / "copy")), JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


def test_ctrl_c_ends_it_in_words_and_the_same_goes_on(tmp_path: Path) -> None:
    world = small_world(rows=4000)
    _, source = saved(tmp_path / "root", world)
    run = ("export", source, tmp_path / "copy", "--to", "ckptd", "--json")
    slow = Started(*run, part_bytes=PART_BYTES, failpoint="persist.write.report:sleep=1")
    until(lambda: any((tmp_path / "copy").rglob("*.report*")), 60, "its first part")
    slow.send_signal(signal.SIGINT)
    _, said = slow.communicate()
    assert slow.returncode == 1 and "cancelled" in said and "Traceback" not in said
    assert Started(*run, part_bytes=PART_BYTES).report()["reused"] > 0
    with Checkpoint.open(PosixStorage(str(tmp_path / "copy")), JOB, SNAPSHOT) as checkpoint:
        check_all(checkpoint, world)


def test_what_it_refuses(tmp_path: Path) -> None:
    world = a_world()
    _, source = saved(tmp_path / "root", world)
    for wrong, said in (("model.emb=5", "not to be quantised"), ("=8", "not to be quantised"), ("model.nothing", "fits no tensor"),
                        ("model.ids", "fits no tensor")):  # fmt: skip
        with pytest.raises(CkptdError, match=said):
            copied(source, tmp_path / "copy", wrong)
    with pytest.raises(CkptdError, match="--to torch has no --quantize"):
        export(Request(source, str(tmp_path / "c.pt"), "torch", quantize=("model.emb",)))
    with pytest.raises(CkptdError, match="--to ckptd has no --only"):
        export(Request(source, str(tmp_path / "copy"), "ckptd", only=("model.emb",)))
    with pytest.raises(CkptdError, match="inside of the source's storage root"):
        copied(source, f"{source}/copy")
    copied(source, tmp_path / "copy")
    with pytest.raises(CkptdError, match="there already"):
        copied(source, tmp_path / "copy")
    other = PosixStorage(str(tmp_path / "other"))
    claim_epoch(other, JOB, epoch_record(1, len(world.layouts), nonce="another"))
    with pytest.raises(CkptdError, match="another run of this job has epoch 1"):
        copied(source, tmp_path / "other")


# --- quantised ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", quantized.BITS)
def test_values_are_as_near_as_the_bits_come_and_it_says_so(tmp_path: Path, bits: int, cli: Cli) -> None:
    world = a_world()
    _, source = saved(tmp_path / "root", world)
    report = copied(source, tmp_path / "copy", f"model.emb*={bits}", f"model.wide={bits}")
    emb, wide = report.notes
    assert emb.startswith(f"model.emb*: tensors in {bits} bits: 2, relative error ") and "bits: 1, " in wide
    names = [f"model.emb*={bits}", f"model.wide={bits}"]
    with Checkpoint.at(storage_at(str(tmp_path / "copy")), step_dir(JOB, SNAPSHOT)) as checkpoint:
        assert checkpoint.manifest.lossy == names
        for key in ("model.emb", "model.emb16", "model.wide"):
            exact = quantized.to_float(memoryview(values_of(key)).cast("B"), SHAPES[key][0]).reshape(SHAPES[key][1])
            off = np.abs(floats(checkpoint, key) - exact)
            step = (exact.max(-1, keepdims=True) - exact.min(-1, keepdims=True)) / ((1 << bits) - 1)
            if bits == 8:  # else outliers may be farther away than half a step, so that others are nearer
                assert (off <= step * 0.5001 + (np.abs(exact) + step) / 256).all()
            if key != "model.wide":
                assert np.linalg.norm(off) / np.linalg.norm(exact) < {2: 0.45, 3: 0.2, 4: 0.1, 8: 0.008}[bits]
        for key in ("model.half", "model.bias", "model.scale", "model.ids", "model.odd", "model.none"):
            data = bytearray(values_of(key).nbytes)
            checkpoint.read(key, Box.whole(SHAPES[key][1]), memoryview(data))
            assert data == values_of(key).tobytes(), key
    (row,) = json.loads(cli("ls", str(tmp_path / "copy"), "--json").out)["rows"]
    assert row["lossy"] is True
    assert "LOSSY" in cli("ls", str(tmp_path / "copy")).out
    assert verify(report.dest).ok
    again = export(Request(report.dest, str(tmp_path / "out.pt"), "torch", only=("model.emb",)))
    assert again.notes[0] == f"it is lossy: {', '.join(names)}"


def test_readers_that_know_the_format_alone_find_the_same(tmp_path: Path) -> None:
    _, source = saved(tmp_path / "root", a_world())
    directory = Path(copied(source, tmp_path / "copy", "model.[!w]*=3").dest)
    found = format_reader.tensors_of(directory)
    spec = importlib.util.spec_from_file_location("read_checkpoint", SCRIPT)
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with Checkpoint.at(PosixStorage(str(directory)), "") as checkpoint:
        index = checkpoint.index
        codecs = {index.names.keys[at]: int(codec) for at, codec in zip(index.tensor, index.codec, strict=True)}
        assert codecs["model.emb"] == codecs["model.emb16"] == codecs["model.half"] == codecs["model.bias"] == QUANTIZED
        assert codecs["model.odd"] == codecs["model.ids"] == RAW, "a value that is not finite, and whole numbers"
        for key, (dtype, shape) in SHAPES.items():
            data = bytearray(values_of(key).nbytes)
            checkpoint.read(key, Box.whole(shape), memoryview(data))
            assert found[key, None].tobytes() == data
            if dtype in quantized.DTYPES:
                read = np.ascontiguousarray(example.Checkpoint(directory).read(key), np.float32)
                assert read.tobytes() == quantized.to_float(memoryview(data), dtype).tobytes()


def test_rows_of_a_few_bits_are_fewer_bytes(tmp_path: Path) -> None:
    """Check-N-Run's table: 4 to 13 times fewer. Of vectors of 64 float32, with 8 bytes beside each."""
    _, source = saved(tmp_path / "root", a_world())
    for bits, times in ((8, 3.5), (4, 6.3), (3, 7.9), (2, 10.5)):
        dest = Path(copied(source, tmp_path / f"copy{bits}", f"model.emb={bits}").dest)
        with Checkpoint.at(PosixStorage(str(dest)), "") as checkpoint:
            rows = [chunk.nbytes for chunk in checkpoint.tensor("model.emb", None)[1]]  # type: ignore[index]
        assert values_of("model.emb").nbytes > times * sum(rows)


@places.for_root
def test_it_needs_the_room_that_it_takes(tmp_path: Path) -> None:
    _, source = saved(tmp_path / "root", a_world())
    with places.small_disk(tmp_path / "disk", "24m") as disk:
        with pytest.raises(CkptdError, match="needed"):
            copied(source, disk / "copy")
        report = copied(source, disk / "copy", "model.wide=2", "model.emb*=8")
        assert report.stored is not None and verify(report.dest).bytes_read < report.stored + (64 << 10) < 3 << 20


def test_nothing_is_lossy_that_stays_as_it_is(tmp_path: Path) -> None:
    """All of it has a value that is not finite; and who goes on says what it wrote itself."""
    _, source = saved(tmp_path / "root", a_world())
    report = copied(source, tmp_path / "copy", "model.odd=4")
    assert report.notes == ["model.odd: pieces left as they are, with a value that is not finite, or no smaller: 1"]
    with Checkpoint.at(PosixStorage(report.dest), "") as checkpoint:
        assert checkpoint.manifest.lossy == []
    assert copied(source, tmp_path / "parts", "model.emb=4", part="1/1").notes[0].startswith("model.emb: tensors in 4 bits: 1, ")
    last = copied(source, tmp_path / "parts", "model.emb=4")
    assert last.notes == ["of the parts that were there, what it cost was said when they were written"] and last.written == 0
    with Checkpoint.at(PosixStorage(last.dest), "") as checkpoint:
        assert checkpoint.manifest.lossy == ["model.emb=4"]


def test_damage_there_is_damage(tmp_path: Path) -> None:
    _, source = saved(tmp_path / "root", a_world())
    dest = Path(copied(source, tmp_path / "copy", "model.emb=4").dest)
    (path,) = dest.glob("*.encoded")
    flip(path, 100)
    assert not verify(str(dest)).ok
    with Checkpoint.at(PosixStorage(str(dest)), "") as checkpoint, pytest.raises(FileDamage, match=path.name):
        floats(checkpoint, "model.emb")


@given(st.data(), st.integers(1, 9), st.integers(1, 40), st.sampled_from(quantized.BITS), st.floats(1e-30, 1e30))
@settings(max_examples=60, deadline=None)
def test_any_rows(data: st.DataObject, rows: int, width: int, bits: int, scale: float) -> None:
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    x = np.clip(noise.standard_t(2, (rows, width)) * scale, -1e37, 1e37).astype(np.float32)
    x[noise.random((rows, width)) < 0.1] = 0
    x[noise.random(rows) < 0.2] = x[0, 0]  # all of a row are equal
    frame = quantized.encode(x, bits)
    assert frame is not None
    found = quantized.to_float(quantized.decode(memoryview(frame), "F32", width, x.nbytes), "F32").reshape(x.shape)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    step = (high - low) / ((1 << bits) - 1)
    plain = low.astype(np.float64) + step * np.rint((x - low) / np.where(step > 0, step, 1))
    error, naive = (np.square((other - x).astype(np.float64)).sum(1) for other in (found, plain))
    noise_of_float32 = width * np.square(np.abs(x).max(1).astype(np.float64) * 1e-6)
    assert (error <= naive * 1.001 + noise_of_float32).all(), "never worse than the whole range"
    for wrong in (frame[:-1], frame + b"x", b"\5" + frame[1:]):
        with pytest.raises(ValueError, match="quantised values"):
            quantized.decode(memoryview(wrong), "F32", width, x.nbytes)
