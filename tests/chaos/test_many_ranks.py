"""P16 with real daemons: many ranks of many tensors are protected, two nodes are lost, and memory alone restores another world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.chaos.light import LightRank, pump, values
from tests.cluster.nodes import Cluster, Node, cluster

JOB = "many"
PER_NODE = 2
ANSWER_S = 300.0  # two cores for dozens of daemons
ASK = {"step": None, "source": None, "allow_fresh": False}


def world(nodes: Sequence[Node], attempt: str, tensors: int) -> list[LightRank]:
    """Two ranks on each, joined."""
    size = PER_NODE * len(nodes)
    made = [LightRank(nodes[at // PER_NODE].socket, JOB, at, size, tensors, tier=2) for at in range(size)]
    pump(made, lambda rank: bool(rank.node), ANSWER_S, "a welcome")
    names, infos = [rank.node["node"] for rank in made], [rank.node for rank in made[::PER_NODE]]
    for rank in made:
        rank.join(attempt, names, infos, ASK)
    return made


def run(place: Cluster, nodes: int, fewer: int, tensors: int) -> dict[str, float]:
    """Seconds that each part took. ``fewer``: nodes of the second world."""
    made = place.several(nodes, replicas=2, memory_budget="256MiB", inventory_timeout_s=60, steward_timeout_s=60)
    took: dict[str, float] = {}
    ranks = world(made, "first", tensors)
    took["join"] = pump(ranks, lambda rank: rank.ready, ANSWER_S, "an epoch")
    step = 0
    while not all(rank.level >= 2 and not rank.void for rank in ranks):  # the first grants may be void, heard too late
        step += 1
        pump(ranks, lambda rank: bool(rank.heard), ANSWER_S, "a grant")
        for rank in ranks:
            rank.capture(step)
        took["protect"] = pump(ranks, lambda rank: rank.void or rank.level >= 2, ANSWER_S, "level 2")
    for rank in ranks:
        rank.close()
    for victim in made[3:5]:
        victim.kill()
    left = [node for node in made if node.process is not None]
    again = world(left[:fewer], "second", tensors)
    took["restore"] = pump(again, lambda rank: rank.ready, ANSWER_S, "the restore")
    for rank in again:
        assert rank.step == step and rank.restored is not None
        assert np.array_equal(rank.restored, values(tensors, rank.first, rank.count, step)), f"rank {rank.rank}"
        rank.close()
    return took


def test_a_few_of_many_ranks() -> None:
    with cluster() as place:
        run(place, nodes=6, fewer=3, tensors=200)


@pytest.mark.chaos
def test_64_ranks_of_10000_tensors() -> None:
    with cluster() as place:
        print(run(place, nodes=32, fewer=24, tensors=10_000))
