"""Each daemon reads back what it wrote, and marks it; who retains deletes older checkpoints then (P12)."""

from __future__ import annotations

from tests.cluster.nodes import Cluster, together
from tests.cluster.test_bad_storage import checkpoint
from tests.waiting import until

JOB = "store"
PATIENCE_S = 60.0


def test_every_writer_reads_its_own_files_and_older_checkpoints_go(nodes: Cluster) -> None:
    storage = nodes.root / "storage"
    storage.mkdir()
    made = nodes.several(2, storage_root=storage, replicas=1, keep_last=1)
    world = nodes.world(made, JOB)
    assert together(world, "restore") == [None] * 2
    for step in (1, 2):
        together(world, "train", steps=1, snapshot=False)
        together(world, "snapshot", must=True)
        assert together(world, "wait", level="durable", timeout=PATIENCE_S) == ["durable"] * 2
        directory = checkpoint(storage, step)
        until(lambda where=directory: len(list(where.glob("read-*"))) == 2, PATIENCE_S, "both to have read their own")
    writers = {path.name.rpartition("-")[0] for path in checkpoint(storage, 2).glob("*.side")}
    assert {path.name.removeprefix("read-") for path in checkpoint(storage, 2).glob("read-*")} == writers
    until(lambda: (checkpoint(storage, 2) / "verified").exists(), PATIENCE_S, "who retains to count on it")
    until(lambda: not (checkpoint(storage, 1) / "manifest.json").exists(), PATIENCE_S, "the older one to be hidden")
