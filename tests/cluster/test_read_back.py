"""Each daemon reads back what it wrote, and marks it; who retains deletes older checkpoints then (P12)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptd.persist.names import DATA
from tests.cluster.damage import flip_in_file
from tests.cluster.nodes import Cluster, together
from tests.cluster.test_bad_storage import checkpoint
from tests.waiting import until

JOB = "store"
PATIENCE_S = 60.0


def marks(directory: Path) -> set[str]:
    """Of whom; not what is about to be one."""
    return {path.name.removeprefix("read-") for path in directory.glob("read-*") if not path.suffix}


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
        until(lambda where=directory: len(marks(where)) == 2, PATIENCE_S, "both to have read their own")
    writers = {path.name.rpartition("-")[0] for path in checkpoint(storage, 2).glob("*.side")}
    assert marks(checkpoint(storage, 2)) == writers
    until(lambda: (checkpoint(storage, 2) / "verified").exists(), PATIENCE_S, "who retains to count on it")
    until(lambda: not (checkpoint(storage, 1) / "manifest.json").exists(), PATIENCE_S, "the older one to be hidden")


@pytest.mark.chaos
def test_damage_that_a_writer_finds_is_told_as_damage(nodes: Cluster) -> None:
    """A bit turns between the commit and the read-back (P10): health, the log, a metric and lists say so, and a restore goes
    further back."""
    storage = nodes.root / "storage"
    node = nodes.node(start=False, storage_root=storage, replicas=0, keep_last=9)
    node.start(failpoint="persist.read_back:sleep=3")
    (trainer,) = nodes.world([node], JOB)
    assert trainer.do("restore") is None
    trainer.do("train", steps=1, snapshot=False)
    trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="durable", timeout=PATIENCE_S) == "durable"
    file = next(checkpoint(storage, 1).glob("*" + DATA))
    flip_in_file(file)
    until(lambda: "damage" in node.problems(), PATIENCE_S, "health to name the damage")
    assert file.name in str(node.problems()["damage"])
    (row,) = json.loads(node.cli("ls", storage, "--json").stdout)["rows"]
    assert row["durable"] and row["damaged"], row
    assert "DAMAGED" in node.cli("ls").stdout
    assert (node.newest(JOB, "sealed"), node.newest(JOB, "durable")) == (1, -1), "status calls it durable no more"
    assert node.metric(f'ckptd_quarantines_total{{job="{os.geteuid()}/{JOB}",where="disk"}}') == 1
    (line,) = [line for line in node.log.read_text().splitlines() if "damaged on storage" in line]
    assert file.name in line
