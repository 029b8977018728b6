"""Megatron's distributed optimizer: who has what is told by its own functions. The optimizer itself takes tensors of a device
alone, so that Adam steps these ranges here as it does there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ckptd_client import Client
from ckptd_client.integrations.flat import Flat, Part
from torch import Tensor, nn

from tests.matrix.kinds.spread import Data, Values

BUCKET_ELEMENTS = 5000
ALIGNED = 64  # where a parameter begins, as in Megatron's buffers


class Mine(NamedTuple):
    """Elements from ``start`` on of a parameter: ``main`` has them, and Adam's state is of it."""

    name: str
    parameter: nn.Parameter
    start: int
    main: Tensor


class Distributed(Data):
    how = "golden"

    def wrap(self) -> None:
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def __init__(self, model: str, seed: int) -> None:
        super().__init__(model, seed)
        self.shards = list(self._shards())
        self.optimizer = torch.optim.AdamW([mine.main for mine in self.shards], lr=0.01, foreach=False)

    def _shards(self) -> Iterator[Mine]:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        buffer, names = self._buffer(), {p: name for name, p in self.trained.items()}
        for bucket in range(len(buffer.buckets)):
            for parameter, ranges in DistributedOptimizer._build_model_gbuf_range(buffer, bucket)["param_map"].items():
                part = ranges["param"]
                main = parameter.detach().flatten()[part.start : part.end].clone()
                yield Mine(names[parameter], parameter, part.start, main)

    def _buffer(self) -> Any:
        """As Megatron lays it out: the last parameter first, buckets padded so that each rank has as much of each."""
        places: dict[nn.Parameter, tuple[int, int, int]] = {}
        buckets: list[Any] = []
        at = begin = 0
        for parameter in reversed(self.trained.values()):
            at += -at % ALIGNED
            places[parameter] = at, at + parameter.numel(), len(buckets)
            at += parameter.numel()
            if at - begin >= BUCKET_ELEMENTS or len(places) == len(self.trained):
                at += -(at - begin) % (ALIGNED * self.world)
                buckets.append(SimpleNamespace(grad_data=torch.empty(at - begin, device="meta"), offset=begin))
                begin = at
        return SimpleNamespace(data_parallel_group=dist.group.WORLD, buckets=buckets, param_index_map=places)

    def attach(self, client: Client) -> None:
        Ranges(self).attach(client)

    def step(self, number: int) -> float:
        loss = self.backward(self.mine(number))
        for parameter in self.trained.values():
            dist.all_reduce(parameter.grad)
        for mine in self.shards:
            assert mine.parameter.grad is not None
            mine.main.grad = mine.parameter.grad.flatten()[mine.start : mine.start + mine.main.numel()] / self.world
        self.optimizer.step()
        self.gather()
        for parameter in self.trained.values():
            parameter.grad = None
        dist.all_reduce(loss)
        return loss.item() / self.world

    def gather(self) -> None:
        """What each rank has stepped, into the model of all."""
        whole = self._whole({mine.name: mine.main for mine in self.shards})
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(whole[name])

    def _whole(self, parts: Values) -> Values:
        found = {name: torch.zeros_like(parameter).flatten() for name, parameter in self.trained.items()}
        for mine in self.shards:
            if mine.name in parts:
                found[mine.name][mine.start : mine.start + mine.main.numel()] = parts[mine.name]
        for flat in found.values():
            dist.all_reduce(flat)
        return {name: flat.view(self.trained[name].shape) for name, flat in found.items()}

    def held(self) -> Values:
        names = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        found = {f"model.{name}": value.detach() for name, value in self.model.state_dict().items() if name in names}
        states = {mine.name: self.optimizer.state.get(mine.main, {}) for mine in self.shards}
        for state in ("exp_avg", "exp_avg_sq") if any(states.values()) else ():
            whole = self._whole({name: of[state] for name, of in states.items()})
            found |= {f"optimizer.model.{name}.{state}": value for name, value in whole.items()}
        steps = {float(of["step"]) for of in states.values() if of}
        for step in steps:
            found |= {f"optimizer.model.{name}.step": torch.tensor(step) for name in self.trained}
        return found


class Ranges(Flat):
    def __init__(self, kind: Distributed) -> None:
        super().__init__(kind.model, kind.optimizer)
        self._kind = kind

    def parts(self) -> Iterator[Part]:
        for mine in self._kind.shards:
            yield Part(mine.name, tuple(mine.parameter.shape), mine.start, mine.main, mine.main)

    def stepped(self) -> list[Tensor]:
        return [mine.main for mine in self._kind.shards]

    def refresh(self) -> None:
        self._kind.gather()
