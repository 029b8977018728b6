"""Values that each rank had for itself come back into a world of another size by a rule (P9, D18)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.cluster.nodes import Cluster, Node, TrainerError, together

JOB = "own"
MEANS, VARIANCES, BATCHES = 0, 1, 2
OWN = ("model.1.running_mean", "model.1.running_var")
WARNING = "2 tensors differ between ranks: model.1.running_mean, model.1.running_var. "
Numbers = list[float]


def trained(
    nodes: Cluster, count: int, level: str, *, kind: str = "statistics", told: Sequence[str] = OWN, **settings: Any
) -> tuple[list[Node], list[Any]]:
    """BatchNorm under FSDP2, on as many ranks, each of which sees data of its own. Returns their statistics, by rank.
    ``told``: what rank 0 hears of, and nobody else."""
    made = nodes.several(count, **settings)
    world = nodes.world(made, JOB, kind=kind)
    together(world, "restore")
    together(world, "train", steps=3, snapshot=False)
    found = together(world, "statistics")
    assert len({str(one) for one in found}) == count, "each rank has its own"
    together(world, "snapshot", must=True)
    assert all(level in str(said) for said in together(world, "wait", level=level))
    assert together(world, "own") == [list(told), *([] for _ in world[1:])]
    assert [trainer.log.read_text().count(WARNING) for trainer in world] == [int(bool(told)), *(0 for _ in world[1:])]
    for trainer in world:
        trainer.kill()
    return made, found


def rounded(numbers: Sequence[float]) -> Numbers:
    """To what a tensor of single precision holds."""
    return [float(number) for number in torch.tensor(list(numbers), dtype=torch.float64).float().tolist()]


def by_element(found: Sequence[Any], kind: int, what: Callable[[Sequence[float]], float]) -> Numbers:
    return rounded([what(of) for of in zip(*(one[kind] for one in found), strict=True)])


def test_a_node_dies_and_two_ranks_go_on_with_the_mean_of_three(nodes: Cluster) -> None:
    """Without a rule each value is named, with the remedy; the same objects take what comes by one. Into as many ranks each gets
    its own, rule or not. The two that live on are one failure domain: no copy is made again on the other before it asks."""
    made, found = trained(nodes, 3, "protected", domains="aba")
    again = nodes.world(made, JOB, kind="statistics")
    assert together(again, "restore", rules={"*.running_*": "mean"}) == [3] * 3
    assert together(again, "statistics") == found
    for trainer in again:
        trainer.kill()
    made[1].kill()
    two = nodes.world([made[0], made[2]], JOB, kind="statistics")
    for error in together(two, "restore"):
        assert isinstance(error, TrainerError), error
        assert "model.1.running_mean" in str(error) and 'rules={pattern: own("mean")}' in str(error), error
    assert together(two, "restore", rules={"*.running_*": "mean"}) == [3] * 2
    means = [by_element(found, kind, statistics.fmean) for kind in (MEANS, VARIANCES)]
    assert together(two, "statistics") == [[*means, found[0][BATCHES]]] * 2
    sources = {source for said in together(two, "last_restore") for source, nbytes in said["bytes"].items() if nbytes}
    assert {"own", "peer"} <= sources
    assert all(said["step"] == 4 for said in together(two, "train"))


def test_a_rule_of_register_is_enough(nodes: Cluster) -> None:
    """Nobody is told of what it covers, and a restore into another world asks for nothing more."""
    made, found = trained(nodes, 2, "protected", kind="ruled", told=())
    (alone,) = nodes.world(made[:1], JOB, kind="ruled")
    assert alone.do("restore") == 3
    means = [by_element(found, kind, statistics.fmean) for kind in (MEANS, VARIANCES)]
    assert alone.do("statistics") == [*means, found[0][BATCHES]]


@pytest.mark.chaos
def test_three_ranks_take_what_two_had_from_storage(nodes: Cluster) -> None:
    """Memory is gone."""
    made, found = trained(nodes, 2, "durable", storage_root=nodes.root / "storage")
    for node in made:
        node.kill()
    three = nodes.world(nodes.several(3, storage_root=nodes.root / "storage"), JOB, kind="statistics")
    same = together(three, "restore", rules={"*.running_mean": "same", "*.running_var": "mean"})
    assert all("the ranks had different values" in str(error) for error in same), same
    assert all("fits none" in str(error) for error in together(three, "restore", rules={"*.runing_*": "mean"}))
    assert together(three, "restore", rules={"*.running_mean": "sum", "*.running_var": "max"}) == [3] * 3
    sums, most, batches = by_element(found, MEANS, sum), by_element(found, VARIANCES, max), found[0][BATCHES]
    nothing = [0.0] * len(sums)
    assert together(three, "statistics") == [[sums, most, batches], [nothing, most, batches], [nothing, most, batches]]
    assert together(three, "restore", rules={"*.running_*": "first"}) == [3] * 3
    assert together(three, "statistics") == [found[0]] * 3
