"""FSDP version 1: what it holds is told by its own full state dicts."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client
from ckptd_client.integrations.fsdp1 import attach
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimizer
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.matrix.kinds.spread import Data, Values, blocks

warnings.filterwarnings("ignore", category=FutureWarning)


class Fsdp1(Data):
    how_it_shards, originals = ShardingStrategy.FULL_SHARD, False

    def wrap(self) -> None:
        self.names = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}  # of a tied weight one
        policy = ModuleWrapPolicy({type(block) for block in blocks(self.model)})
        self.model = FullyShardedDataParallel(
            self.model, auto_wrap_policy=policy, use_orig_params=self.originals, sharding_strategy=self.how_it_shards,
            device_id=torch.device("cpu"),
        )  # fmt: skip

    def attach(self, client: Client) -> None:
        attach(self.model, self.optimizer, client)

    def held(self) -> Values:
        settings: Any = (FullStateDictConfig(rank0_only=False), FullOptimizer(rank0_only=False))
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *settings):
            model = self.model.state_dict()
            states = self.states(model)
        found = {f"model.{name}": value for name, value in model.items() if name in self.names}
        for name, state in states.items():
            found |= {f"optimizer.model.{name}.{key}": value for key, value in state.items()}
        return found

    def states(self, model: Values) -> dict[str, Values]:
        found: dict[str, Values] = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)["state"]
        return found


class Original(Fsdp1):
    how_it_shards, originals = ShardingStrategy.SHARD_GRAD_OP, True

    def states(self, model: Values) -> dict[str, Values]:
        """Ranks' parts one behind the other: of this torch's optim_state_dict() on a CPU, ``exp_avg`` is ``exp_avg_sq``."""
        mine = {clean_tensor_name(name): self.optimizer.state.get(p, {}) for name, p in self.model.named_parameters()}
        parts: list[dict[str, Values]] = [{} for _ in range(self.world)]
        dist.all_gather_object(parts, mine)
        found: dict[str, Values] = {}
        for name in mine if any(any(part.values()) for part in parts) else ():
            there = [part[name] for part in parts if part[name]]
            for key, value in there[0].items() if there else ():
                joined = torch.cat([state[key].flatten() for state in there]).view_as(model[name]) if value.ndim else value
                found.setdefault(name, {})[key] = joined
        return found
