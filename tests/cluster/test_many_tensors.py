"""Ranks with very many tensors: the room of a slot's record follows from the layout, on every node that holds it (P14, P15)."""

from __future__ import annotations

import pytest
import torch
from ckptd_client import Client

from tests.cluster.nodes import Cluster, together
from tests.cluster.trainer import Many
from tests.waiting import until

JOB = "many"
PATIENCE_S = 120.0


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.chaos)])
def test_any_number_of_tensors_is_sealed_and_comes_back(nodes: Cluster, count: int) -> None:
    node, model, again = nodes.node(replicas=0, memory_budget="2GiB"), Many(count), Many(count)
    with Client.connect(JOB, socket=node.socket) as client:
        client.register(model=model)
        assert client.restore() is None
        handle = client.snapshot(1, must=True)
        assert handle.wait("sealed", PATIENCE_S) == "sealed", (client.health().problems, node.log.read_text()[-2000:])
    with torch.no_grad():
        for layer in again.layers:
            layer.zero_()
    with Client.connect(JOB, socket=node.socket) as client:
        client.register(model=again)
        assert client.restore() == 1
    assert all(torch.equal(mine, its) for mine, its in zip(model.layers, again.layers, strict=True))


@pytest.mark.chaos
def test_a_slot_of_many_plain_tensors_is_made_again_from_parity(nodes: Cluster) -> None:
    """P14: its record has a digest per tensor, beside layout and sums."""
    storage = nodes.root / "storage"
    storage.mkdir()
    made = nodes.several(3, redundancy="xor(3)", storage_root=storage, breakpoint_grace_s=2)
    world = nodes.world(made, JOB, kind="many")
    assert together(world, "restore") == [None] * 3
    together(world, "train", steps=1, snapshot=False)
    together(world, "snapshot", must=True)
    assert together(world, "wait", level="protected", timeout=60) == ["protected"] * 3
    made[1].kill()
    for trainer in world:
        trainer.kill()
    until(lambda: made[0].newest(JOB, "durable") == 1, PATIENCE_S, "the step to be written, the lost slot too")
