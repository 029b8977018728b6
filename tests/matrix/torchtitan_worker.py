"""torchtitan's containers and manager, called in the order in which its trainer calls them: that one wants a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client.integrations.torchtitan import CkptdCheckpointManager
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from tests.matrix.worker import SETTINGS, Counters, Windows, maybe_die, until_saved, wrote


class Part(nn.Module):
    """A stage of the model, with the names that its layers have in the whole."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            hidden = layer(hidden)
        return hidden


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    first, second, third = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 256)
    whole = [Part(embedding=first, middle=second, head=third)]
    found = whole if SETTINGS.get("parts", 1) == 1 else [Part(embedding=first, middle=second), Part(head=third)]
    for part in found:
        fully_shard(part)
    return list(found)


def optimizers(model_parts: list[nn.Module]) -> Any:
    """Two kinds of optimizer in one container."""
    groups = [
        ParamGroupConfig(pattern=r".*bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 3e-3}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
    ]
    return OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=model_parts)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model_parts, steps = parts(), SETTINGS.get("steps", 12)
    container = optimizers(model_parts)
    schedules = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=container, training_steps=steps)
    state, data = Counters(step=0, ntokens_seen=0), Windows()
    manager = CkptdCheckpointManager.Config(enable=True, job=SETTINGS["job"], **SETTINGS.get("config", {})).build(
        dataloader=None, model_parts=model_parts, optimizers=container, lr_schedulers=schedules, states={"train_state": state},
        sd_adapter=None, base_folder=SETTINGS["folder"],
    )  # fmt: skip
    try:
        loaded = manager.load(step=SETTINGS.get("load_step", -1))
        wrote("begins", step=state.step, loaded=loaded)
        while state.step < steps:
            container.zero_grad()
            mine = list(range(12 * state.step % 96, 12 * state.step % 96 + 12))[rank::world]
            tokens = torch.stack([data[number]["tokens"] for number in mine])
            hidden: torch.Tensor = tokens
            for part in model_parts:
                hidden = part(hidden)
            loss = nn.functional.cross_entropy(hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            manager.maybe_wait_for_staging()
            container.step()
            schedules.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            state.step += 1
            state.ntokens_seen += tokens.numel() * world
            rate, tokens_seen = schedules.schedulers[0].get_last_lr(), state.ntokens_seen
            wrote("seen", step=state.step, loss=total.item() / world, rate=rate, tokens=tokens_seen)
            manager.save(state.step, last_step=state.step == steps)
            if SETTINGS.get("durable"):
                until_saved(manager._client, state.step, "durable")
            maybe_die(manager._client, state.step)
        wrote("ends", step=state.step, exported=sorted(path.name for path in Path(SETTINGS["folder"]).glob("checkpoint/*")))
    finally:
        manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
