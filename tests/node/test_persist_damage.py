"""P10: a truncated, flipped or missing block or file is found and named, and its bytes are never handed out."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist import manifest as m
from ckptd.persist.index import Chunk, Index, Tensor
from ckptd.persist.manifest_file import decode, encode, read
from ckptd.persist.names import INDEX, MANIFEST, step_dir
from ckptd.persist.opening import find_checkpoints, verify
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.sums import FileDamage, digest
from tests.descriptors import opened
from tests.node.checkpoints import JOB, World, commit_all, save, small_world, write_all

SNAPSHOT = SnapshotId(1, 10)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    root = tmp_path_factory.mktemp("damage") / "root"
    world = small_world(2, rows=1200)
    save(PosixStorage(str(root)), world)
    return root, world


@pytest.fixture
def saved(original: tuple[Path, World], tmp_path: Path) -> tuple[Path, World]:
    """A copy to damage: its checkpoint directory."""
    shutil.copytree(original[0], tmp_path / "root")
    return tmp_path / "root" / step_dir(JOB, SNAPSHOT), original[1]


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def truncate(path: Path, nbytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - nbytes)


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def never_wrong(directory: Path, world: World) -> int:
    """Read everything; what is handed out is right. How many reads were refused."""
    refused = 0
    try:
        checkpoint = Checkpoint.at(PosixStorage(str(directory), create=False), "")
    except CkptdError:
        return 1
    with checkpoint:
        for (key, rank), values in world.values.items():
            box = Box.whole(values.shape[:-1])
            dest = bytearray(values.nbytes)
            try:
                checkpoint.read(key, box, memoryview(dest), rank)
                assert dest == world.bytes_of(key, rank, box)
            except CkptdError:
                refused += 1
        for rank, objects in world.objects.items():
            for name, blob in objects.items():
                try:
                    assert checkpoint.object_bytes(name, rank) == blob
                except FileDamage:
                    refused += 1
    return refused


def test_intact(saved: tuple[Path, World]) -> None:
    assert verify(str(saved[0])).ok
    assert never_wrong(*saved) == 0
    assert find_checkpoints(str(saved[0].parents[2])) == [str(saved[0])]


def test_a_checkpoint_of_more_files_than_descriptors_is_intact(tmp_path: Path) -> None:
    """Of many nodes; the limit of a shell is 1024. What this process lacks is no damage."""
    storage, world = PosixStorage(str(tmp_path / "root")), small_world(2, rows=400)
    commit_all(storage, world, SNAPSHOT, write_all(storage, world, SNAPSHOT, "a1", bytes_max=1 << 15))
    directory = tmp_path / "root" / step_dir(JOB, SNAPSHOT)
    assert len(data_files(directory)) > 40
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(opened()) + 30, before[1]))
    try:
        report = verify(str(directory))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert report.problems == []


def test_what_a_killed_preflight_or_commit_left_is_no_checkpoint(saved: tuple[Path, World]) -> None:
    root = saved[0].parents[3]
    left = [root / "preflight/probe-01/pointer", root / "preflight/probe-01/pointer.one.part"]
    for directory in [*left, saved[0].parent / "step-0000000099.abc.part"]:
        directory.mkdir(parents=True)
        (directory / MANIFEST).touch()
    assert find_checkpoints(str(root)) == [str(saved[0])]


@pytest.mark.parametrize("name", ["x.part", "x.gone"])
def test_the_checkpoints_of_a_job_that_is_called_like_what_is_put_aside_are_verified(saved: tuple[Path, World], name: str) -> None:
    root = saved[0].parents[3]
    place = root / "1000" / name / "epoch-000001" / "step-0000000003"
    place.mkdir(parents=True)
    (place / MANIFEST).touch()
    assert str(place) in find_checkpoints(str(root))


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_is_found_and_its_file_named(saved: tuple[Path, World], seed: int) -> None:
    directory, world = saved
    noise = random.Random(seed)
    path = noise.choice(sorted(directory.iterdir()))
    flip(path, noise.randrange(path.stat().st_size), noise.randrange(8))
    report = verify(str(directory))
    assert not report.ok
    assert all(path.name in problem for problem in report.problems), report.problems
    never_wrong(directory, world)


def test_a_flipped_block_is_named_and_the_others_still_serve(saved: tuple[Path, World]) -> None:
    directory, world = saved
    storage = PosixStorage(str(directory), create=False)
    with Checkpoint.at(storage, "") as checkpoint:
        chunk = checkpoint.index.chunks_at(checkpoint.index.names.keys.index("model.wide"))[0]
        file = checkpoint.manifest.files[chunk.file].path
    flip(directory / file, chunk.at + BLOCK_BYTES + 5)
    with Checkpoint.at(storage, "") as checkpoint:
        dest = bytearray(4096 * 300)
        with pytest.raises(FileDamage, match=r"damaged block 1 of model\.wide") as caught:
            checkpoint.read("model.wide", Box((256, 0), (300, 1024)), memoryview(dest))
        assert file in caught.value.where
        good = Box((0, 0), (256, 1024))
        dest = bytearray(BLOCK_BYTES)
        checkpoint.read("model.wide", good, memoryview(dest))
        assert dest == world.bytes_of("model.wide", None, good)
    assert any(
        "block 1 of model.wide" in problem and file in problem for problem in verify(str(directory)).problems
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".side"])
@pytest.mark.parametrize(
    "how", [truncate, lambda path: truncate(path, 5000), Path.unlink, lambda path: path.write_bytes(b"")]
)
def test_truncated_and_missing_files(
    saved: tuple[Path, World], suffix: str, how: Callable[[Path], object]
) -> None:
    directory, world = saved
    path = sorted(directory.glob(f"*{suffix}"))[0]
    if path.stat().st_size < 5000 and how not in (truncate, Path.unlink):
        how = truncate
    how(path)
    report = verify(str(directory))
    assert any(path.name in problem for problem in report.problems)
    assert never_wrong(directory, world) > 0


def test_two_damages_are_both_named(saved: tuple[Path, World]) -> None:
    directory, _ = saved
    first, second = data_files(directory)
    flip(first, 5000)
    second.unlink()
    problems = "\n".join(verify(str(directory)).problems)
    assert first.name in problems
    assert second.name in problems


def test_a_foreign_data_file_is_named(saved: tuple[Path, World]) -> None:
    """Stock readers load every data file of the directory."""
    directory, _ = saved
    shutil.copy(data_files(directory)[0], directory / "extra.safetensors")
    assert any("extra.safetensors" in problem for problem in verify(str(directory)).problems)


def test_a_swapped_file_is_found(saved: tuple[Path, World]) -> None:
    """Each intact in itself, but not where the manifest has it."""
    directory, world = saved
    first, second = data_files(directory)
    first.rename(directory / "x")
    second.rename(first)
    (directory / "x").rename(second)
    assert not verify(str(directory)).ok
    assert never_wrong(directory, world) > 0


def rewritten(directory: Path, **changes: object) -> None:
    manifest, index = contents(directory)
    for name, data in encode(m.Contents(msgspec.structs.replace(manifest, **changes), index)).items():
        (directory / name).write_bytes(data)


def contents(directory: Path) -> tuple[m.Manifest, Index]:
    found = read(PosixStorage(str(directory), create=False), "")
    return found.manifest, found.index


def test_a_newer_format_version_is_refused(saved: tuple[Path, World]) -> None:
    directory, _ = saved
    rewritten(directory, version=m.VERSION + 1)
    with pytest.raises(CkptdError, match="format version 3") as caught:
        Checkpoint.at(PosixStorage(str(directory), create=False), "")
    assert "upgrade" in caught.value.hint
    assert not isinstance(caught.value, FileDamage)


def test_fields_that_a_later_minor_writer_adds_are_ignored(saved: tuple[Path, World]) -> None:
    directory, world = saved
    path = directory / MANIFEST
    body = msgspec.json.decode(path.read_bytes())
    body["note"] = "hello"
    blank = msgspec.json.encode({**body, "xxh3_128": "0" * 32}) + b"\n"
    path.write_bytes(blank.replace(b"0" * 32, digest(blank).hex().encode(), 1))
    assert never_wrong(directory, world) == 0


def test_what_is_no_manifest(saved: tuple[Path, World]) -> None:
    directory, _ = saved
    good = (directory / MANIFEST).read_bytes()
    for bad in (
        b"",
        b"{}",
        b"[]",
        b"\xff" * 100,
        good[:-10],
        good[: len(good) // 2],
        good.replace(b'"world":2', b'"world":3'),
    ):
        (directory / MANIFEST).write_bytes(bad)
        with pytest.raises(FileDamage):
            Checkpoint.at(PosixStorage(str(directory), create=False), "")
        assert not verify(str(directory)).ok
    rewritten_format = good.replace(b"ckptd-checkpoint", b"another-format!!")
    (directory / MANIFEST).write_bytes(rewritten_format)
    with pytest.raises(CkptdError, match="another-format"):
        Checkpoint.at(PosixStorage(str(directory), create=False), "")


def huge(manifest: m.Manifest) -> list[dict[str, object]]:
    """Numbers that are no int64."""
    first = manifest.files[0]
    rest = manifest.files[1:]
    changes: list[dict[str, int]] = [{"size": 1 << 63}, {"blocks": 1 << 63}, {"data_start": 1 << 63, "size": 1 << 64}]
    return [{"files": [msgspec.structs.replace(first, **change), *rest]} for change in changes]


def read_again(manifest: m.Manifest, rows: list[tuple[Tensor, list[Chunk]]]) -> m.Contents:
    made = encode(m.Contents(manifest, Index.of(rows)))
    return decode(made[MANIFEST], lambda: made[INDEX], "x")


def test_a_manifest_that_points_outside_is_refused(saved: tuple[Path, World]) -> None:
    """Checksums keep out accidents; the checks behind them keep every address inside its file."""
    directory, _ = saved
    manifest, index = contents(directory)
    rows = [(tensor, index.chunks_at(at)) for at, tensor in enumerate(index.tensors())]
    wide = next(chunks for tensor, chunks in rows if tensor.key == "model.wide")
    chunk = wide[0]
    evil = [
        {"file": 99},
        {"file": 2},
        {"at": 1 << 40},
        {"at": 0},
        {"nbytes": chunk.nbytes + 4},
        {"block": 10_000},
        {"offsets": (601, 0)},
        {"sizes": (1201, 1024), "nbytes": 1201 * 4096},
        {"sizes": (1 << 40, 1 << 40)},
    ]
    for bad in evil:
        wide[0] = chunk._replace(**bad)  # type: ignore[arg-type]
        with pytest.raises((FileDamage, ValueError)):
            read_again(manifest, rows)
    change = msgspec.structs.replace
    for changes in ({"files": []}, {"sides": []}, {"block_bytes": 4096}, {"world": 1}, *huge(manifest)):
        made = encode(m.Contents(change(manifest, **changes), index))
        with pytest.raises(FileDamage):
            decode(made[MANIFEST], lambda data=made[INDEX]: data, "x")
    files = [change(file, path="../../../etc/passwd") for file in manifest.files]
    rewritten(directory, files=files)
    assert not verify(str(directory)).ok


def test_gaps_are_errors_not_garbage(saved: tuple[Path, World]) -> None:
    """A chunk missing from the manifest: the stock reader loads garbage, ours refuses."""
    directory, _ = saved
    manifest, index = contents(directory)
    rows = [(tensor, index.chunks_at(at)) for at, tensor in enumerate(index.tensors())]
    rows = [(tensor, chunks[:1] if tensor.key == "model.wide" else chunks) for tensor, chunks in rows]
    for name, data in encode(m.Contents(manifest, Index.of(rows))).items():
        (directory / name).write_bytes(data)
    checkpoint = Checkpoint.at(PosixStorage(str(directory), create=False), "")
    with checkpoint, pytest.raises(CkptdError, match="not in this checkpoint"):
        checkpoint.read("model.wide", Box.whole((1200, 1024)), memoryview(bytearray(1200 * 4096)))
    assert any("model.wide" in problem for problem in verify(str(directory)).problems)
