"""Kinds of parallelism: a model spread over all ranks, trained there, and what it holds in whole, told by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client, numbered, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.matrix.kinds.fused import Fused
from tests.matrix.kinds.models import LAYERS, adapted, llama, loss_of, mixture, sparse, tied, tokens

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": llama, "tied": tied, "mixture": mixture, "adapted": adapted, "sparse": sparse, "fused": Fused,
}  # fmt: skip
MICROBATCHES = 6
Values = dict[str, Tensor]  # key, as register(model=, optimizer=) of the whole model in one process calls it -> all of it


class Kind:
    """One process with all of it. Others cut the model, or the batch, or both."""

    how = "trained"

    def __init__(self, model: str, seed: int) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.shares, self.share = 1, 0  # of the batch
        self.spread(MODELS[model], seed)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=False)  # foreach mixes no plain tensors with DTensors

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        self.model: Any = make(seed)

    def registered(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def attach(self, client: Client) -> None:
        client.register(**self.registered())

    def mine(self, number: int) -> Tensor:
        """Of this step's batch."""
        return tokens(number).chunk(self.shares)[self.share]

    def step(self, number: int) -> float:
        """Trains on this step's batch. The loss of all of it, before the step."""
        loss = self.backward(self.mine(number))
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        return loss.item() / self.world

    def backward(self, mine: Tensor) -> Tensor:
        found = self.model(mine)
        loss = loss_of(getattr(found, "logits", found), mine)
        loss.backward()
        return loss.detach().clone()

    def values(self) -> Values:
        """On every rank."""
        return {key: whole(value) for key, value in self.held().items()}

    def held(self) -> Values:
        """What this rank has, of each key."""
        model = getattr(self.model, "module", self.model)
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # of a tied weight the first alone
        found = {f"model.{name}": value.detach() for name, value in model.state_dict().items() if name in names}
        for name, parameter in model.named_parameters():
            for state, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.model.{name}.{state}"] = value
        return found


def whole(value: Tensor) -> Tensor:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


