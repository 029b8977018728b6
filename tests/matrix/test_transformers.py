"""The Trainer of transformers: killed, it goes on as if nothing had been."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, Node
from tests.matrix.runs import EACH_ONCE, Run, begun, effective, run, seen, three_worlds, whole_and_killed
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)
WORKER = "trainer_worker"


def logged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a clock says."""
    (log,) = [row["log"] for row in rows if row["rank"] == 0]
    timed = ("_runtime", "_per_second")
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in log if "train_loss" not in entry]


def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)

    def start(ranks: int, accumulated: int, **how: Any) -> Run:
        arguments = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulated}
        return run(node, WORKER, ranks, tmp_path, "once", arguments=arguments, **how)

    runs = three_worlds(start)
    assert begun(runs) == [0, 8, 15]
    assert seen(effective(runs, "seen")) == EACH_ONCE
    assert runs[2].of("ends")[0]["step"] == 26, "three steps of the second epoch, eight of the third"


@pytest.mark.parametrize("dies_at", [5, 6, 12])
def test_the_log_of_a_killed_run_is_that_of_an_unbroken_one(nodes: Cluster, tmp_path: Path, dies_at: int) -> None:
    """Dropout, evaluations, clipping, a schedule, early stopping that counts: bit by bit. Step 6 and 12 are the last of an epoch,
    whose evaluation comes behind the snapshot."""
    arguments = {
        "num_train_epochs": 6, "per_device_train_batch_size": 8, "eval_strategy": "epoch", "logging_steps": 4,
        "metric_for_best_model": "eval_loss", "lr_scheduler_type": "cosine", "warmup_steps": 3,
    }  # fmt: skip
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, dropout=0.3, arguments=arguments)
    start = partial(start, patience=3, threshold=10.0)  # no evaluation is better by 10: it stops at the third
    whole, broken = whole_and_killed(start, dies_at)
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))
    assert logged(broken[1].of("ends")) == logged(whole.of("ends"))
    assert broken[1].of("ends")[0]["step"] == whole.of("ends")[0]["step"] < 36


def test_a_run_that_has_ended_makes_no_step_more(nodes: Cluster, tmp_path: Path) -> None:
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, "ended")
    start(arguments={"max_steps": 7, "per_device_train_batch_size": 4})
    again = start(arguments={"max_steps": 7, "per_device_train_batch_size": 4})
    assert again.of("seen") == []
    more = start(arguments={"max_steps": 9, "per_device_train_batch_size": 4})
    assert sorted({row["step"] for row in more.of("seen")}) == [8, 9]


def test_a_stream_is_wound_forward_and_refused_in_another_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    how: dict[str, Any] = {"stream": True, "arguments": {"max_steps": 10, "per_device_train_batch_size": 4}}
    whole, broken = whole_and_killed(partial(run, node, WORKER, 2, tmp_path, **how), 4)
    assert seen(effective(broken, "seen")) == seen(whole.of("seen"))
    with pytest.raises(AssertionError, match="cannot go on in another number of ranks"):
        run(node, WORKER, 1, tmp_path, "broken", **how)


def test_a_loader_that_nobody_prepared_is_followed_too(nodes: Cluster, tmp_path: Path) -> None:
    how: dict[str, Any] = {"plain": True, "arguments": {"num_train_epochs": 2}}
    whole, broken = whole_and_killed(partial(run, nodes.node(replicas=0), WORKER, 1, tmp_path, **how), 30)
    assert effective(broken, "seen") == whole.of("seen")
    assert logged(whole.of("ends")) == logged(broken[1].of("ends"))


def kept(node: Node, job: str) -> dict[int, bool]:
    """step -> kept, of what is on storage."""
    return {row["step"]: row["keep"] for row in node.get("/ls")["rows"] if row["job"].endswith(f"/{job}") and row["durable"]}


@pytest.mark.parametrize(
    ("strategy", "limit", "left"), [({"save_strategy": "steps", "save_steps": 3}, 2, [3, 12]), ({"save_strategy": "epoch"}, 1, [6])]
)
def test_what_it_would_save_is_kept_as_its_retention_says(
    nodes: Cluster, tmp_path: Path, strategy: dict[str, Any], limit: int, left: list[int]
) -> None:
    """Killed amid, with the first save as the best, as a loss that falls is worse here: that one stays, and is what train() ends
    with. Nothing but snapshots is written."""
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage", keep_last=1)
    arguments = {
        "max_steps": 12, "per_device_train_batch_size": 8, "eval_strategy": strategy["save_strategy"], "eval_steps": 3,
        "save_total_limit": limit, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        **strategy,
    }  # fmt: skip
    start = partial(run, node, WORKER, 2, tmp_path, "kept", own_saves=False, arguments=arguments)
    broken = [start(dies_at=7), start()]
    assert begun(broken) == [0, 7]
    weights = {row["step"]: row["total"] for row in effective(broken, "weights")}
    for row in broken[1].of("trained"):
        assert row["kept"] == left and row["total"] == weights[left[0]] != weights[12], (row, weights)
    stays = dict.fromkeys(left, True)
    until(lambda: kept(node, "kept") == {12: False, **stays}, 30, f"{left} kept on storage, and the daemon's last one")
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_what_needs_files_is_refused(nodes: Cluster, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="save_only_model needs files, and own_saves=False writes none"):
        run(nodes.node(replicas=0), WORKER, 1, tmp_path, "files", own_saves=False, arguments={"save_only_model": True})
