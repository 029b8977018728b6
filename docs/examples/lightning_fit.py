"""Lightning over ckptd: a small language model learns the bytes of this file.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/lightning_fit.py 200
Kill it whenever you like, and start it again with as many processes as you like.
"""

import os
import sys
from pathlib import Path

import torch
from ckptd_client import Client
from ckptd_client.integrations.lightning import CkptdCallback
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW, BATCH = 16, 12


class Bytes(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))

    def training_step(self, batch, index):
        (windows,) = batch
        logits = self.layers(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.trainer.print(f"step {self.global_step + 1} loss {mean.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(steps):
    seed_everything(0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    data = TensorDataset(torch.stack([text[4 * i : 4 * i + WINDOW + 1] for i in range(10 * BATCH)]))
    # The same order in any world: what Lightning puts in by itself is another sampler for several processes than for one.
    loader = DataLoader(data, batch_size=BATCH // world, sampler=DistributedSampler(data, world, int(os.environ.get("RANK", "0"))))
    with Client.connect(job=os.environ.get("JOB", "lightning-example")) as client:
        trainer = Trainer(
            devices=world, max_steps=steps, callbacks=[CkptdCallback(client)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(Bytes(), loader)


if __name__ == "__main__":
    main(int(sys.argv[1]))
