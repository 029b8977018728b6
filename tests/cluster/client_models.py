"""The models of client_ranks.py and the ways to spread them over ranks; and their values, without any code of the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.node.tensor_zoo import Adam8

IN, HIDDEN, OUT = 10, 36, 6  # rows that 4 ranks share unevenly, some with nothing


class Net(nn.Module):
    """Uneven, 0-d, empty, tied, frozen and stateless parameters, and norms that TP leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.norm = nn.LayerNorm(OUT)
        self.second = nn.Linear(HIDDEN, OUT)
        self.head = nn.Linear(OUT, 5, bias=False)
        self.tied = nn.Linear(OUT, 5, bias=False)
        self.tied.weight = self.head.weight
        self.unused = nn.Parameter(torch.randn(5, 130))
        self.frozen = nn.Parameter(torch.randn(7, 900), requires_grad=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.randn(9, 11) > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counter += 1
        hidden = self.norm(self.second(torch.relu(self.first(x))))
        return self.head(hidden) + self.tied(hidden)


class Stage(nn.Module):
    """A pipeline stage with a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.line, self.norm = nn.Linear(IN, IN), nn.BatchNorm1d(IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.line(x))


Built = tuple[nn.Module, torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    # With foreach, plain tensors and DTensors could not be in one group
    return torch.optim.AdamW(parameters, lr=0.05, foreach=False)


def seeded(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def plain(seed: int) -> Built:
    model = seeded(seed)
    return model, adamw(model)


def ddp(seed: int) -> Built:
    model = nn.parallel.DistributedDataParallel(seeded(seed), find_unused_parameters=True)
    return model, adamw(model)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(seed: int) -> Built:
    model = sharded(seeded(seed), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adamw(model)


def hsdp(seed: int) -> Built:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(seeded(seed), mesh)
    return model, adamw(model)


def parallel(model: Net, mesh: Any) -> Net:
    # first and second only: the tied head stays as it is
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return model


def tp(seed: int) -> Built:
    model = parallel(seeded(seed), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adamw(model)


def fsdp_tp(seed: int) -> Built:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(parallel(seeded(seed), mesh["tp"]), mesh["dp"])
    return model, adamw(model)


def wrapped(seed: int) -> Built:
    """Activation checkpointing inside, torch.compile outside (nothing is compiled before it is called)."""
    model = seeded(seed)
    model.first = checkpoint_wrapper(model.first)  # type: ignore[assignment]
    compiled = torch.compile(
        nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), backend="eager"
    )
    return compiled, adamw(model)  # type: ignore[return-value]


WAYS: dict[str, Callable[[int], Built]] = {
    "plain": plain, "ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "tp": tp, "fsdp_tp": fsdp_tp, "wrapped": wrapped,
}  # fmt: skip


def train(built: Built, steps: int) -> None:
    model, optimizer = built
    model.train()
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randn(4, IN)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def eight_bits(seed: int) -> Built:
    model = fsdp(seed)[0]
    return model, Adam8([p for p in model.parameters() if p.requires_grad])


def train_all(built: Built) -> list[torch.Tensor]:
    """Two steps, in which every parameter has a gradient. What the parameters are then."""
    model, optimizer = built
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, IN)).square().mean().backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def evaluate(built: Built) -> None:
    """Leaves FSDP2 modules with plain full parameters."""
    built[0].eval()
    with torch.no_grad():
        built[0](torch.randn(4, IN))


def whole(value: torch.Tensor) -> torch.Tensor:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def truth(built: Built) -> dict[str, torch.Tensor]:
    """Full values of everything, without any code of the client."""
    model, optimizer = built
    found = {bare(name): whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{bare(name)}:{key}"] = whole(value)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected), set(found) ^ set(expected)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, f"not bit-equal: {wrong}"
