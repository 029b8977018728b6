"""What trainer.py of the kind ``explicit`` does for test_dcp_own.py: saves and loads as DCP's own tests make them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckptd_client import Client
from ckptd_client.integrations.dcp import CkptdStorageReader, CkptdStorageWriter
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.cluster.dcp import rank

SHAPES = ((7, 5), (1, 3), (4,), (5, 1, 3))  # of which two ranks share some unevenly, and one has nothing of some
Placements = list[str]


def save(client: Client, state: dict[str, Any], step: int | None, **how: Any) -> None:
    """Raises RuntimeError for DCP's exception, which is no Exception."""
    try:
        dcp.save(state, storage_writer=CkptdStorageWriter(client, step, level="protected", timeout=60.0), **how)
    except CheckpointException as error:
        raise RuntimeError(str(error)) from None


def load(client: Client, state: dict[str, Any], step: int | None = None, **how: Any) -> int | None:
    reader = CkptdStorageReader(client, step)
    try:
        dcp.load(state, storage_reader=reader, **how)
    except CheckpointException as error:
        raise RuntimeError(str(error)) from None
    return reader.found


# --- placements -------------------------------------------------------------------------------------------------
def whole(at: int, step: int) -> Tensor:
    shape = SHAPES[at]
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * at + step


