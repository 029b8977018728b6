"""docs/FORMAT.md is complete: a reader written from it alone reads everything, bit-exact."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.state_map.columns import pack
from ckptd.persist.commit import commit_made
from ckptd.persist.commits import list_commits
from ckptd.persist.index import CODEC, CODEC_MAX, decode_index
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.manifest import Contents
from ckptd.persist.manifest_file import read
from ckptd.persist.names import INDEX, attempt_dir, record_path, step_dir
from ckptd.persist.opening import verify
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.sums import digest
from ckptd.persist.verify import verify_at
from tests.node.checkpoints import (
    DEFAULT,
    JOB,
    World,
    check_all,
    commit_all,
    epoch_record,
    save,
    small_world,
    worlds,
    write_all,
)
from tests.node.format_reader import manifest_of, objects_of, record_of, tensors_of

SNAPSHOT = SnapshotId(1, 10)


def expect_equal(directory: Path, world: World) -> None:
    tensors = tensors_of(directory)
    assert tensors.keys() == world.values.keys()
    for key, values in world.values.items():
        assert np.array_equal(tensors[key], values), key
    objects = {(name, rank): blob for rank, found in world.objects.items() for name, blob in found.items()}
    assert objects_of(directory) == objects


def test_the_page_is_enough_for_real_files(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    world = small_world(2, rows=1500)
    record = epoch_record(1, 2, ancestry=(SnapshotId(0, 5),))
    claim_epoch(storage, JOB, record)
    commit_all(storage, world, SNAPSHOT, write_all(storage, world, SNAPSHOT, "a1"), record=record)
    directory = Path(storage.locate(step_dir(JOB, SNAPSHOT)))
    expect_equal(directory, world)
    manifest = manifest_of(directory)
    assert manifest["epoch"] == record_of(Path(storage.locate(record_path(JOB, 1))))
    assert manifest["aliases"] == {"model.head": "model.wide"}
    assert manifest["per_rank"] == ["o:rng", "t:model.mean"]


@given(world=worlds())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_page_is_enough_for_any_world(tmp_path_factory: object, world: World) -> None:
    root = tmp_path_factory.mktemp("format") / "root"  # type: ignore[attr-defined]
    storage = PosixStorage(str(root))
    save(storage, world, SNAPSHOT)
    expect_equal(Path(storage.locate(step_dir(JOB, SNAPSHOT))), world)


def test_headers_are_what_the_page_says(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, small_world(2, rows=700), SNAPSHOT)
    files = sorted(Path(storage.locate(step_dir(JOB, SNAPSHOT))).glob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        assert (8 + length) % 4096 == 0
        header = json.loads(data[8 : 8 + length])
        meta = header.pop("__metadata__")
        assert (meta["format"], meta["DCP_VERSION"]) == ("pt", "1.0")
        assert json.loads(meta["DCP_SHARDING_INFO"]).keys() == header.keys()
        ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        assert ends[0][0] == 0
        assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]], "no holes"
        assert 8 + length + ends[-1][1] == len(data)


def test_a_file_may_lie_in_another_checkpoint_of_the_job_which_retention_keeps(tmp_path: Path) -> None:
    """What did not change need not be written again: the manifest names whose it is, and a mark beside it."""
    storage, world = PosixStorage(str(tmp_path)), small_world()
    save(storage, world, SnapshotId(1, 5))
    save(storage, world, snapshot := SnapshotId(1, 10))
    directory = step_dir(JOB, later := SnapshotId(1, 20))
    found = read(storage, step_dir(JOB, snapshot))
    files = [msgspec.structs.replace(file, of=snapshot) for file in found.manifest.files]
    sides = [msgspec.structs.replace(side, of=snapshot) for side in found.manifest.sides]
    manifest = msgspec.structs.replace(found.manifest, snapshot=later, files=files, sides=sides)
    storage.begin(attempt := attempt_dir(JOB, later, "a1"))
    commit_made(storage, attempt, directory, lambda: Contents(manifest, found.index), keep=False)
    for _ in range(2):
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
        assert [info.snapshot for info in list_commits(storage, JOB)] == [snapshot, later]
    with Checkpoint.open(storage, JOB, later) as checkpoint:
        check_all(checkpoint, world)
    assert verify_at(storage, directory).ok and verify(storage.locate(directory)).ok
    copied = shutil.copytree(storage.locate(directory), tmp_path / "copied")
    problems = verify(str(copied)).problems
    assert "open this checkpoint below its storage root" in problems[0]


def test_encoded_chunks_are_refused_until_a_reader_knows_the_code(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    save(storage, small_world(), DEFAULT)
    directory = Path(storage.locate(step_dir(JOB, DEFAULT)))
    found = read(storage, step_dir(JOB, DEFAULT))
    data, told = found.index.encode(INDEX)
    none = [0] * len(found.index.file)
    for codes, fine in ((none, True), ([*none[1:], CODEC_MAX + 1], False)):
        more, (column,) = pack({CODEC: np.array(codes)})
        whole = data + more
        named = [*told.columns, column._replace(at=len(data))]
        index = msgspec.structs.replace(told, size=len(whole), sum=digest(whole).hex(), columns=named)
        if fine:
            assert list(decode_index(whole, index, found.index.names, "x").tensors()) == list(found.index.tensors())
        else:
            with pytest.raises(CkptdError, match="cannot decode") as caught:
                decode_index(whole, index, found.index.names, str(directory))
            assert "upgrade" in caught.value.hint
