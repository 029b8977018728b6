"""A frozen base model is written once, however many checkpoints follow, and comes back with the newest of them (`dedup`, P12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.points import WRITING
from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.cluster.test_bad_storage import checkpoint
from tests.cluster.test_frozen import FROZEN_BYTES, MIB
from tests.cluster.trainer import ROWS, WIDTH
from tests.waiting import until

JOB, KIND = "store", "adapters_fsdp"
PATIENCE_S = 60.0
STEPS = 4
TABLE_BYTES = 3 * ROWS * WIDTH * 4  # with its moments


def trained(nodes: Cluster, storage: Path, steps: int, **settings: Any) -> tuple[list[Node], list[Trainer], str]:
    """Two nodes of these settings and their trainers, each step durable; the digest of the last."""
    storage.mkdir()
    made = nodes.several(2, storage_root=storage, replicas=1, **settings)
    world = nodes.world(made, JOB, kind=KIND)
    assert together(world, "restore") == [None] * 2
    for _ in range(steps):
        together(world, "train", steps=1, snapshot=False)
        together(world, "snapshot", must=True)
        assert together(world, "wait", level="durable", timeout=PATIENCE_S) == ["durable"] * 2
    (digest,) = set(together(world, "digest"))
    return made, world, digest


def alone_after(nodes: Cluster, made: list[Node], world: list[Trainer], storage: Path) -> Trainer:
    """All of them are killed; one rank on a new node begins from storage."""
    for one in (*world, *made):
        one.kill()
    (alone,) = nodes.world([nodes.node(storage_root=storage, replicas=0)], JOB, kind=KIND)
    return alone


def test_only_what_changed_is_written_and_another_world_finds_all_of_it(nodes: Cluster) -> None:
    storage = nodes.root / "storage"
    made, world, digest = trained(nodes, storage, STEPS, keep_last=1, dedup="true")
    for node in made:
        (job,) = node.get("/status")["jobs"]
        once, each = FROZEN_BYTES // 2, job["flushed_bytes"] / STEPS
        assert once < job["written_bytes"] < job["flushed_bytes"] - (STEPS - 1) * once + MIB, "the frozen half of it once"
        assert each > once
        assert "of state in" in node.cli("status").stdout
    gone = [checkpoint(storage, step) for step in range(2, STEPS)]
    until(lambda: not any((where / "manifest.json").exists() for where in gone), PATIENCE_S, "those in between to go")
    rows = json.loads(made[0].cli("ls", storage, "--json").stdout)["rows"]
    assert [(row["step"], row["of"]) for row in rows] == [(STEPS, ["step 1"]), (1, [])]
    assert "files in step 1" in made[0].cli("ls").stdout
    assert made[0].cli("verify", storage).returncode == 0
    alone = alone_after(nodes, made, world, storage)
    assert alone.do("restore") == STEPS
    assert alone.do("digest") == digest
    assert alone.do("last_restore")["bytes"]["durable"] > FROZEN_BYTES


def with_a_table(nodes: Cluster, storage: Path) -> tuple[Node, Trainer]:
    """One of the patterns is of nothing."""
    storage.mkdir()
    patterns = "model.rows*, optimizer.model.rows*, model.row.*"
    node = nodes.node(storage_root=storage, replicas=0, row_deltas=patterns, flush_every_steps=1)
    (trainer,) = nodes.world([node], JOB, kind="table")
    assert trainer.do("restore") is None
    return node, trainer


def comes_back(nodes: Cluster, node: Node, trainer: Trainer, storage: Path, step: int) -> None:
    """Everything dies, and another node has the step from storage."""
    digest = trainer.do("digest")
    assert node.cli("verify", storage).returncode == 0
    trainer.kill()
    node.kill()
    (alone,) = nodes.world([nodes.node(storage_root=storage, replicas=0)], JOB, kind="table")
    assert alone.do("restore") == step and alone.do("digest") == digest


def test_of_a_table_the_rows_that_were_looked_up_are_written(nodes: Cluster) -> None:
    """P1, P9: its moments as well (`row_deltas`)."""
    storage = nodes.root / "storage"
    node, trainer = with_a_table(nodes, storage)
    for _ in range(STEPS):
        trainer.do("train", steps=1)
        assert trainer.do("wait", level="durable", timeout=PATIENCE_S) == "durable"
    (job,) = node.get("/status")["jobs"]
    assert TABLE_BYTES < job["written_bytes"] < 1.1 * TABLE_BYTES < STEPS * TABLE_BYTES <= job["flushed_bytes"]
    assert node.log.read_text().count("row_deltas: no table that this node writes fits model.row.*") == 1
    newest = json.loads(node.cli("ls", storage, "--json").stdout)["rows"][0]
    assert (newest["step"], newest["of"]) == (STEPS, ["step 1"])
    comes_back(nodes, node, trainer, storage, STEPS)


@pytest.mark.chaos
@pytest.mark.parametrize("point", WRITING)
def test_a_daemon_that_dies_while_it_writes_rows_loses_none(nodes: Cluster, point: str) -> None:
    """P1, P4: at the third step, which names the first one's pieces; the steps after it are of what was committed."""
    storage = nodes.root / "storage"
    node, trainer = with_a_table(nodes, storage)
    for step in range(1, STEPS + 2):
        trainer.do("train", steps=1)
        if step == 3:
            node.kill()
            node.start(failpoint=f"{point}:kill_once={nodes.root / 'met'}")
        durable = lambda: trainer.do("wait", level="durable", timeout=PATIENCE_S) == "durable"  # noqa: E731
        until(durable, 2 * PATIENCE_S, f"step {step} to be durable")
    assert (nodes.root / "met").exists(), "the failpoint was not met"
    comes_back(nodes, node, trainer, storage, STEPS + 1)
