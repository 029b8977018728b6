"""A checkpoint of format version 1, written by a real run under an older commit (version_1_worker.py), is restored and read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.demo.job import free_port
from ckptd.persist.opening import verify
from tests.cluster.nodes import Cluster
from tests.waiting import until

WORKER = Path(__file__).with_name("version_1_worker.py")
ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("version_1_data")
STEP = "epoch-000001/step-0000000003"
PATIENCE_S = 60.0


def test_every_byte_is_verified() -> None:
    report = verify(str(DATA / STEP))
    assert report.ok, report.problems
    assert report.tensors > 20


@pytest.mark.parametrize("name", ["manifest.json", "n0-07ca0427-0000.safetensors", "n0-07ca0427-0001.side"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(DATA / STEP, tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[-100] ^= 1
    (copy / name).write_bytes(data)
    assert not verify(str(copy)).ok


@pytest.mark.chaos
def test_it_is_restored_bit_exactly_and_the_next_one_has_an_index(nodes: Cluster) -> None:
    storage = nodes.root / "storage"
    job = storage / str(os.geteuid()) / "version-1"
    shutil.copytree(DATA, job, ignore=shutil.ignore_patterns("*.txt"))
    (storage / ".ckptd-root").touch()
    node = nodes.node(storage_root=storage, replicas=0, flush_every_steps=1)
    environ = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CKPTD_SOCKET": str(node.socket), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "restore"],
            env=environ | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in said] == [(DATA / f"rank{rank}.txt").read_text() for rank in range(2)], said
    until(lambda: list(job.glob("epoch-000002/step-*/index.columns")), PATIENCE_S, "the next step to be durable")
    (step,) = job.glob("epoch-000002/step-*")
    assert verify(str(step)).ok
