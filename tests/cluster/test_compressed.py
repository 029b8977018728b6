"""What was compressed on its way to storage comes back in another world, and goes on from there (`compress`, P9)."""

from __future__ import annotations

import torch

from tests.cluster.nodes import Cluster, together
from tests.cluster.test_bad_storage import checkpoint

JOB = "store"
PATIENCE_S = 60.0


def test_a_job_whose_checkpoints_are_compressed(nodes: Cluster) -> None:
    storage = nodes.root / "storage"
    storage.mkdir()
    made = nodes.several(2, storage_root=storage, replicas=1, compress="true")
    world = nodes.world(made, JOB, kind="adapters_fsdp")
    assert together(world, "restore") == [None] * 2
    together(world, "train", steps=1, snapshot=False)
    together(world, "snapshot", must=True)
    assert together(world, "wait", level="durable", timeout=PATIENCE_S) == ["durable"] * 2
    (digest,) = set(together(world, "digest"))
    for node in made:
        (job,) = node.get("/status")["jobs"]
        assert 0 < job["written_bytes"] < 0.95 * job["flushed_bytes"]
    assert list(checkpoint(storage, 1).glob("*.encoded"))
    assert made[0].cli("verify", storage).returncode == 0
    for trainer in world:
        trainer.kill()
    for node in made:
        node.kill()
    (alone,) = nodes.world([nodes.node(storage_root=storage, replicas=0)], JOB, kind="adapters_fsdp")
    assert alone.do("restore") == 1
    assert alone.do("digest") == digest
    exported = nodes.root / "exported.pt"
    assert alone.node.cli("export", checkpoint(storage, 1), exported, "--to", "torch").returncode == 0
    assert torch.load(exported, weights_only=True)["step"] == 1
