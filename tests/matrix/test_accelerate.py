"""Accelerate with a loop of one's own: killed, it goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster
from tests.matrix.runs import effective, run, seen
from tests.matrix.worker import SAMPLES

pytestmark = pytest.mark.timeout(600)
WORKER = "accelerate_worker"


@pytest.mark.parametrize("loader", [{}, {"use_seedable_sampler": True}, {"split_batches": True}])
def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path, loader: dict[str, Any]) -> None:
    """Killed twice in one epoch: two processes that accumulate, one, three."""
    node = nodes.node(replicas=0)
    batch = 12 if loader.get("split_batches") else 4

    def of(ranks: int, accumulated: int, **how: Any) -> Any:
        return run(node, WORKER, ranks, tmp_path, "once", loader=loader, batch=batch, accumulated=accumulated, **how)

    runs = [of(2, 2, dies_at=8), of(1, 1, dies_at=15 if batch == 4 else 9), of(3, 1)]
    assert runs[2].of("begins")[0]["step"] == (15 if batch == 4 else 9)
    found = seen(effective(runs, "seen"))
    assert sorted(found) == [0, 1, 2]
    for epoch, samples in found.items():
        assert samples == dict.fromkeys(range(SAMPLES), 1), f"epoch {epoch}"


@pytest.mark.parametrize(
    ("dies_at", "loader"),
    [(1, {}), (17, {}), (24, {}), (36, {}), (17, {"use_seedable_sampler": True}), (24, {"use_seedable_sampler": True})],
)
def test_losses_are_those_of_an_unbroken_run(nodes: Cluster, tmp_path: Path, dies_at: int, loader: dict[str, Any]) -> None:
    """Dropout, another order in each epoch: bit by bit. Step 12, 24, 36 are the last of an epoch, 36 is the last of all."""
    node = nodes.node(replicas=0)
    whole = run(node, WORKER, 2, tmp_path, "whole", loader=loader)
    ways: list[dict[str, Any]] = [{"dies_at": dies_at}, {"seed": 6}]
    broken = [run(node, WORKER, 2, tmp_path, "broken", loader=loader, **way) for way in ways]
    assert broken[1].of("begins")[0]["step"] == dies_at
    expected = {(row["rank"], row["step"]): (row["samples"], row["loss"]) for row in whole.of("seen")}
    found = {(row["rank"], row["step"]): (row["samples"], row["loss"]) for row in effective(broken, "seen")}
    assert found == expected
    assert [row["losses"] for row in broken[1].of("ends")] == [row["losses"] for row in whole.of("ends")]


def test_a_stream_is_wound_forward_and_refused_in_another_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {"stream": True, "epochs": 2}
    whole = run(node, WORKER, 2, tmp_path, "whole", **how)
    broken = [run(node, WORKER, 2, tmp_path, "broken", **more, **how) for more in ({"dies_at": 15}, {})]
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))
    with pytest.raises(AssertionError, match="cannot go on in another number of ranks"):
        run(node, WORKER, 1, tmp_path, "broken", **how)
