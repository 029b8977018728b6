"""Whole tensors beside a checkpoint that stays, for readers that know nothing of shards: the library's own reader is the judge."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist import consolidated
from ckptd.persist.commits import list_commits, list_stored
from ckptd.persist.consolidated import consolidate
from ckptd.persist.index import Tensor
from ckptd.persist.names import CONSOLIDATED, KEEP, MANIFEST, WHOLE, epoch_dir, step_dir
from ckptd.persist.opening import find_checkpoints, verify
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.storage.base import NotFound, Storage, StorageError, read_file
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.verify import verify_at
from ckptd.persist.whole_file import Whole
from tests.node.checkpoints import JOB, World, check_all, make_world, save, small_world

STEP, NEXT = SnapshotId(1, 10), SnapshotId(1, 20)
PLACE = step_dir(JOB, STEP)
MAX_BYTES = 64 << 20
KEYS = {"model.wide", "model.tall", "model.norm", "model.mean"}
every = partial(consolidate, job=JOB, snapshot=STEP, node="n0")


@pytest.fixture
def world() -> World:
    return small_world()


@pytest.fixture(params=["memory", "posix", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, world: World) -> Storage:
    if request.param == "memory":
        made: Storage = MemoryStorage()
    elif request.param == "posix":
        made = PosixStorage(str(tmp_path / "root"))
    else:
        made = storage_at(request.getfixturevalue("bucket"), create=True)
    save(made, world, STEP)
    return made


def loaded(storage: Storage, to: Path) -> dict[str, torch.Tensor]:
    """By the library, of a copy of what lies there; and its sums are those of the files."""
    folder = f"{storage.place(PLACE)}/{CONSOLIDATED}"
    told = json.loads(read_file(storage, f"{folder}/{MANIFEST}", MAX_BYTES))
    to.mkdir()
    found: dict[str, torch.Tensor] = {}
    *files, index = told["files"]
    assert index["path"] == "model.safetensors.index.json"
    for file in files:
        data = read_file(storage, f"{folder}/{file['path']}", MAX_BYTES)
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (file["size"], file["xxh3_128"])
        (to / file["path"]).write_bytes(data)
        assert not found.keys() & load_file(to / file["path"]).keys()
        found |= load_file(to / file["path"])
    weights = json.loads(read_file(storage, f"{folder}/model.safetensors.index.json", MAX_BYTES))
    for name, file in weights["weight_map"].items():
        with safe_open(to / file, framework="pt") as reader:
            assert name in reader.keys()  # noqa: SIM118
    assert weights["weight_map"].keys() == found.keys()
    return found


def check(found: dict[str, torch.Tensor], world: World) -> None:
    assert found.keys() == KEYS, "no optimizer, and what is tied once"
    for key, tensor in found.items():
        value = world.values.get((key, None), world.values.get((key, 0)))
        assert value is not None and tuple(tensor.shape) == value.shape[:-1]
        assert np.array_equal(tensor.contiguous().view(-1).view(torch.uint8).numpy(), np.asarray(value).reshape(-1)), key


@pytest.mark.parametrize("file_bytes", [1 << 40, 1 << 20])
def test_whole_tensors_are_what_the_library_reads(storage: Storage, world: World, tmp_path: Path, file_bytes: int) -> None:
    written = every(storage, file_bytes=file_bytes)
    found = loaded(storage, tmp_path / "found")
    check(found, world)
    assert written == sum(tensor.nbytes for tensor in found.values())
    assert len(list((tmp_path / "found").iterdir())) == (1 if file_bytes > written else 2)
    assert every(storage) == 0, "it is done"
    with Checkpoint.open(storage, JOB, STEP) as checkpoint:
        check_all(checkpoint, world)
    assert verify_at(storage, PLACE).problems == []
    assert [row["whole"] for row in list_stored(storage, lambda job: True)[0]] == [True]


def test_they_go_with_the_checkpoint(storage: Storage, world: World) -> None:
    every(storage)
    save(storage, world, NEXT)
    for _ in range(2):
        retain(storage, JOB, Policy(keep_last=1), grace_s=0)
    assert [info.snapshot for info in list_commits(storage, JOB)] == [NEXT]
    assert [entry.name for entry in storage.list(epoch_dir(JOB, 1))] == [step_dir(JOB, NEXT).rpartition("/")[2]]
    if isinstance(storage, MemoryStorage):
        assert not [path for path in storage.objects if "step-0000000010" in path]
    with pytest.raises(NotFound):
        storage.place(PLACE)


def test_what_stays_for_good_is_named_until_it_is_whole(storage: Storage, world: World) -> None:
    save(storage, world, NEXT)
    policy = Policy(keep_last=5)
    assert retain(storage, JOB, policy).lasting == []
    assert retain(storage, JOB, Policy(keep_last=5, keep_every_steps=20)).lasting == [NEXT]
    storage.mark(PLACE, KEEP, b"")
    assert retain(storage, JOB, policy).lasting == [STEP]
    every(storage)
    assert retain(storage, JOB, policy).lasting == []


def test_what_was_called_off_leaves_nothing_and_begins_anew(storage: Storage, world: World, tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CkptdError, match="called off"):
        every(storage, cancelled=cancelled)
    place = storage.place(PLACE)
    assert not [entry.name for entry in storage.list(place) if entry.name.startswith(CONSOLIDATED)]
    storage.begin(f"{place}/{CONSOLIDATED}.n0.part")  # of a life that was killed
    writer = storage.put(f"{place}/{CONSOLIDATED}.n0.part/model.safetensors")
    writer.write(b"half")
    writer.finish()
    every(storage)
    check(loaded(storage, tmp_path / "found"), world)


def test_of_two_nodes_one_is_first(storage: Storage, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A steward that stood still, and its successor."""
    calls: list[str] = []
    write = consolidated._Run._file

    def meanwhile(run: consolidated._Run, name: str, inside: Sequence[Whole[Tensor]]) -> None:
        write(run, name, inside)
        calls.append(name)
        if len(calls) == 1:
            assert every(storage, node="n1") > 0

    monkeypatch.setattr(consolidated._Run, "_file", meanwhile)
    assert every(storage) == 0
    assert len(calls) == 2
    check(loaded(storage, tmp_path / "found"), world)
    names = [entry.name for entry in storage.list(storage.place(PLACE)) if entry.name.startswith(CONSOLIDATED)]
    assert names == [CONSOLIDATED]


