"""A training on a device that is killed goes on to the very bits of one that is not. On CUDA where there is one (`make gpu`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.cluster.device_worker import KILLED_AT, STEPS
from tests.cluster.nodes import REPO, Cluster, Node

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [
    *(pytest.param("cuda", how, marks=ON_CUDA) for how in ("plain", "scaler", "sharded", "graph")),
    *(pytest.param("cpu", how, marks=pytest.mark.chaos) for how in ("plain", "sharded")),
]
LIMIT_S = 90.0


@pytest.mark.parametrize(("kind", "how"), PLACES)
def test_a_training_that_is_killed_goes_on_bit_for_bit(nodes: Cluster, kind: str, how: str) -> None:
    node = nodes.node(replicas=0)
    alone = ran(nodes, node, kind, how, "alone", 0)
    assert (alone["begun"], len(alone["losses"])) == (0, STEPS)
    ran(nodes, node, kind, how, "killed", -signal.SIGKILL)
    again = ran(nodes, node, kind, how, "again", 0)
    assert (again["begun"], again["ended"], again["newest"], again["problems"]) == (KILLED_AT, "sealed", STEPS, [])
    assert again["losses"] == {step: loss for step, loss in alone["losses"].items() if int(step) > KILLED_AT}
    assert again["digest"] == alone["digest"]


def ran(nodes: Cluster, node: Node, kind: str, how: str, what: str, status: int) -> dict[str, Any]:
    out = nodes.root / f"{how}-{what}.json"
    command = [sys.executable, "-m", "tests.cluster.device_worker", str(node.socket), kind, how, what, str(out)]
    env = {**os.environ, "PYTHONPATH": str(REPO), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == status, done.stderr
    return json.loads(out.read_text()) if status == 0 else {}
