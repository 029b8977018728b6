"""The Trainer of transformers: killed, it goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster
from tests.matrix.runs import effective, run, seen
from tests.matrix.worker import SAMPLES

pytestmark = pytest.mark.timeout(600)
WORKER = "trainer_worker"


def logged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a clock says."""
    (log,) = [row["log"] for row in rows if row["rank"] == 0]
    timed = ("_runtime", "_per_second")
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in log if "train_loss" not in entry]


def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path) -> None:
    """Killed twice in one epoch: two processes that accumulate, one, three."""
    node = nodes.node(replicas=0)

    def of(ranks: int, accumulated: int, **how: Any) -> Any:
        arguments = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulated}
        return run(node, WORKER, ranks, tmp_path, "once", arguments=arguments, **how)

    runs = [of(2, 2, dies_at=8), of(1, 1, dies_at=15), of(3, 1)]
    assert [one.of("begins")[0]["step"] for one in runs] == [0, 8, 15]
    assert runs[2].of("ends")[0]["step"] == 26, "three steps of the second epoch, eight of the third"
    found = seen(effective(runs, "seen"))
    assert sorted(found) == [0, 1, 2]
    for epoch, samples in found.items():
        assert samples == dict.fromkeys(range(SAMPLES), 1), f"epoch {epoch}"


@pytest.mark.parametrize("dies_at", [5, 6, 12])
def test_the_log_of_a_killed_run_is_that_of_an_unbroken_one(nodes: Cluster, tmp_path: Path, dies_at: int) -> None:
    """Dropout, evaluations, clipping, a schedule, early stopping that counts: bit by bit. Step 6 and 12 are the last of an epoch,
    whose evaluation comes behind the snapshot."""
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {
        "dropout": 0.3, "patience": 3, "threshold": 10.0,  # no evaluation is better by 10: it stops at the third
        "arguments": {
            "num_train_epochs": 6, "per_device_train_batch_size": 8, "eval_strategy": "epoch", "logging_steps": 4,
            "metric_for_best_model": "eval_loss", "lr_scheduler_type": "cosine", "warmup_steps": 3,
        },
    }  # fmt: skip
    whole = run(node, WORKER, 2, tmp_path, "whole", **how)
    broken = [run(node, WORKER, 2, tmp_path, "broken", **more, **how) for more in ({"dies_at": dies_at}, {})]
    assert broken[1].of("begins")[0]["step"] == dies_at
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))
    assert logged(broken[1].of("ends")) == logged(whole.of("ends"))
    assert broken[1].of("ends")[0]["step"] == whole.of("ends")[0]["step"] < 36


def test_a_run_that_has_ended_makes_no_step_more(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    arguments = {"max_steps": 7, "per_device_train_batch_size": 4}
    run(node, WORKER, 2, tmp_path, "ended", arguments=arguments)
    again = run(node, WORKER, 2, tmp_path, "ended", arguments=arguments)
    assert again.of("seen") == []
    more = run(node, WORKER, 2, tmp_path, "ended", arguments=arguments | {"max_steps": 9})
    assert sorted({row["step"] for row in more.of("seen")}) == [8, 9]


def test_a_stream_is_wound_forward_and_refused_in_another_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {"stream": True, "arguments": {"max_steps": 10, "per_device_train_batch_size": 4}}
    whole = run(node, WORKER, 2, tmp_path, "whole", **how)
    broken = [run(node, WORKER, 2, tmp_path, "broken", **more, **how) for more in ({"dies_at": 4}, {})]
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))
    with pytest.raises(AssertionError, match="cannot go on in another number of ranks"):
        run(node, WORKER, 1, tmp_path, "broken", **how)


def test_a_loader_that_nobody_prepared_is_followed_too(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {"plain": True, "arguments": {"num_train_epochs": 2}}
    whole = run(node, WORKER, 1, tmp_path, "whole", **how)
    broken = [run(node, WORKER, 1, tmp_path, "broken", **more, **how) for more in ({"dies_at": 30}, {})]
    assert effective(broken, "seen") == whole.of("seen")
    assert logged(whole.of("ends")) == logged(broken[1].of("ends"))