class Data(Kind):
    """Ranks that share the batch among them."""

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        self.shares, self.share = self.world, self.rank
        self.model = make(seed)
        self.wrap()

    def wrap(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(self.model)


def blocks(model: Any) -> list[nn.Module]:
    """What is sharded by itself."""
    inner = getattr(model, "model", None) or getattr(model, "transformer", model)
    layers = getattr(inner, "layers", None) or getattr(inner, "h", None)
    return list(layers) if layers is not None else []


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Fsdp2(Data):
    def wrap(self) -> None:
        sharded(self.model, init_device_mesh("cpu", (self.world,)))


class Hsdp(Data):
    def wrap(self) -> None:
        copies = 3 if self.world == 3 else 2 - self.world % 2
        mesh = init_device_mesh("cpu", (copies, self.world // copies), mesh_dim_names=("replicate", "shard"))
        sharded(self.model, mesh)


class Context(Data):
    """The mesh of a run with context parallelism, whose ``cp`` belongs to what FSDP shards over. Its attention has no CPU
    kernels, so sequences are whole and the ranks share the batch."""

    how = "state only"

    def wrap(self) -> None:
        several = 2 - self.world % 2
        mesh = init_device_mesh("cpu", (self.world // several, several), mesh_dim_names=("dp", "cp"))
        sharded(self.model, mesh["dp", "cp"]._flatten("dp_cp"))


def tensor_parallel(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        column, row = ColwiseParallel(use_local_output=False), RowwiseParallel()  # 50 rows: a rank's own are not a part like all
        heads = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": row}
        parallelize_module(layer, mesh, {**heads, "mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row})


class Tensors(Kind):
    """Tensor parallelism: all ranks see the whole batch."""

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        self.model = make(seed)
        tensor_parallel(self.model, init_device_mesh("cpu", (self.world,)))


class TensorsSharded(Kind):
    """FSDP2 over what tensor parallelism has cut."""

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("dp", "tp"))
        self.shares, self.share = self.world // 2, mesh["dp"].get_local_rank()
        self.model = make(seed)
        tensor_parallel(self.model, mesh["tp"])
        sharded(self.model, mesh["dp"])


class Stage(nn.Module):
    """Layers first to last of a Llama, under the names that a stage gives them: from 0 on."""

    def __init__(self, whole_model: Any, first: int, last: int) -> None:
        super().__init__()
        self.model, self.first = whole_model.model, first
        self.model.layers = self.model.layers[first:last]
        self.lm_head = whole_model.lm_head if last == LAYERS else None
        if first:
            self.model.embed_tokens = None
        if last < LAYERS:
            self.model.norm = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.model.embed_tokens is None else self.model.embed_tokens(x)
        length = hidden.shape[1]
        places = torch.arange(length).unsqueeze(0)
        rotary = self.model.rotary_emb(hidden, places)
        mask = torch.full((1, 1, length, length), torch.finfo(hidden.dtype).min).triu(1)
        for layer in self.model.layers:
            found = layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rotary)
            hidden = found[0] if isinstance(found, tuple) else found
        return hidden if self.lm_head is None else self.lm_head(self.model.norm(hidden))


class Pipeline(Kind):
    """1F1B. Each stage calls its layers 0, 1, ... and says which they are by ``numbered``."""

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        self.cut(make(seed), dist.group.WORLD, self.world, self.rank)

    def cut(self, model: nn.Module, group: Any, stages: int, at: int) -> None:
        bounds = [LAYERS * number // stages for number in range(stages + 1)]
        self.model = Stage(model, bounds[at], bounds[at + 1])
        self.wrap()
        self.last = at == stages - 1
        stage = PipelineStage(self.model, at, stages, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        self.stages, self.at = stages, at

    def wrap(self) -> None:
        pass

    def registered(self) -> dict[str, Any]:
        return {**super().registered(), "key_map": numbered("model.model.layers.{}", self.model.first)}

    def backward(self, mine: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (mine,) if self.at == 0 else ()
        self.schedule.step(*inputs, target=mine if self.last else None, losses=losses if self.last else None)
        return torch.stack(losses).mean().detach() * self.stages if self.last else torch.zeros(())

    def values(self) -> Values:
        mine = {key: whole(value) for key, value in super().held().items()}
        rename = numbered("model.model.layers.{}", self.model.first)
        mine = {rename(key): value for key, value in mine.items()}
        parts: list[Values] = [{} for _ in range(self.world)]
        dist.all_gather_object(parts, mine)
        return {key: value for part in parts for key, value in part.items()}


class PipelineSharded(Pipeline):
    """Two ranks of FSDP2 for each stage."""

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        self.mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("pp", "dp"))
        self.shares, self.share = 2, self.mesh["dp"].get_local_rank()
        self.cut(make(seed), self.mesh["pp"].get_group(), self.world // 2, self.mesh["pp"].get_local_rank())

    def wrap(self) -> None:
        sharded(self.model, self.mesh["dp"])


class Expert(Kind):
    """Each rank has some of the experts, and a copy of the rest."""

    def spread(self, make: Callable[[int], nn.Module], seed: int) -> None:
        self.shares, self.share = self.world, self.rank
        self.mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("ep",))
        self.model = sparse(seed, self.mesh["ep"].get_group())

    def registered(self) -> dict[str, Any]:
        rules = {"*experts.up": shard(0, over="ep"), "*experts.down": shard(0, over="ep")}
        return {**super().registered(), "rules": rules, "mesh": self.mesh}

    def backward(self, mine: Tensor) -> Tensor:
        loss = super().backward(mine)
        for name, parameter in self.model.named_parameters():
            if not self.is_cut(name):
                dist.all_reduce(parameter.grad)
            parameter.grad /= self.world
        return loss

    @staticmethod
    def is_cut(key: str) -> bool:
        return ".up" in key or ".down" in key

    def values(self) -> Values:
        return {key: self.joined(value) if self.is_cut(key) and value.ndim else value.clone() for key, value in self.held().items()}

    def joined(self, value: Tensor) -> Tensor:
        parts = [torch.empty_like(value) for _ in range(self.world)]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)
