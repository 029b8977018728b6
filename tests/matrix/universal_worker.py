"""A loop with DeepSpeed that begins with a universal checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
BATCH, MORE = 12, 3


class Net(nn.Module):
    """A frozen layer and a buffer, which DeepSpeed does not load."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.frozen, self.second = nn.Linear(7, 13), nn.Linear(13, 13).requires_grad_(False), nn.Linear(13, 3)
        self.register_buffer("scale", torch.rand(13))

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.frozen(self.first(batch))) * self.scale)
        return found.square().mean()

    def groups(self, **second: Any) -> list[dict[str, Any]]:
        return [{"params": list(self.first.parameters())}, {"params": list(self.second.parameters()), **second}]


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step))


def losses(step: Any, steps: Iterator[int] | range) -> list[float]:
    return [step(number) for number in steps]


def main() -> None:
    import deepspeed

    from tests.matrix.worker import SETTINGS, leave, wrote

    deepspeed.init_distributed("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Net(1)
    stage = SETTINGS["stage"]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
    config = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // world, "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": True},
    }  # fmt: skip
    # In stage 3 DeepSpeed's loader gives one tensor, the step, to all of an engine's sub-groups, and each counts it up.
    groups = model.groups() if stage < 3 else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    _, client_state = engine.load_checkpoint(SETTINGS["universal"])
    with deepspeed.zero.GatheredParameters(list(model.frozen.parameters())):
        untouched = torch.equal(model.frozen.weight, Net(1).frozen.weight)
    stub = next(Path(SETTINGS["universal"]).glob("*/*_model_states.pt"))
    rest = torch.load(stub, weights_only=True)["module"]
    with deepspeed.zero.GatheredParameters(list(model.frozen.parameters()), modifier_rank=0), torch.no_grad():
        for name, value in rest.items():
            model.get_parameter(name).copy_(value) if name != "scale" else model.scale.copy_(value)
    found = []
    for number in range(SETTINGS["from"], SETTINGS["from"] + MORE):
        loss = engine(batch(number)[rank::world])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / world)
    told = {"steps": engine.global_steps, "rest": sorted(rest), "extra": client_state["extra"]["note"]}
    wrote("ends", losses=found, untouched=untouched, **told)
    leave()


if __name__ == "__main__":
    main()
