"""Lightning Fabric over ckptd: a small language model learns the bytes of this file.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/fabric_loop.py 200
Kill it whenever you like, and start it again with as many processes as you like.
"""

import os
import sys
from pathlib import Path

import torch
from ckptd_client import Client
from ckptd_client.integrations.lightning_fabric import attach
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW, BATCH = 16, 12


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(steps):
    fabric = Fabric(accelerator="auto" if torch.cuda.is_available() else "cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    data = TensorDataset(torch.stack([text[4 * i : 4 * i + WINDOW + 1] for i in range(10 * BATCH)]))
    sampler = DistributedSampler(data, num_replicas=fabric.world_size, rank=fabric.global_rank)
    loader = DataLoader(data, batch_size=BATCH // fabric.world_size, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    progress = Progress()
    with Client.connect(job=os.environ.get("JOB", "fabric-example")) as client:
        attach(fabric, client, model=model, optimizer=optimizer, data=loader, progress=progress)
        client.restore()
        while progress.step < steps:
            for (windows,) in loader:
                logits = model(windows[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                client.snapshot(progress.step, must=progress.step == steps)
                fabric.print(f"step {progress.step} loss {fabric.all_reduce(loss.detach()).item():.4f}", flush=True)
                if progress.step == steps:
                    break
        client.wait("durable")


if __name__ == "__main__":
    main(int(sys.argv[1]))
