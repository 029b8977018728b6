"""`ckptd export` of a checkpoint that names files of an older one (dedup), or has rows that changed (row_deltas), gives what it
gives of a plain one, byte by byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.layout import UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.export.export import Request, export
from ckptd.persist.index import RAW, ROWS
from ckptd.persist.names import step_dir
from ckptd.persist.storage.posix import PosixStorage
from tests.core.worlds import rows_of
from tests.node.checkpoints import JOB, World, make_world, save
from tests.node.test_persist_rows import codecs, needs

STEPS = [SnapshotId(1, step) for step in (10, 20, 30)]
SHAPES = {"model.emb": (6_000, 64), "model.frozen": (512, 512), "model.trained": (512, 512), "optim.model.emb.sum": (6_000, 64)}
TABLES = ("*emb*",)


def worlds_of(ranks: int = 2) -> list[World]:
    """Step by step: a few rows of the tables are others, half of the matrices, and nothing of what is frozen."""
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(ranks)}
    for key, shape in SHAPES.items():
        for rank, box in enumerate(rows_of(shape, ranks)):
            items[rank].append(LayoutItem(key, "F32", shape, box, "optim" if key.startswith("optim") else "param", UNIQUE, 1))
    noise = np.random.default_rng(1)
    values = {(key, None): noise.integers(0, 256, (*shape, 4), np.uint8) for key, shape in SHAPES.items()}
    made = []
    for _ in STEPS:
        values = {name: before.copy() for name, before in values.items()}
        for (key, _), after in values.items():
            which = noise.choice(len(after), {"model.trained": 512, "model.frozen": 0}.get(key, 40), replace=False)
            after[which] ^= 1
        made.append(make_world(items, values=dict(values)))
    return made


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(as it is written with both, plain)"""
    folder = tmp_path_factory.mktemp("encoded")
    mixed, plain = PosixStorage(str(folder / "mixed")), PosixStorage(str(folder / "plain"))
    for snapshot, world in zip(STEPS, worlds_of(), strict=True):
        save(mixed, world, snapshot, dedup=True, row_deltas=TABLES)
        save(plain, world, snapshot)
    found = codecs(mixed, STEPS[2])
    assert {key: codec for key, codec in found.items() if "emb" in key} == {"model.emb": {ROWS}, "optim.model.emb.sum": {ROWS}}
    assert found["model.frozen"] == {RAW} and needs(mixed, STEPS[2]) == {STEPS[0]} and needs(plain, STEPS[2]) == set()
    return folder / "mixed", folder / "plain"


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_the_same_bytes_as_of_a_plain_one(roots: tuple[Path, Path], tmp_path: Path, to: str) -> None:
    """Also of a file of several, whose frame is another one."""
    made = []
    for root in roots:
        how = {"as_is": True, "shard_size": "2MB"} if to == "hf" else {}
        dest = tmp_path / root.name
        report = export(Request(str(root / step_dir(JOB, STEPS[2])), str(dest), to, ("model.*", "optim.*"), **how))  # type: ignore[arg-type]
        assert report.tensors == (3 if to == "hf" else 4)
        made.append({path.name: path.read_bytes() for path in dest.iterdir()} if to == "hf" else dest.read_bytes())
    assert made[0] == made[1]
