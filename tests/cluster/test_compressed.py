"""What was compressed on its way to storage comes back in another world, and goes on from there (`compress`, P9)."""

from __future__ import annotations

import torch

from tests.cluster.nodes import Cluster
from tests.cluster.test_bad_storage import checkpoint
from tests.cluster.test_unchanged import alone_after, trained


def test_a_job_goes_on_from_a_copy_and_is_told_what_is_lossy(nodes: Cluster) -> None:
    storage = nodes.root / "storage"
    made, world, digest = trained(nodes, storage, 1)
    for name, quantize in (("exact", ()), ("near", ("--quantize", "model.*=8"))):
        copy = made[0].cli("export", checkpoint(storage, 1), nodes.root / name, "--to", "ckptd", *quantize)
        assert copy.returncode == 0, copy
    exact = alone_after(nodes, made, world, nodes.root / "exact")
    assert exact.do("restore") == 1 and exact.do("digest") == digest
    assert exact.node.problems() == {}
    near = alone_after(nodes, [exact.node], [exact], nodes.root / "near")
    assert near.do("restore") == 1 and near.do("digest") != digest
    assert "model.*=8" in near.node.problems()["lossy"]


def test_a_job_whose_checkpoints_are_compressed(nodes: Cluster) -> None:
    storage = nodes.root / "storage"
    made, world, digest = trained(nodes, storage, 1, compress="true")
    for node in made:
        (job,) = node.get("/status")["jobs"]
        assert 0 < job["written_bytes"] < 0.95 * job["flushed_bytes"]
    assert list(checkpoint(storage, 1).glob("*.encoded"))
    assert made[0].cli("verify", storage).returncode == 0
    alone = alone_after(nodes, made, world, storage)
    assert alone.do("restore") == 1
    assert alone.do("digest") == digest
    exported = nodes.root / "exported.pt"
    assert alone.node.cli("export", checkpoint(storage, 1), exported, "--to", "torch").returncode == 0
    assert torch.load(exported, weights_only=True)["step"] == 1
