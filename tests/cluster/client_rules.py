"""Tensors that the program cut by hand, for client_ranks.py: what a rule says of them comes back into any other cut (D18)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client, copied, padded, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

Connect = Callable[..., Client]
QKV = (24, 8, 8)  # fused query, key and value, each cut by itself
VOCABULARY, WIDTH = 10, 130
SHAPES = {"qkv": (sum(QKV), WIDTH), "out": (WIDTH, 24), "words": (VOCABULARY, WIDTH), "norm": (WIDTH,)}


def logical(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def cut(whole: dict[str, Tensor], tp: int, at: int) -> dict[str, Tensor]:
    longer = torch.cat([whole["words"], torch.zeros(-VOCABULARY % tp, WIDTH)])
    return {
        "qkv": torch.cat([part.chunk(tp)[at] for part in whole["qkv"].split(QKV)]),
        "out": whole["out"].chunk(tp, 1)[at],
        "words": longer.chunk(tp)[at],
        "norm": whole["norm"],
    }


class ByHand:
    """``tp`` ranks share each tensor, the others have copies; Adam works element by element, so its moments are cut alike."""

    def __init__(self, tp: int, seed: int) -> None:
        self.tp = tp
        self.mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
        self.at = self.mesh["tp"].get_local_rank()
        self.model = nn.ParameterDict({name: part.clone() for name, part in cut(logical(seed), tp, self.at).items()})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    @property
    def registered(self) -> dict[str, Any]:
        if self.tp == 1:
            return {"model": self.model, "optimizer": self.optimizer, "replicated": ["*"]}
        rules: dict[str, Any] = {
            "model.qkv": [shard(0, over="tp", parts=QKV), copied("dp")],
            "*.out": [shard(1, over="tp"), copied("dp")],
            "*.words": [shard(0, over="tp"), padded(0, VOCABULARY), copied("dp")],
            "*.norm": [copied("tp"), copied("dp")],
        }
        return {"model": self.model, "optimizer": self.optimizer, "rules": rules, "mesh": self.mesh}

    def step(self, seed: int) -> None:
        for name, gradient in cut(logical(seed), self.tp, self.at).items():
            self.model[name].grad = gradient.clone()
        self.optimizer.step()

    def same(self, expected: dict[str, dict[str, Tensor]]) -> None:
        for state, whole in expected.items():
            for name, part in cut(whole, self.tp, self.at).items():
                parameter = self.model[name]
                found = parameter.detach() if state == "value" else self.optimizer.state[parameter][state]
                assert torch.equal(found, part), (state, name)


def truth() -> dict[str, dict[str, Tensor]]:
    """Three steps of all of it in one place."""
    model = nn.ParameterDict(logical(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for seed in (11, 12, 13):
        for name, gradient in logical(seed).items():
            model[name].grad = gradient
        optimizer.step()
    found = {"value": {name: parameter.detach() for name, parameter in model.items()}}
    for state in ("exp_avg", "exp_avg_sq"):
        found[state] = {name: optimizer.state[parameter][state] for name, parameter in model.items()}
    return found


def cut_by_hand(connect: Connect, until_durable: Callable[..., None], folder: Path) -> None:
    saved = ByHand(2, seed=1)
    with connect("by_hand", **saved.registered) as client:
        assert client.restore() is None
        for number, seed in enumerate((11, 12, 13), 1):
            saved.step(seed)
            until_durable(client, client.snapshot(number, must=True))
    expected = truth()
    saved.same(expected)
    comes_back(connect, 4, expected)
    comes_back(connect, 1, expected)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "by_hand.truth")


def comes_back(connect: Connect, tp: int, expected: dict[str, dict[str, Tensor]]) -> None:
    fresh = ByHand(tp, seed=5)
    with connect("by_hand", **fresh.registered) as client:
        assert client.restore() == 3
        fresh.same(expected)


def into_two(connect: Connect, folder: Path) -> None:
    expected = torch.load(folder / "by_hand.truth")
    for tp in (2, 1):
        comes_back(connect, tp, expected)


def cut_by_fsdp_too(connect: Connect, until_durable: Callable[..., None]) -> None:
    """FSDP2 shards over ``dp`` what the program has cut over ``tp``; back comes all of it, into plain FSDP2."""

    class Layer(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(rows, 50))

    whole = torch.randn(22, 50, generator=torch.Generator().manual_seed(3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    at = mesh["tp"].get_local_rank()
    model = fully_shard(Layer(11), mesh=mesh["dp"])
    local = model.weight.to_local()
    mine = whole.chunk(2)[at].chunk(2)[mesh["dp"].get_local_rank()]
    with torch.no_grad():
        local.copy_(mine)
    with connect("by_fsdp_too", model=model, rules={"*": shard(0, over="tp")}, mesh=mesh) as client:
        client.restore()
        until_durable(client, client.snapshot(1, must=True))
    fresh = fully_shard(Layer(22), mesh=init_device_mesh("cpu", (4,)))
    with connect("by_fsdp_too", model=fresh) as client:
        assert client.restore() == 1
    assert torch.equal(fresh.weight.full_tensor(), whole)
