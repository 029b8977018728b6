"""Launches of worker.py, and what came of them beside what lies in storage, read by a reader that shares no code with ckptd."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO, Node
from tests.cluster.test_client_parallel import end_tree
from tests.node.format_reader import tensors_of

TIMEOUT_S = 400.0
WORKER = Path(__file__).with_name("worker.py")
Values = dict[str, torch.Tensor]


class Cell(NamedTuple):
    kind: str
    model: str
    ranks: int

    @property
    def job(self) -> str:
        return "-".join((*re.findall(r"\w+", self.kind), self.model, str(self.ranks)))

    @property
    def has_groups(self) -> str:
        """Who keeps the settings of the optimizer's groups."""
        return next((engine for engine in ("ZeRO", "FSDP1", "Megatron") if engine in self.kind), "register()")

    def save(self, level: str) -> dict[str, Any]:
        return {"do": "save", "kind": self.kind, "model": self.model, "job": self.job, "level": level}

    def restore(self, source: Cell) -> dict[str, Any]:
        """Of the settings of another one's groups nobody knows."""
        strict, name = self.has_groups == source.has_groups, f"{source.job}.into.{self.job}"
        return {"do": "restore", "kind": self.kind, "model": self.model, "job": source.job, "strict": strict, "name": name}


def launch(nodes: Sequence[Node], ranks: int, folder: Path, orders: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Of each order what each rank said. Raises AssertionError with the first traceback."""
    cells, name = list(orders), f"launch-{len(list(folder.glob('*.log')))}"
    order = {"cells": cells, "folder": str(folder), "name": name, "sockets": [str(node.socket) for node in nodes]}
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    env |= {"ORDER": json.dumps(order), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{REPO}:{REPO / 'client'}"}
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", str(WORKER),
    ]  # fmt: skip
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
    said = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.[0-9]*.json"))]
    errors = [f"rank {rank}, {cells[len(one) - 1]}: {one[-1]['error']}" for rank, one in enumerate(said) if "error" in one[-1]]
    assert not errors, errors[0]
    assert len(said) == ranks, log.read_text()[-6000:]
    return [list(row) for row in zip(*said, strict=True)]


def values(folder: Path, name: str) -> Values:
    found: Values = torch.load(folder / f"{name}.values")
    return found


def stored(storage: Path, job: str) -> dict[str, np.ndarray]:
    """Key -> elements as bytes, of the newest checkpoint."""
    newest = max(storage.glob(f"*/{job}/epoch-*/step-*/manifest.json"), key=lambda path: path.parts[-3:])
    return {key: value for (key, rank), value in tensors_of(newest.parent).items() if rank is None}


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    return flat.numpy().reshape(*tensor.shape, tensor.element_size())


def differing(expected: Values, found: dict[str, np.ndarray] | Values) -> int:
    """Elements. Raises AssertionError: a key that only one of them has, or a shape."""
    assert set(found) >= set(expected), sorted(set(expected) - set(found))[:5]
    count = 0
    for key, tensor in expected.items():
        other = found[key]
        raw = bytes_of(other) if isinstance(other, torch.Tensor) else other
        mine = bytes_of(tensor)
        assert raw.shape == mine.shape, (key, raw.shape, mine.shape)
        count += int((raw != mine).any(-1).sum())
    return count
