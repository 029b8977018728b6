"""Lightning Fabric with a loop of one's own: killed, it goes on as if nothing had been."""

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
WORKER = "fabric_worker"


def test_each_sample_is_seen_once_in_each_epoch_whatever_the_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)

    def start(ranks: int, accumulated: int, **how: Any) -> Run:
        return run(node, WORKER, ranks, tmp_path, "once", accumulated=accumulated, **how)

    runs = three_worlds(start)
    assert begun(runs) == [0, 8, 15]
    assert seen(effective(runs, "seen")) == EACH_ONCE


@pytest.mark.parametrize(("dies_at", "how"), [(17, {}), (24, {}), (17, {"strategy": "fsdp2"})])
def test_losses_are_those_of_an_unbroken_run(nodes: Cluster, tmp_path: Path, dies_at: int, how: dict[str, Any]) -> None:
    """Dropout, another order in each epoch: bit by bit. Step 24 is the last of an epoch."""
    start = partial(run, nodes.node(replicas=0), WORKER, 2, tmp_path, **how)
    whole, broken = whole_and_killed(start, dies_at, seed=6)
    names = ("epoch", "samples", "loss")
    assert by_step(effective(broken, "seen"), *names) == by_step(whole.of("seen"), *names)


def test_a_stream_is_refused_in_another_world(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(replicas=0)
    run(node, WORKER, 2, tmp_path, "stream", stream=True, dies_at=5)
    with pytest.raises(AssertionError, match="cannot go on in another number of ranks"):
        run(node, WORKER, 1, tmp_path, "stream", stream=True)
