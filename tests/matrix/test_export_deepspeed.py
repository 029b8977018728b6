"""`ckptd export --to deepspeed`, judged by DeepSpeed: what load_universal makes of it trains on as the plain model would (P9)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.core.errors import CkptdError
from ckptd.export.export import Report, Request, export
from tests.cluster.nodes import Cluster, Node
from tests.matrix.runs import run
from tests.matrix.universal_worker import MORE, Net, batch, losses
from tests.node.trained import STEPS, train_on

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def node(nodes: Cluster) -> Node:
    (nodes.root / "storage").mkdir()
    return nodes.node(replicas=0, storage_root=nodes.root / "storage")


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(batch(number))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def saved(node: Node, job: str, model: nn.Module, optimizer: Any, step: Callable[[int], float] | None = None) -> Path:
    registered = {"model": model, "optimizer": optimizer, "note": {"of": [1, "text"]}}
    return train_on(node, node.root.parent / "storage", job, registered, step or stepping(model, optimizer))


def exported(source: Path, dest: Path, **how: Any) -> Report:
    return export(Request(str(source), str(dest), "deepspeed", **how))


def test_stages_go_on_as_one_process_would(node: Node, tmp_path: Path) -> None:
    model = Net(0)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    source = saved(node, "universal", model, optimizer)
    model, optimizer = copy.deepcopy((model, optimizer))
    wanted = losses(stepping(model, optimizer), range(STEPS, STEPS + MORE))
    report = exported(source, tmp_path / "out")
    assert "frozen.bias, frozen.weight, scale" in report.notes[-1]
    for stage, ranks in ((1, 2), (2, 3), (3, 2)):
        settings = {"universal": str(tmp_path / "out"), "stage": stage, "from": STEPS}
        (ends, *_) = run(node, "universal_worker", ranks, tmp_path, f"stage-{stage}", **settings).of("ends")
        assert ends["losses"] == pytest.approx(wanted, rel=1e-5), stage
        assert ends["untouched"], "DeepSpeed does not load what is frozen"
        assert (ends["steps"], ends["extra"]) == (STEPS + MORE, {"of": [1, "text"]})
        assert ends["rest"] == ["frozen.bias", "frozen.weight", "scale"]


def test_what_its_loader_would_take_for_something_else(node: Node, tmp_path: Path) -> None:
    model = Net(0)
    source = saved(node, "unequal", model, torch.optim.AdamW(model.groups(lr=0.1), lr=1e-2))
    with pytest.raises(CkptdError, match=r"groups 0 and 1 differ in lr, and ZeRO-3 takes those of group 0 for all"):
        exported(source, tmp_path / "no")
    exported(source, tmp_path / "two", zero=2)
    assert not list((tmp_path / "two").glob("*/zero_pp_rank_*"))
    sgd = saved(node, "sgd", model, torch.optim.SGD(model.groups(), lr=1e-2, momentum=0.9))
    with pytest.raises(CkptdError, match=r"no state of Adam: momentum_buffer"):
        exported(sgd, tmp_path / "no")
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)

    def uneven(number: int) -> float:
        found = stepping(model, optimizer)(number)
        optimizer.state[model.first.bias]["step"].fill_(1)
        return found

    odd = saved(node, "steps", model, optimizer, uneven)
    with pytest.raises(CkptdError, match=r"unequal steps within a group: model.first.bias has made 1, .*weight has made 3"):
        exported(odd, tmp_path / "no")
    with pytest.raises(CkptdError, match="no optimizers"):
        exported(odd, tmp_path / "no", only=("model.*",))
