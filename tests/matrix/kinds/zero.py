"""ZeRO of DeepSpeed, stages 1 to 3: what it holds is told by DeepSpeed's own functions."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from ckptd_client import Client
from torch import Tensor

from tests.matrix.kinds.models import BATCH, loss_of
from tests.matrix.kinds.spread import Data, Values

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Zero1(Data):
    stage = 1

    def __init__(self, model: str, seed: int) -> None:
        super().__init__(model, seed)
        import deepspeed

        config = {
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // self.world, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage, "stage3_param_persistence_threshold": 100, "sub_group_size": 3000, "reduce_bucket_size": 5000,
                "allgather_bucket_size": 5000, "stage3_prefetch_bucket_size": 5000,
            },
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False)

    def wrap(self) -> None:
        pass

    def attach(self, client: Client) -> None:
        from ckptd_client.integrations.deepspeed import attach

        attach(self.engine, client)

    def step(self, number: int) -> float:
        loss = self.forward(number)
        self.engine.backward(loss)
        self.engine.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / self.world

    def forward(self, number: int) -> Tensor:
        mine = self.mine(number)
        return loss_of(self.engine(mine).logits, mine)

    def values(self) -> Values:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found: Values = {}
        steps = {float(state["step"]) for state in self.engine.optimizer.optimizer.state.values() if "step" in state}
        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter]):
                    found[f"model.{name}"] = parameter.detach().clone()
                continue
            found[f"model.{name}"] = safe_get_full_fp32_param(parameter).clone()
            if steps:
                (step,) = steps
                found[f"optimizer.model.{name}.step"] = torch.tensor(step)
            for state in ("exp_avg", "exp_avg_sq") if steps else ():
                found[f"optimizer.model.{name}.{state}"] = safe_get_full_optimizer_state(parameter, state).clone()
        return found


class Zero2(Zero1):
    stage = 2


class Zero3(Zero1):
    stage = 3
