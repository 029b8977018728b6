"""P16 with real daemons: many ranks of many tensors are protected, two nodes are lost, and memory alone restores another world."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.chaos.light import LightRank, pump
from tests.cluster.nodes import Cluster, Node, cluster

JOB = "many"
PER_NODE = 2
ANSWER_S = 900.0  # two cores for dozens of daemons, and for what runs beside them
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


def protected(ranks: Sequence[LightRank]) -> tuple[int, float]:
    """The step that survives the loss of any two nodes, and the seconds that took. The first grants may be void, heard too late."""
    step, took = 0, 0.0
    while not all(rank.level >= 2 and not rank.void for rank in ranks):
        step += 1
        pump(ranks, lambda rank: bool(rank.heard), ANSWER_S, "a grant")
        for rank in ranks:
            rank.capture(step)
        took = pump(ranks, lambda rank: rank.void or rank.level >= 2, ANSWER_S, "level 2")
    return step, took


def without_what_it_had(place: Cluster, nodes: int, fewer: int, tensors: int) -> tuple[list[int], dict[str, float]]:
    """Ranks of a second world, on ``fewer`` nodes, that did not get back what they wanted after two of the first one's nodes were
    lost; and the seconds that each part took."""
    made = place.several(nodes, replicas=2, memory_budget="256MiB", inventory_timeout_s=60, steward_timeout_s=60,
                         restore_timeout_s=ANSWER_S)  # fmt: skip
    ranks = world(made, "first", tensors)
    took = {"join": pump(ranks, lambda rank: rank.ready, ANSWER_S, "an epoch")}
    step, took["protect"] = protected(ranks)
    for rank in ranks:
        rank.close()
    for victim in made[3:5]:
        victim.kill()
    left = [node for node in made if node.process is not None]
    again = world(left[:fewer], "second", tensors)
    took["restore"] = pump(again, lambda rank: rank.ready, ANSWER_S, "the restore")
    for rank in again:
        rank.close()
    return [rank.rank for rank in again if not rank.holds(step)], took


@pytest.mark.chaos
def test_a_few_of_many_ranks() -> None:
    with cluster() as place:
        missing, _ = without_what_it_had(place, nodes=6, fewer=3, tensors=200)
        assert missing == []


@pytest.mark.chaos
def test_64_ranks_of_10000_tensors() -> None:
    with cluster() as place:
        missing, took = without_what_it_had(place, nodes=32, fewer=24, tensors=10_000)
        assert missing == [], took
        print(took)
