"""Megatron-Core's save and load paths over ckptd: a killed run's step comes back under other tensor and pipeline parallelism."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.nodes import REPO, Cluster
from tests.matrix.runs import run

pytestmark = pytest.mark.timeout(600)
WORKER = "megatron_worker"
WORDS = ("embedding.word_embeddings.weight", "output_layer.weight")


def tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    (path,) = folder.glob(f"megatron-*/{name}")
    found: dict[str, torch.Tensor] = torch.load(path)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], words: int) -> None:
    """``words``: how many rows of a vocabulary count."""
    assert set(found) == set(expected)
    for key, whole in expected.items():
        other, rows = found[key], words if key.endswith(WORDS) else len(whole)
        assert not torch.isnan(other).any(), key
        assert torch.equal(other[:rows], whole[:rows]), key


@pytest.mark.parametrize(
    ("saved", "loaded", "level"),
    [
        ((2, {"tp": 2}), (1, {}), "durable"), ((4, {"tp": 2, "pp": 2}), (3, {"tp": 3}), "sealed"),
        ((3, {"tp": 1}), (4, {"tp": 2, "pp": 2}), "sealed"), ((2, {"pp": 2}), (4, {"tp": 2}), "durable"),
    ],
)  # fmt: skip
def test_a_killed_run_comes_back_under_other_parallelism(
    nodes: Cluster, tmp_path: Path, saved: tuple[int, Any], loaded: tuple[int, Any], level: str
) -> None:
    """Query groups, a gated layer (whose halves Megatron cuts each by itself), a vocabulary padded otherwise, Adam's state."""
    (nodes.root / "storage").mkdir()
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    run(node, WORKER, saved[0], first, "megatron", do="save", level=level, words=48, dies_at=3, **saved[1])
    again = run(node, WORKER, loaded[0], second, "megatron", do="load", seed=7, words=54 if level == "sealed" else 48, **loaded[1])
    assert {(row["step"], row["iteration"]) for row in again.of("begins")} == {(3, 3)}
    assert again.of("begins")[0]["files"] == ["common.pt", "metadata.json"]
    same(tensors(second, "loaded"), tensors(first, "saved"), 48)
    same(tensors(second, "after"), tensors(first, "after"), 48)


def ckptd(*command: object) -> None:
    line = [sys.executable, "-m", "ckptd", *map(str, command)]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["import", "export"])
def test_its_own_files_are_imported_and_exported(nodes: Cluster, tmp_path: Path, way: str) -> None:
    """Cut by two, loaded cut by three: Megatron's own files through the adapter; what the adapter saved by Megatron itself."""
    root, files = nodes.root / "storage", tmp_path / "iter_0000003"
    root.mkdir()
    node = nodes.node(replicas=0, storage_root=root)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    own = {"files": str(files)}
    if way == "import":
        files.mkdir()
        run(node, WORKER, 2, first, "before", do="save", tp=2, dies_at=3, **own)
        ckptd("import", files, "--from", "torch_dist", "--job", "megatron", "--storage-root", root)
        run(node, WORKER, 3, second, "megatron", do="load", seed=7, tp=3)
    else:
        run(node, WORKER, 2, first, "megatron", do="save", level="durable", tp=2, dies_at=3)
        (step,) = root.glob("*/megatron/epoch-*/step-0000000003")
        for part in ("1/2", "2/2"):
            ckptd("export", step, files, "--to", "megatron", "--part", part)
        assert not files.exists()
        ckptd("export", step, files, "--to", "megatron")
        run(node, WORKER, 3, second, "after", do="load", seed=7, tp=3, **own)
    found, expected = (torch.load(next(folder.glob(f"*/{name}"))) for folder, name in ((second, "loaded"), (first, "saved")))
    same(found, expected, 48)


def test_a_save_from_another_process_is_refused(nodes: Cluster, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="async_sharded_save=True is not supported"):
        run(nodes.node(replicas=0), WORKER, 1, tmp_path, "megatron", do="save", level="sealed", how={"async_sharded_save": True})
