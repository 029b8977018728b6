"""A loop of one's own with DeepSpeed over ckptd."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client, followed
from ckptd_client.integrations.deepspeed import attach
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.matrix.worker import SETTINGS, Counters, Windows, maybe_die, until_saved, wrote

os.environ.setdefault("DS_ACCELERATOR", "cpu")
BATCH = 12


class Told(nn.Module):
    """A frozen layer, a buffer, and dropout where a run is told of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.frozen = nn.Embedding(256, 16), nn.Linear(16, 17).requires_grad_(False)
        self.drop, self.head = nn.Dropout(SETTINGS.get("dropout", 0.0)), nn.Linear(17, 256)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.drop(torch.relu(self.frozen(self.words(tokens))))) * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class OldAdam(torch.optim.Optimizer):
    """It counts its steps by ints, as DeepSpeed's own do, and something from where it makes its state."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "count": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                state["count"] += 2
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
                rate = group["lr"] * (1 - 0.99 ** state["count"]) / (1 - 0.9 ** state["step"])
                p.sub_(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) * rate)


def config(world: int, accumulated: int) -> dict[str, Any]:
    zero = {"stage": SETTINGS["stage"], "stage3_param_persistence_threshold": 20, "sub_group_size": 2000}
    zero |= SETTINGS.get("zero", {})
    return {
        "train_batch_size": BATCH, "gradient_accumulation_steps": accumulated, "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": BATCH // accumulated // world, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 30}}, **SETTINGS.get("config", {}),
    }  # fmt: skip


def main() -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    world, accumulated = dist.get_world_size(), SETTINGS.get("accumulated", 1)
    model = Told()
    if SETTINGS.get("config", {}).get("bf16"):
        model.bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[at :: SETTINGS.get("groups", 1)]} for at in range(SETTINGS.get("groups", 1))]
    optimizer: Any = (OldAdam if SETTINGS.get("old") else torch.optim.AdamW)(groups, lr=1e-2)
    settings = config(world, accumulated)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    data = Windows()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=5)
    loader = followed(DataLoader(data, batch_size=BATCH // accumulated // world, sampler=sampler))
    progress = Counters(epoch=0)
    with Client.connect(job=SETTINGS["job"], required=True) as client:
        attach(engine, client, data=loader, progress=progress)
        client.restore()
        wrote("begins", step=engine.global_steps)
        while progress.epoch < 3:
            sampler.set_epoch(progress.epoch)
            for batch in loader:
                loss = engine(batch["tokens"])
                engine.backward(loss)
                ends = engine.is_gradient_accumulation_boundary()
                rate = engine.get_lr()
                engine.step()
                total = loss.detach().clone()
                dist.all_reduce(total)
                step = engine.global_steps + (not ends)
                row = {"loss": total.item() / world, "rate": rate}
                wrote("seen", step=step, epoch=progress.epoch, samples=batch["number"].tolist(), **row)
                if not ends and SETTINGS.get("amid"):
                    wrote("amid", status=client.snapshot(step, must=True).status)
                if ends:
                    client.snapshot(step)
                    maybe_die(client, step)
            progress.epoch += 1
        wrote("ends", step=engine.global_steps)
        until_saved(client, engine.global_steps, "durable" if SETTINGS.get("durable") else "sealed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
