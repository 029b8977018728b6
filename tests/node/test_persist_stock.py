"""D12: stock PyTorch (HuggingFaceStorageReader into FSDP2, other world sizes) and safetensors read what ckptd wrote."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.demo.job import free_port
from ckptd.persist.names import step_dir
from ckptd.persist.storage.posix import PosixStorage
from tests.core.worlds import rows_of
from tests.node.checkpoints import JOB, World, commit_all, make_world, write_all

SCRIPT = Path(__file__).with_name("stock_reader.py")
RANKS = 2  # that wrote
SHAPES = {
    "0.weight": ("F32", (33, 20)),
    "0.bias": ("F32", (33,)),
    "1.weight": ("F32", (33,)),
    "1.bias": ("F32", (33,)),
    "2.weight": ("BF16", (7, 33)),
    "2.bias": ("BF16", (7,)),
}


def training_state() -> World:
    """FSDP2 on two ranks with AdamW, a plain norm beside it, a per-rank buffer and a column-sharded tensor."""
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(RANKS)}
    values: dict[tuple[str, int | None], np.ndarray] = {}
    noise = np.random.default_rng(7)
    for name, (dtype, shape) in SHAPES.items():
        for key in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
            item = 4 if dtype == "F32" else 2
            values[key, None] = noise.integers(
                0, 60, (*shape, item), np.uint8
            )  # no NaN: comparable as numbers, too
            for rank, box in enumerate(rows_of(shape, RANKS)):
                items[rank].append(LayoutItem(key, dtype, shape, box, "param", UNIQUE, 1))
        values[f"optim.{name}.step", None] = np.frombuffer(np.float32(17).tobytes(), np.uint8).copy()
        for rank in items:
            items[rank].append(LayoutItem(f"optim.{name}.step", "F32", (), Box.whole(()), "optim", MAYBE, 1))
    for rank in items:
        items[rank].append(LayoutItem("model.stats", "I64", (5,), Box.whole((5,)), "buffer", MAYBE, 1))
        items[rank].append(
            LayoutItem("extra.flags", "BOOL", (3, 2), Box((0, rank), (3, 1)), "extra", UNIQUE, 1)
        )
        items[rank].append(LayoutItem("extra.none", "F16", (0, 4), Box.whole((0, 4)), "extra", MAYBE, 1))
    return make_world(items, per_rank=frozenset({"t:model.stats"}), values=values)


def read_stock(directory: str, result: Path, ranks: int) -> dict[str, str]:
    port = str(free_port())
    clean = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), directory, str(result)],
            env={
                **clean,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            cwd=result.parent,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=90)
            assert worker.returncode == 0, errors.decode()[-3000:]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found: dict[str, str] = json.loads(result.read_text())
    return found


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageReader"), reason="this torch has no HuggingFaceStorageReader")
@pytest.mark.parametrize(("ranks", "nodes"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.chaos)])
def test_stock_pytorch_loads_it_into_fsdp2(tmp_path: Path, ranks: int, nodes: int) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    world = training_state()
    snapshot = SnapshotId(1, 1000)
    commit_all(storage, world, snapshot, write_all(storage, world, snapshot, "a1", nodes, bytes_max=2000))
    directory = storage.locate(step_dir(JOB, snapshot))
    found = read_stock(directory, tmp_path / "sums.json", ranks)
    elements = int(found.pop("elements"))
    wanted = {
        key: hashlib.sha256(values.tobytes()).hexdigest()
        for (key, rank), values in world.values.items()
        if rank is None and key.startswith(("model.", "optim."))
    }
    assert found == wanted
    assert elements == sum(values[..., 0].size for values in world.values.values())
