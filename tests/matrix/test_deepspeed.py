"""DeepSpeed with a loop of one's own: killed, it goes on as if nothing had been, in any stage of ZeRO."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster
from tests.matrix.runs import EACH_ONCE, begun, by_step, effective, run, seen, whole_and_killed

pytestmark = pytest.mark.timeout(900)
WORKER = "deepspeed_worker"
HALF = {"bf16": {"enabled": True}}
WHOLE_SUMS = {**HALF, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Of each step; where it was of several batches, the last one's."""
    return {row["step"]: row["loss"] for row in rows if row["rank"] == 0}


def test_it_goes_on_with_as_many_samples_in_other_batches(nodes: Cluster, tmp_path: Path) -> None:
    """Two batches are accumulated, then three, then one: each step is of the same twelve samples. No snapshot amid them."""
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, stage=2)
    whole = start("whole", accumulated=2)
    ways: list[dict[str, Any]] = [{"accumulated": 2, "dies_at": 6, "amid": True}, {"accumulated": 3, "dies_at": 11}, {}]
    broken = [start("broken", **how) for how in ways]
    assert begun(broken) == [0, 6, 11]
    told = {row["status"].partition(" [")[0] for row in broken[0].of("amid")}
    assert told == {"failed: amid the accumulation of 2 batches"}
    assert seen(effective(broken, "seen")) == EACH_ONCE
    assert losses(broken[2].of("seen"))[24] == pytest.approx(losses(start("one", accumulated=1).of("seen"))[24], rel=1e-4)
    assert {row["step"] for row in effective(broken, "seen")} == {row["step"] for row in whole.of("seen")}


def test_it_goes_on_in_another_stage_and_another_world(nodes: Cluster, tmp_path: Path) -> None:
    """Stage 1 on two ranks, stage 3 on one, stage 2 on three, stage 3 on two: each sample once in each epoch, the same losses."""
    start = partial(run, nodes.node(replicas=0), WORKER)
    whole = start(2, tmp_path, "whole", stage=1)
    ways: list[tuple[int, dict[str, Any]]] = [
        (2, {"stage": 1, "dies_at": 6}), (1, {"stage": 3, "dies_at": 11}), (3, {"stage": 2, "dies_at": 18}), (2, {"stage": 3}),
    ]  # fmt: skip
    broken = [start(ranks, tmp_path, "broken", **how) for ranks, how in ways]
    assert begun(broken) == [0, 6, 11, 18]
    rows = effective(broken, "seen")
    assert losses(rows) == pytest.approx(losses(whole.of("seen")), rel=1e-4)
    assert {row["step"]: row["rate"] for row in rows} == {row["step"]: row["rate"] for row in whole.of("seen")}
    assert seen(rows) == EACH_ONCE


@pytest.mark.parametrize(
    "how",
    [
        {"stage": 1}, {"stage": 2, "accumulated": 2}, {"stage": 3}, {"stage": 0}, {"stage": 1, "config": WHOLE_SUMS},
        {"stage": 1, "config": HALF}, {"stage": 3, "config": HALF, "zero": OFFLOADED}, {"stage": 2, "zero": OFFLOADED},
        {"stage": 2, "old": True}, {"stage": 3, "old": True},
    ],
    ids=str,
)  # fmt: skip
def test_losses_are_those_of_an_unbroken_run(nodes: Cluster, tmp_path: Path, how: dict[str, Any]) -> None:
    """Dropout, a schedule that warms up, accumulated batches, half precision, an optimizer on the CPU: bit by bit."""
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, dropout=0.2, **how)
    whole, broken = whole_and_killed(start, 9)
    names = ("epoch", "samples", "loss", "rate")
    assert by_step(effective(broken, "seen"), *names) == by_step(whole.of("seen"), *names)


@pytest.mark.parametrize(
    ("how", "refusal"),
    [
        ({"stage": 0, "config": HALF}, "FP16_UnfusedOptimizer without ZeRO is not supported"),
        ({"stage": 3, "zero": {"zero_hpz_partition_size": 2}}, r"secondary partitions \(zero_hpz"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(nodes: Cluster, tmp_path: Path, how: dict[str, Any], refusal: str) -> None:
    with pytest.raises(AssertionError, match=refusal):
        run(nodes.node(replicas=0), WORKER, 2, tmp_path, "refused", **how)


def test_other_groups_of_parameters_are_refused(nodes: Cluster, tmp_path: Path) -> None:
    start = partial(run, nodes.node(replicas=0), WORKER, 1, tmp_path, "groups", stage=2)
    start(dies_at=3)
    with pytest.raises(AssertionError, match="1 groups of parameters were saved, and this optimizer has 2"):
        start(groups=2)
