"""The frameworks' examples run, die and go on with another number of processes: docs/examples."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster
from tests.cluster.test_client_parallel import end_tree
from tests.cluster.test_examples import DIES_AFTER, STEPS, TIMEOUT_S, ended, losses, started
from tests.waiting import until


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", ["trainer.py", "accelerate_loop.py", "lightning_fit.py"])
def test_killed_it_goes_on_with_one_process_and_the_same_losses(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.setenv("OUTPUT", str(tmp_path))
    node = nodes.node(replicas=0)
    whole = ended(started(node, example, 2, tmp_path / "whole", "whole"), tmp_path / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))
    log = tmp_path / "killed"
    process = started(node, example, 2, log, "killed")
    until(lambda: len(losses(log)) >= DIES_AFTER, TIMEOUT_S, "some steps")
    end_tree(process.pid)
    assert process.wait() == -signal.SIGKILL
    rest = ended(started(node, example, 1, tmp_path / "rest", "killed"), tmp_path / "rest")
    first = min(rest)
    assert first > 1, rest
    assert sorted(rest) == list(range(first, STEPS + 1))
    expected = {step: float(whole[step]) for step in rest}
    assert {step: float(loss) for step, loss in rest.items()} == pytest.approx(expected, abs=3e-4)