def placed(step: int, way: Placements, fill: bool) -> dict[str, Any]:
    """way: "r", "0" (sharded in that dimension) for each dimension of the mesh of all ranks, which is as square as can be; of a
    tensor without such a dimension the last one is meant. "t": ShardedTensor, in rows."""
    found = {f"t{at}": whole(at, step) if fill else torch.full(SHAPES[at], -1.0) for at in range(len(SHAPES))}
    if way == ["t"]:
        return {key: in_rows(value) for key, value in found.items()}
    if not dist.is_initialized():
        return found
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,) if len(way) == 1 else (2, world // 2))
    return {key: distribute_tensor(value, mesh, kinds(way, value)) for key, value in found.items()}


def kinds(way: Placements, value: Tensor) -> list[Any]:
    return [Replicate() if one == "r" else Shard(min(int(one), value.dim() - 1)) for one in way]


def in_rows(value: Tensor) -> Any:
    """Each rank has one row more than the rank before it could divide; the last one the rest."""
    rank_, world = rank(), dist.get_world_size()
    cuts = [len(value) * at // world for at in range(world + 1)]
    offsets = [cuts[rank_], *[0] * (value.dim() - 1)]
    part = value[cuts[rank_] : cuts[rank_ + 1]].clone()
    shards = [sharded_tensor.Shard.from_tensor_and_offsets(part, offsets, rank_)] if len(part) else []
    return sharded_tensor.init_from_local_shards(shards, *value.shape)


def plain(value: Any) -> Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, sharded_tensor.ShardedTensor):
        return value
    out = torch.full(tuple(value.size()), 0.0)
    for shard in value.local_shards():
        at = shard.metadata.shard_offsets[0]
        out[at : at + len(shard.tensor)] = shard.tensor
    dist.all_reduce(out)
    return out


def save_placed(client: Client, step: int, way: Placements) -> None:
    save(client, placed(step, way, True), step)


def load_placed(client: Client, step: int, way: Placements) -> bool:
    found = placed(step, way, False)
    assert load(client, found) == step
    return all(torch.equal(plain(found[f"t{at}"]), whole(at, step)) for at in range(len(SHAPES)))


# --- objects ----------------------------------------------------------------------------------------------------
def objects(fill: bool) -> dict[str, Any]:
    """Of each kind, under names that a path could be mistaken for; what only one rank has; another order on each rank."""
    mine = rank()
    found = {
        "bytes": b"\0\xff" * 300_000, "none": None, "pair": (1, "two"), "text": "", "a": {"b": {"c": [1.5, {"d": True}]}},
        "a.b": "x", "grüße/..": torch.arange(3.0), "tensors": [torch.ones(2), {"t": torch.tensor(7)}], f"only {mine}": mine,
        "complex": torch.tensor([1 + 2j]), "flags": torch.tensor([True, False]),
        "halves": torch.tensor([1.5], dtype=torch.float16), "view": torch.arange(12.0).view(3, 4).t()[1:3],
    }  # fmt: skip
    if not fill:
        found = emptied(found)
    return dict(sorted(found.items(), key=repr, reverse=mine % 2 == 1))


def emptied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    return [emptied(each) for each in value] if isinstance(value, list) else 0


def save_objects(client: Client, step: int) -> None:
    save(client, objects(True), step)


def load_objects(client: Client) -> dict[str, str]:
    """What differs."""
    found, expected = objects(False), objects(True)
    load(client, found)
    told = {key: f"{found[key]!r:.300} is not {expected[key]!r:.300}" for key in expected}
    return {key: text for key, text in told.items() if repr(found[key]) != repr(expected[key])}


# --- a part, and other shapes -----------------------------------------------------------------------------------
def load_part(client: Client, partial: bool = False, taller: int = 0, missing: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"t0": torch.zeros(7 + taller, 5)}
    if missing:
        found["nobody"] = torch.full((2,), -3.0)
    load(client, found, planner=DefaultLoadPlanner(allow_partial_load=partial))
    return {key: value.flatten()[:2].tolist() for key, value in found.items()}


# --- faults -----------------------------------------------------------------------------------------------------
class Fault(RuntimeError):
    pass


class Faulty:
    """What a planner does at ``where`` raises. Before a planner of torch's among the bases."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def _fault(self, where: str) -> None:
        if where == self._where:
            raise Fault(f"fault in {where}")


class FaultySave(Faulty, DefaultSavePlanner):
    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._fault("set_up")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self._fault("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        self._fault("global")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self._fault("resolve")
        return super().resolve_data(write_item)


class FaultyLoad(Faulty, DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        self._fault("local")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self._fault("global")
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._fault("bytes")
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self._fault("resolve")
        found: Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._fault("commit")


def faulty(fill: float) -> dict[str, Any]:
    """Rows of each rank, and an object."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"rows": distribute_tensor(torch.full((5, 2), fill), mesh, [Shard(0)]), "object": f"{fill}"}


def save_faulty(client: Client, step: int, where: str, on: int) -> None:
    save(client, faulty(float(step)), step, planner=FaultySave(where if rank() == on else ""))


def load_faulty(client: Client, where: str, on: int) -> Any:
    found = faulty(-1.0)
    load(client, found, planner=FaultyLoad(where if rank() == on else ""))
    return [found["rows"].full_tensor().flatten().tolist()[-1], found["object"]]


# --- checkpoint_id ----------------------------------------------------------------------------------------------
def by_id(client: Client, ids: list[str], step: int | None = None) -> list[int | None]:
    """One writer and one reader for all of them; as Path where there is a slash."""
    writer, reader, found = CkptdStorageWriter(client, step, level="protected"), CkptdStorageReader(client), []
    for name in ids:
        form = Path(name) if "/" in name else name
        dcp.save({"t": torch.ones(3)}, checkpoint_id=form, storage_writer=writer)
        dcp.load({"t": torch.zeros(3)}, checkpoint_id=None if step is not None else form, storage_reader=reader)
        found.append(reader.found)
    return found


def save_by_id(client: Client, name: str) -> None:
    save(client, {"t": torch.ones(3)}, None, checkpoint_id=name)


# --- plans that are kept ----------------------------------------------------------------------------------------
def save_cached(client: Client, steps: list[int]) -> None:
    for step in steps:
        save(client, faulty(float(step)), step, planner=DefaultSavePlanner(enable_plan_caching=True))


# --- models -----------------------------------------------------------------------------------------------------
class Trained:
    """A model and its optimizer, as DCP's tutorial has them: with a state_dict() of their own. kind: plain, ddp, fsdp, hsdp."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif kind in ("fsdp", "hsdp"):
            shape = (dist.get_world_size(),) if kind == "fsdp" else (dist.get_world_size(), 1)
            fully_shard(self.model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)
        self.options = StateDictOptions(**options)

    def train(self, steps: int) -> float:
        for step in range(steps):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss = self.model(inputs).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=self.options
        )


def train(client: Client, kind: str, step: int, options: dict[str, Any]) -> float:
    """Three steps, a save, and two steps more: the loss then."""
    trained = Trained(kind, options)
    trained.train(3)
    save(client, {"app": trained}, step)
    return trained.train(2)


def go_on(client: Client, kind: str, options: dict[str, Any]) -> float:
    """Another model, which has stepped as well, and the two steps behind a load."""
    trained = Trained(kind, options)
    trained.train(1)
    load(client, {"app": trained})
    return trained.train(2)
