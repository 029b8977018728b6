"""torch.distributed.checkpoint over real daemons: what its own tests ask of a writer and a reader, and a node that dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cluster.dcp import COLUMNS, ROWS
from tests.cluster.nodes import Cluster, TrainerError, together

JOB = "dcp"


def expected(step: int) -> dict[str, Any]:
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + step
    nested = [step, {"lr": 0.1 * step}]
    return {"step": step, "matrix": whole.tolist(), "half": whole.bfloat16().tolist(), "number": float(step), "nested": nested}


def test_rows_are_columns_of_another_world_after_a_node_died(nodes: Cluster) -> None:
    """Uneven shards, copies, bfloat16, empty and 0-d tensors, objects; from peers' memory alone, for there is no storage."""
    three = nodes.several(3)
    world = nodes.world(three, JOB, kind="explicit")
    assert together(world, "dcp_save", step=1) == [None] * 3
    assert together(world, "dcp_save", step=2, way="column", how="async") == [None] * 3
    for trainer in world:
        trainer.kill()
    three[2].kill()
    for way in ("row", "copy"):
        pair = nodes.world(three[:2], JOB, kind="explicit")
        assert together(pair, "dcp_load", way=way) == [expected(2)] * 2
        for trainer in pair:
            trainer.kill()
    alone = nodes.world(three[:1], JOB, kind="explicit")
    assert together(alone, "dcp_load", partial=True) == [{name: expected(2)[name] for name in ("step", "matrix")}]
    assert together(alone, "dcp_load") == [expected(2)]


@pytest.mark.chaos
def test_two_names_and_an_older_step(nodes: Cluster) -> None:
    root = nodes.root / "storage"
    root.mkdir()
    pair = nodes.several(2, storage_root=root)
    world = nodes.world(pair, JOB, kind="explicit")
    for step in (1, 2):
        assert together(world, "dcp_save", step=step, name="model", level="durable") == [None] * 2
    assert together(world, "dcp_save", step=1, name="optimizer") == [None] * 2
    assert together(world, "dcp_load", name="optimizer") == [expected(1)] * 2
    assert together(world, "dcp_load", name="model", step=1) == [expected(1)] * 2


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"how": "process"}, "AsyncCheckpointerType.PROCESS is not supported"),
        ({"part": True}, "1 of 2 ranks save"),
        ({"no_dist": True}, "1 of 2 ranks save"),
        ({"use_collectives": False}, "use_collectives=False is not supported"),
    ],
)
def test_what_cannot_be_is_refused_by_name(nodes: Cluster, how: dict[str, Any], said: str) -> None:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    found = together(world, "dcp_save", step=1, **how)
    assert isinstance(found[0], TrainerError) and said in str(found[0]), found


@pytest.mark.chaos
def test_a_daemon_that_is_gone_fails_the_save_on_all_ranks(nodes: Cluster) -> None:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "dcp_save", step=1) == [None] * 2
    pair[1].kill()
    found = together(world, "dcp_save", step=2, timeout=5.0)
    assert all(isinstance(one, TrainerError) and "step 2 was not saved" in str(one) for one in found), found
