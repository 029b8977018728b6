"""Accelerate with a loop of one's own: killed, it goes on as if nothing had been."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster
from tests.matrix.runs import (
    EACH_ONCE,
    Run,
    begun,
    by_step,
    effective,
    run,
    seen,
    three_worlds,
    whole_and_killed,
)
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)
WORKER = "accelerate_worker"


@pytest.mark.parametrize("loader", [{}, {"use_seedable_sampler": True}])
def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path, loader: dict[str, Any]) -> None:
    node = nodes.node(replicas=0)

    def start(ranks: int, accumulated: int, **how: Any) -> Run:
        return run(node, WORKER, ranks, tmp_path, "once", loader=loader, accumulated=accumulated, **how)

    runs = three_worlds(start)
    assert begun(runs) == [0, 8, 15]
    assert seen(effective(runs, "seen")) == EACH_ONCE


def test_split_batches_are_the_same_in_each_world(nodes: Cluster, tmp_path: Path) -> None:
    """Of 12 samples, whoever shares them: so are the losses, but for dropout, which each rank draws for itself."""
    start = partial(run, nodes.node(replicas=0), WORKER, loader={"split_batches": True}, batch=12)
    whole = start(2, tmp_path, "whole")
    broken = [start(2, tmp_path, "broken", dies_at=8), start(1, tmp_path, "broken", dies_at=10), start(3, tmp_path, "broken")]
    assert begun(broken) == [0, 8, 10]
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))


@pytest.mark.parametrize(
    ("dies_at", "loader"),
    [(1, {}), (17, {}), (24, {}), (36, {}), (17, {"use_seedable_sampler": True}), (24, {"use_seedable_sampler": True})],
)
def test_losses_are_those_of_an_unbroken_run(nodes: Cluster, tmp_path: Path, dies_at: int, loader: dict[str, Any]) -> None:
    """Dropout, another order in each epoch: bit by bit. Step 12, 24, 36 are the last of an epoch, 36 is the last of all."""
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, loader=loader)
    whole, broken = whole_and_killed(start, dies_at, seed=6)
    names = ("epoch", "samples", "loss")
    assert by_step(effective(broken, "seen"), *names) == by_step(whole.of("seen"), *names)
    assert by_step(broken[1].of("ends"), "losses") == by_step(whole.of("ends"), "losses")


def test_a_stream_is_wound_forward_and_refused_in_another_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    start = partial(run, node, WORKER, 2, tmp_path, stream=True, epochs=2)
    whole, broken = whole_and_killed(start, 15)
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))
    with pytest.raises(AssertionError, match="cannot go on in another number of ranks"):
        run(node, WORKER, 1, tmp_path, "broken", stream=True, epochs=2)


def test_as_many_saves_stay_as_the_total_limit_says(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage", keep_last=1)
    how: dict[str, Any] = {"total_limit": 2, "saved": [2, 5, 8, 11], "epochs": 1}
    broken = [run(node, WORKER, 2, tmp_path, "limit", dies_at=9, **how), run(node, WORKER, 2, tmp_path, "limit", **how)]
    assert begun(broken) == [0, 9]
    last = broken[1].of("ends")[0]["step"]

    def on_storage() -> dict[int, bool]:
        return {row["step"]: row["keep"] for row in node.get("/ls")["rows"] if row["durable"]}

    until(lambda: on_storage() == {8: True, 11: True, last: False}, 30, f"steps 8 and 11 kept, and {last} the last")
