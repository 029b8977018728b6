"""Lightning: killed, it goes on as if nothing had been."""

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

pytestmark = pytest.mark.timeout(600)
WORKER = "lightning_worker"


def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)

    def start(ranks: int, accumulated: int, **how: Any) -> Run:
        arguments = {"max_epochs": 3, "accumulate_grad_batches": accumulated}
        return run(node, WORKER, ranks, tmp_path, "once", arguments=arguments, **how)

    runs = three_worlds(start)
    assert begun(runs) == [0, 8, 15]
    assert seen(effective(runs, "seen")) == EACH_ONCE


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
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, dropout=0.3, arguments=arguments)
    if "limit_val_batches" not in arguments:
        start = partial(start, patience=9)
    whole, broken = whole_and_killed(start, dies_at, seed=6)
    names = ("epoch", "samples", "loss")
    assert by_step(effective(broken, "seen"), *names) == by_step(whole.of("seen"), *names)
    assert by_step(broken[1].of("ends"), "marks") == by_step(whole.of("ends"), "marks")


def test_a_run_that_has_ended_makes_no_step_more(nodes: Cluster, tmp_path: Path) -> None:
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, "ended")
    assert start(arguments={"max_steps": 7}).of("ends")
    assert start(arguments={"max_steps": 7}).of("seen") == []
    assert sorted({row["step"] for row in start(arguments={"max_steps": 9}).of("seen")}) == [8, 9]


def test_fsdp2_by_lightning(nodes: Cluster, tmp_path: Path) -> None:
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, strategy="fsdp2", arguments={"max_epochs": 2})
    whole, broken = whole_and_killed(start, 7)
    assert by_step(effective(broken, "seen"), "loss") == by_step(whole.of("seen"), "loss")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"averaged": True}, "EMAWeightAveraging keeps state in on_save_checkpoint()"),
        ({"fits": 2}, "one fit() for each client"),
        ({"arguments": {"max_steps": 3, "reload_dataloaders_every_n_epochs": 1}}, "loaders that are made anew cannot be followed"),
    ],
)
def test_what_cannot_be_is_refused_by_name(nodes: Cluster, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError) as failed:
        run(nodes.node(replicas=0), WORKER, 1, tmp_path, "refused", **{"arguments": {"max_steps": 3}} | settings)
    assert said in str(failed.value)
