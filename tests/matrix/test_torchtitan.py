"""torchtitan's manager over ckptd, with its own containers of optimizers and schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster
from tests.matrix.runs import begun, effective, run
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)
WORKER = "torchtitan_worker"


def told(rows: list[dict[str, Any]]) -> dict[int, Any]:
    return {row["step"]: (row["rate"], row["tokens"]) for row in rows if row["rank"] == 0}


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows if row["rank"] == 0}


@pytest.mark.parametrize("parts", [1, 2])
def test_killed_it_goes_on_in_another_world(nodes: Cluster, tmp_path: Path, parts: int) -> None:
    """Two ranks with one part, or two parts, then one rank with all of it in one, then three."""
    (nodes.root / "storage").mkdir()
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage")
    whole = run(node, WORKER, 2, tmp_path, "whole", parts=parts)
    assert whole.of("begins")[0] == {"kind": "begins", "rank": 0, "step": 0, "loaded": False}
    ways: list[tuple[int, dict[str, Any]]] = [(2, {"parts": parts, "dies_at": 4}), (1, {"dies_at": 7}), (3, {"parts": parts})]
    broken = [run(node, WORKER, ranks, tmp_path, "broken", **how) for ranks, how in ways]
    assert begun(broken) == [0, 4, 7]
    seen = effective(broken, "seen")
    assert told(seen) == told(whole.of("seen"))
    assert losses(seen) == pytest.approx(losses(whole.of("seen")), rel=1e-4)
    assert broken[-1].of("ends")[0]["exported"] == ["step-12"], "the model alone, as torchtitan has it"


def test_an_older_step_and_what_is_excluded(nodes: Cluster, tmp_path: Path) -> None:
    (nodes.root / "storage").mkdir()
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage", flush_every_steps=2)
    run(node, WORKER, 2, tmp_path, "older", steps=6, durable=True, config={"interval": 2})
    again = run(node, WORKER, 2, tmp_path, "older", steps=6, load_step=4, config={"interval": 2})
    assert again.of("begins")[0]["step"] == 4
    without = run(node, WORKER, 2, tmp_path, "older", steps=8, config={"exclude_from_loading": ["train_state", "lr_scheduler"]})
    assert without.of("begins")[0] == {"kind": "begins", "rank": 0, "step": 0, "loaded": True}
    with pytest.raises(AssertionError, match="nobody not found in state_dict"):
        run(node, WORKER, 2, tmp_path, "older", config={"exclude_from_loading": ["nobody"]})
    with pytest.raises(AssertionError, match="async_mode='async' is of torchtitan's own saves"):
        run(node, WORKER, 2, tmp_path, "older", config={"async_mode": "async"})


def test_the_latest_k_of_what_is_kept_stay(nodes: Cluster, tmp_path: Path) -> None:
    """Killed behind the third that is kept, of which the first is still to go; the daemon itself keeps the last one."""
    (nodes.root / "storage").mkdir()
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage", keep_last=1)
    how: dict[str, Any] = {"steps": 11, "durable": True, "config": {"keep_interval": 2, "keep_latest_k": 2}}
    broken = [run(node, WORKER, 2, tmp_path, "latest", dies_at=6, **how), run(node, WORKER, 2, tmp_path, "latest", **how)]
    assert begun(broken) == [0, 6]

    def on_storage() -> dict[int, bool]:
        return {row["step"]: row["keep"] for row in node.get("/ls")["rows"] if row["durable"]}

    until(lambda: on_storage() == {8: True, 10: True, 11: False}, 30, "steps 8 and 10 kept, and 11 the last")
    with pytest.raises(AssertionError, match="keep_interval=3 is no multiple of interval=2"):
        run(node, WORKER, 2, tmp_path, "latest", config={"keep_interval": 3, "interval": 2})
