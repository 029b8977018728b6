"""A loop of one's own with Accelerate over ckptd."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from ckptd_client import Client
from ckptd_client.integrations.accelerate import attach
from torch import nn
from torch.utils.data import DataLoader

from tests.matrix.worker import SETTINGS, Counters, Stream, Windows, maybe_die, until_saved, wrote


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(256, 16), nn.Dropout(0.2), nn.Linear(16, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.layers(tokens)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=SETTINGS.get("accumulated", 1),
        dataloader_config=DataLoaderConfiguration(**SETTINGS.get("loader", {})),
        project_config=ProjectConfiguration(total_limit=SETTINGS.get("total_limit")),
    )
    model = Told()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    torch.manual_seed(SETTINGS.get("seed", 5))
    data = Stream() if SETTINGS.get("stream") else Windows()
    loader = DataLoader(data, batch_size=SETTINGS.get("batch", 4), shuffle=not SETTINGS.get("stream"))
    rest = DataLoader(Windows(), batch_size=12)
    model, optimizer, schedule, loader, rest = accelerator.prepare(model, optimizer, schedule, loader, rest)
    counters = Counters(epoch=0, step=0)
    accelerator.register_for_checkpointing(counters)
    with Client.connect(job=SETTINGS["job"], required=True) as client:
        saves = attach(accelerator, client)
        saved = SETTINGS.get("saved", [])
        client.restore()
        wrote("begins", step=counters.step)
        losses = []
        while counters.epoch < SETTINGS.get("epochs", 3):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch["tokens"])
                    accelerator.backward(loss)
                    numbers = batch["number"].tolist()
                    wrote("seen", step=counters.step + 1, epoch=counters.epoch, samples=numbers, loss=loss.item())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    counters.step += 1
                    if counters.step in saved:
                        saves.save(counters.step)
                        client.wait("durable")
                    client.snapshot(counters.step)
                    maybe_die(client, counters.step)
            model.eval()
            with torch.no_grad():
                losses.append([model(batch["tokens"]).item() for batch in rest])
            model.train()
            counters.epoch += 1
        wrote("ends", step=counters.step, losses=losses[-1:])
        until_saved(client, counters.step, "durable")
        saves.finish()
    accelerator.end_training()


if __name__ == "__main__":
    main()
