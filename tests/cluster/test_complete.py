"""P15 end to end: what a trainer registers goes through a real daemon to storage and back, or is told where the user looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from ckptd_client import CkptdError, Client
from torch import nn
from torch.optim import AdamW

from tests.cluster.nodes import Cluster, Node
from tests.node.module_zoo import Linear8, Observer
from tests.node.optimizer_zoo import Container, EightBit, Lookahead, train
from tests.node.tensor_zoo import Adam8, Quantised

JOB = "complete"


class Everything:
    """A quantised base, a module with a range of its own, a container, a wrapper, shared and 8-bit state, gradients."""

    def __init__(self, scale: float) -> None:
        torch.manual_seed(3)
        base = nn.Linear(20, 130)
        base.weight = nn.Parameter(Quantised.of(base.weight * scale), requires_grad=False)
        self.model = nn.Sequential(
            base, Observer(), nn.Linear(130, 130), nn.Linear(130, 130), nn.Linear(130, 130), Linear8(130, 20).quantise()
        )
        self.optimizers: dict[str, Any] = {
            "container": Container([self.model[2]]),
            "lookahead": Lookahead(EightBit(self.model[3].parameters())),
            "small": Adam8(self.model[4].parameters()),
            "plain": AdamW([base.bias, self.model[5].bias], lr=1e-2),  # type: ignore[list-item]
        }

    def train(self, steps: int) -> list[float]:
        return train(self.model, list(self.optimizers.values()), steps)

    def register(self, client: Client) -> None:
        client.register(model=self.model, **self.optimizers)


def durable_on(nodes: Cluster) -> tuple[Node, Path]:
    root = nodes.root / "storage"
    root.mkdir()
    return nodes.node(replicas=0, storage_root=root), root


def test_everything_comes_back_from_storage(nodes: Cluster) -> None:
    node, root = durable_on(nodes)
    everything = Everything(1.0)
    with Client.connect(JOB, node.socket, required=True) as client:
        assert begun(client, everything) == ""
        everything.train(3)
        status = client.snapshot(3, must=True).wait("durable", 60)
        assert status == "durable", (status, client.health().problems)
    expected = everything.train(3)
    node.kill()
    again = nodes.node(replicas=0, storage_root=root)
    fresh = Everything(5.0)
    with Client.connect(JOB, again.socket, required=True) as client:
        fresh.register(client)
        assert client.restore() == 3
        assert client.last_restore["bytes"]["durable"] > 0
    assert fresh.train(3) == expected
    (step,) = root.glob(f"*/{JOB}/epoch-*/step-*")
    verified = again.cli("verify", step)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def begun(client: Client, everything: Everything) -> str:
    """Why a job of these objects cannot begin."""
    try:
        everything.register(client)
        client.restore()
    except CkptdError as error:
        return str(error)
    return ""


def test_state_left_out_on_purpose_is_in_the_manifest_and_in_ls(nodes: Cluster) -> None:
    node, root = durable_on(nodes)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    body, probe = AdamW(model[:1].parameters(), lr=1e-2), AdamW(model[1:].parameters(), lr=1e-2)
    with Client.connect(JOB, node.socket, required=True) as client:
        client.register(model=model, optimizer=body, without=["model.1.*", "model.7.*"])
        client.restore()
        train(model, [body], 1)
        assert client.snapshot(1, must=True).wait("durable", 60) == "durable"
        train(model, [body, probe], 1)
        assert client.snapshot(2, must=True).wait("durable", 60) == "durable"
        lines = listed(node)
        assert "without optimizer state" in lines[2], lines
        assert "without" not in lines[1], lines
    stored = listed(node, "--storage-root", root)
    assert "without optimizer state" in stored[2]
    manifests = sorted(root.glob(f"*/{JOB}/epoch-*/step-*/manifest.json"))
    assert [json.loads(path.read_text())["without"] for path in manifests] == [[], ["model.1.*"]]


def listed(node: Node, *how: object) -> dict[int, str]:
    """step -> its line in `ckptd ls`."""
    answer = node.cli("ls", *how)
    assert answer.returncode == 0, answer.stderr
    rows = [line.split() for line in answer.stdout.splitlines() if JOB in line]
    return {int(row[2]): " ".join(row) for row in rows}
