"""The frameworks' examples run, die and go on with another number of processes: docs/examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster
from tests.cluster.test_examples import PRECISION, killed_and_gone_on_with_by_one

EXAMPLES = (
    "trainer.py", "accelerate_loop.py", "lightning_fit.py", "fabric_loop.py", "deepspeed_loop.py", "torchtitan_parts.py",
    "megatron_gpt.py",
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", EXAMPLES)
def test_killed_it_goes_on(nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    monkeypatch.setenv("OUTPUT", str(tmp_path / "outputs"))
    found, expected = killed_and_gone_on_with_by_one(nodes.node(replicas=0), example, tmp_path)
    assert found == pytest.approx(expected, abs=PRECISION)
