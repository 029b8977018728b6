"""docs/examples/read_checkpoint.py, which people copy: a reader of at most 100 lines that has nothing of ckptd."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist.commit import commit_made
from ckptd.persist.manifest import Contents
from ckptd.persist.manifest_file import read
from ckptd.persist.names import attempt_dir, step_dir
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, World, make_world, save

SCRIPT = Path(__file__).resolve().parents[2] / "docs/examples/read_checkpoint.py"
SNAPSHOT = SnapshotId(1, 10)


def a_world() -> World:
    """Rows of 5 and 2, columns of 3, 1 and 4 of another one; a tensor that each rank has for itself, in shapes of its own."""
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(3)}
    for rank, (at, size) in enumerate(((0, 5), (5, 0), (5, 2))):
        items[rank].append(LayoutItem("model.rows", "BF16", (7, 3), Box((at, 0), (size, 3)), "param", UNIQUE, 1))
    for rank, (at, size) in enumerate(((0, 3), (3, 1), (4, 4))):
        items[rank].append(LayoutItem("model.columns", "F32", (6, 8), Box((0, at), (6, size)), "param", UNIQUE, 1))
    for rank in items:
        shape = (2, rank + 1)
        items[rank].append(LayoutItem("loader.place", "I64", shape, Box.whole(shape), "extra", MAYBE, 1))
        items[rank].append(LayoutItem("optimizer.step", "F32", (), Box.whole(()), "optim", MAYBE, 1))
        items[rank].append(LayoutItem("model.none", "F64", (0, 4), Box.whole((0, 4)), "buffer", MAYBE, 1))
        items[rank].append(LayoutItem("model.scale", "F8_E4M3", (9,), Box.whole((9,)), "buffer", MAYBE, 1))
    return make_world(items, per_rank=frozenset({"t:loader.place"}), aliases=[("model.head", "model.rows")])


@pytest.fixture
def directory(tmp_path: Path) -> str:
    storage = PosixStorage(str(tmp_path / "root"))
    save(storage, a_world(), SNAPSHOT)
    return storage.locate(step_dir(JOB, SNAPSHOT))


def test_it_reads_every_tensor(directory: str) -> None:
    world, reader = a_world(), runpy.run_path(str(SCRIPT))["Checkpoint"](directory)
    assert set(reader.tensors) == set(world.values)
    for (key, rank), values in world.values.items():
        _expect_equal(reader.read(key, rank), world.dtypes[key, rank], values)
    part = reader.read("model.head", None, ((3, 1), (4, 2)))
    _expect_equal(part, "BF16", world.values["model.rows", None][3:7, 1:3])
    with pytest.raises(KeyError, match=r"no tensor model\.nothing of rank 4"):
        reader.read("model.nothing", 4)


def _expect_equal(found: Any, dtype: str, values: np.ndarray) -> None:
    raw = np.ascontiguousarray(values)
    if dtype == "BF16":
        as_torch = torch.from_numpy(raw.reshape(-1)).view(torch.bfloat16).view(raw.shape[:-1]).float()
        found, raw = np.ascontiguousarray(found), as_torch.numpy()[..., None]
    assert found.shape == raw.shape[:-1]
    assert np.ascontiguousarray(found).tobytes() == raw.tobytes()


def test_as_a_script_it_needs_numpy_alone(directory: str) -> None:
    found = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), directory], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "model.rows BF16 (7, 3) " in found and "loader.place I64 (2, 3) rank 2" in found
    tree = ast.parse(SCRIPT.read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "numpy", "pathlib", "sys", "zstandard"}, "the last for what was compressed, where it is met"
    assert len(SCRIPT.read_text().splitlines()) <= 100


def test_files_of_another_checkpoint_and_what_it_refuses(tmp_path: Path) -> None:
    storage, world = PosixStorage(str(tmp_path / "root")), a_world()
    save(storage, world, SNAPSHOT)
    later = SnapshotId(1, 20)
    found = read(storage, step_dir(JOB, SNAPSHOT))
    files = [msgspec.structs.replace(file, of=SNAPSHOT) for file in found.manifest.files]
    sides = [msgspec.structs.replace(side, of=SNAPSHOT) for side in found.manifest.sides]
    manifest = msgspec.structs.replace(found.manifest, snapshot=later, files=files, sides=sides)
    storage.begin(attempt := attempt_dir(JOB, later, "a1"))
    commit_made(storage, attempt, step_dir(JOB, later), lambda: Contents(manifest, found.index), keep=False)
    kind = runpy.run_path(str(SCRIPT))["Checkpoint"]
    reader = kind(storage.locate(step_dir(JOB, later)))
    _expect_equal(reader.read("model.columns"), "F32", world.values["model.columns", None])
    path = Path(storage.locate(step_dir(JOB, SNAPSHOT))) / files[0].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=re.escape(str(files[0].size))):
        [reader.read(key, rank) for key, rank in reader.tensors]
    text = Path(storage.locate(step_dir(JOB, later))) / "manifest.json"
    text.write_text(text.read_text().replace('"version":2', '"version":3'))
    with pytest.raises(ValueError, match="not a ckptd checkpoint of version 2"):
        kind(storage.locate(step_dir(JOB, later)))
