"""A loop of one's own with Lightning Fabric over ckptd."""

from __future__ import annotations

import os
from typing import Any

import torch
from ckptd_client import Client
from ckptd_client.integrations.lightning_fabric import attach
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.matrix.accelerate_worker import Told
from tests.matrix.worker import SETTINGS, Counters, Stream, Windows, maybe_die, wrote


def sharded(model: Any, mesh: Any) -> Any:
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    strategy: Any = "auto"
    if SETTINGS.get("strategy") == "fsdp2":
        strategy = ModelParallelStrategy(parallelize_fn=sharded)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    model = fabric.setup(Told())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(SETTINGS.get("seed", 5))
    data: Any = Stream() if SETTINGS.get("stream") else Windows()
    batch, accumulated = SETTINGS.get("batch", 4), SETTINGS.get("accumulated", 1)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=batch, shuffle=not SETTINGS.get("stream")))
    counters = Counters(epoch=0, step=0, batches=0)
    with Client.connect(job=SETTINGS["job"], required=True) as client:
        attach(fabric, client, model=model, optimizer=optimizer, data=loader, counters=counters)
        client.restore()
        wrote("begins", step=counters.step)
        while counters.epoch < SETTINGS.get("epochs", 3):
            for found in loader:
                counters.batches += 1
                ends = counters.batches % accumulated == 0
                with fabric.no_backward_sync(model, enabled=not ends and fabric.world_size > 1 and "strategy" not in SETTINGS):
                    loss = model(found["tokens"])
                    fabric.backward(loss / accumulated)
                row = {"samples": found["number"].tolist(), "loss": loss.item()}
                wrote("seen", step=counters.step + 1, epoch=counters.epoch, **row)
                if ends:
                    optimizer.step()
                    optimizer.zero_grad()
                    counters.step += 1
                    client.snapshot(counters.step)
                    maybe_die(client, counters.step)
            counters.epoch += 1
        wrote("ends", step=counters.step)


if __name__ == "__main__":
    main()
