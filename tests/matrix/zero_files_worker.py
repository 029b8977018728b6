"""Trains three steps with DeepSpeed and saves its own checkpoint: zero_files_worker.py STAGE HALF FOLDER, under torchrun."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
TAG = "global_step3"
BATCH = 6


class Net(nn.Module):
    """Sizes that no number of ranks divides, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = nn.Linear(5, 7), nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.last(self.frozen(torch.relu(self.first(values)))) * self.scale).square().mean()


def two_groups(net: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.5}], lr=1e-2)


def main(stage: int, half: bool, folder: str) -> None:
    import deepspeed

    from tests.matrix.worker import leave

    deepspeed.init_distributed("gloo")
    net = Net().bfloat16() if half else Net()
    config = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(), "bf16": {"enabled": half},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 20},
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=two_groups(net), config=config, dist_init_required=False)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        values = torch.randn(BATCH // dist.get_world_size(), 5)
        engine.backward(engine(values.bfloat16() if half else values))
        engine.step()
    engine.save_checkpoint(folder, tag=TAG, client_state={"mine": [1, 2]})
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "half", sys.argv[3])
