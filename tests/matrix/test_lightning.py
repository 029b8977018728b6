"""Lightning: killed, it goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster
from tests.matrix.runs import effective, run, seen
from tests.matrix.worker import SAMPLES

pytestmark = pytest.mark.timeout(600)
WORKER = "lightning_worker"


def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path) -> None:
    """Killed twice in one epoch: two processes that accumulate, one, three."""
    node = nodes.node(replicas=0)

    def of(ranks: int, accumulated: int, **how: Any) -> Any:
        arguments = {"max_epochs": 3, "accumulate_grad_batches": accumulated}
        return run(node, WORKER, ranks, tmp_path, "once", arguments=arguments, **how)

    runs = [of(2, 2, dies_at=8), of(1, 1, dies_at=15), of(3, 1)]
    found = seen(effective(runs, "seen"))
    assert sorted(found) == [0, 1, 2]
    for epoch, samples in found.items():
        assert samples == dict.fromkeys(range(SAMPLES), 1), f"epoch {epoch}"


@pytest.mark.parametrize(
    ("dies_at", "arguments"),
    [
        (1, {"max_epochs": 3}),
        (12, {"max_epochs": 3}),
        (24, {"max_steps": 31}),
        (17, {"max_epochs": 2, "val_check_interval": 5}),
        (17, {"max_steps": 31, "limit_val_batches": 0}),
        (24, {"max_steps": 31, "limit_val_batches": 0}),
        (24, {"max_epochs": 3, "limit_val_batches": 0}),
    ],
)
def test_losses_are_those_of_an_unbroken_run(nodes: Cluster, tmp_path: Path, dies_at: int, arguments: dict[str, Any]) -> None:
    """Dropout, validations, early stopping that counts; 12 and 24 are the last of an epoch."""
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {"dropout": 0.3, "arguments": arguments}
    if "limit_val_batches" not in arguments:
        how["patience"] = 9
    whole = run(node, WORKER, 2, tmp_path, "whole", **how)
    ways: list[dict[str, Any]] = [{"dies_at": dies_at}, {"seed": 6}]
    broken = [run(node, WORKER, 2, tmp_path, "broken", **way, **how) for way in ways]
    expected = {(row["rank"], row["step"]): (row["epoch"], row["samples"], row["loss"]) for row in whole.of("seen")}
    found = {(row["rank"], row["step"]): (row["epoch"], row["samples"], row["loss"]) for row in effective(broken, "seen")}
    assert found == expected
    assert [row["marks"] for row in broken[1].of("ends")] == [row["marks"] for row in whole.of("ends")]


def test_fsdp2_by_lightning(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {"strategy": "fsdp2", "arguments": {"max_epochs": 2}}
    whole = run(node, WORKER, 2, tmp_path, "whole", **how)
    broken = [run(node, WORKER, 2, tmp_path, "broken", **more, **how) for more in ({"dies_at": 7}, {})]
    expected = {(row["rank"], row["step"]): row["loss"] for row in whole.of("seen")}
    assert {(row["rank"], row["step"]): row["loss"] for row in effective(broken, "seen")} == expected