def test_it_costs_no_checkpoint_its_room(world: World) -> None:
    storage = MemoryStorage()
    save(storage, world, STEP)
    storage.capacity_bytes = storage.capacity_bytes - storage.free_bytes() + (4 << 20)
    with pytest.raises(StorageError, match="no room"):
        every(storage)
    assert retain(storage, JOB, Policy(keep_every_steps=10)).lasting == [STEP]


def test_damage_is_not_copied(tmp_path: Path, world: World) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, world, STEP)
    (first, *_) = sorted((tmp_path / "root" / PLACE).glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-100] ^= 1
    first.write_bytes(data)
    with pytest.raises(CkptdError):
        every(storage)
    assert WHOLE not in next(iter(storage.pointers(epoch_dir(JOB, 1)))).marks
    assert not (tmp_path / "root" / PLACE / CONSOLIDATED).exists()


def test_damage_in_them_is_named_and_the_checkpoint_is_none_the_worse(tmp_path: Path, world: World) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, world, STEP)
    every(storage)
    folder = tmp_path / "root" / PLACE / CONSOLIDATED
    path = folder / "model.safetensors"
    good = path.read_bytes()
    for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], good + b"more"):
        path.write_bytes(bad)
        report = verify(str(tmp_path / "root" / PLACE))
        assert len(report.problems) == 1 and str(path) in report.problems[0] and not report.damaged
        assert verify_at(storage, PLACE).problems == [], "retention counts on it"
    path.write_bytes(good)
    bare = verify(str((tmp_path / "root" / PLACE).rename(tmp_path / "bare")))
    assert find_checkpoints(str(tmp_path / "bare")) == [str(tmp_path / "bare")]
    assert bare.problems == [] and bare.bytes_read > len(good)
    folder = tmp_path / "bare" / CONSOLIDATED
    told = (folder / MANIFEST).read_bytes()
    spoilt = {
        "damaged manifest": partial((folder / MANIFEST).write_bytes, b"{"),
        "no manifest": (folder / MANIFEST).unlink,
        "another checkpoint": partial((folder / MANIFEST).write_bytes, told.replace(b'"of":"', b'"of":"0')),
        "missing": partial((folder / "model.safetensors.index.json").write_bytes, b"{}"),
        "no such": (folder / "model.safetensors.index.json").unlink,
        "is not there": partial(shutil.rmtree, folder),
    }
    for what, spoil in spoilt.items():
        spoil()
        (problem,) = verify(str(tmp_path / "bare")).problems
        assert what in problem.lower() and "delete that folder" in problem, problem
        if folder.exists():
            (folder / MANIFEST).write_bytes(told)
    (tmp_path / "bare" / WHOLE).unlink()
    assert verify(str(tmp_path / "bare")).ok


def test_what_another_node_left_goes_when_it_is_made(storage: Storage, world: World) -> None:
    """It lay there for good, as the checkpoint did, and as large as the model."""
    place = storage.place(PLACE)
    storage.begin(f"{place}/{CONSOLIDATED}.n9.part")
    writer = storage.put(f"{place}/{CONSOLIDATED}.n9.part/model.safetensors")
    writer.write(b"half")
    writer.finish()
    every(storage)
    names = [entry.name for entry in storage.list(place) if entry.name.startswith(CONSOLIDATED)]
    assert names == [CONSOLIDATED]


def test_a_checkpoint_without_parameters_gets_none_and_says_so(tmp_path: Path) -> None:
    """As DCP's writer makes them: an empty folder was called consolidated."""
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, make_world({0: [LayoutItem("model.weight", "F32", (4,), Box.whole((4,)), "extra", UNIQUE, 1)]}), STEP)
    with pytest.raises(CkptdError, match="no parameters"):
        every(storage)
    assert retain(storage, JOB, Policy(keep_every_steps=10)).lasting == [STEP]
    assert not (tmp_path / "root" / PLACE / CONSOLIDATED).exists()
