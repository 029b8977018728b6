"""FSDP1 (FullyShardedDataParallel) over ckptd: a small language model learns the bytes of this file.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/fsdp1_loop.py 200
Kill it whenever you like, and start it again with as many processes as you like.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ckptd_client import Client, followed
from ckptd_client.integrations.fsdp1 import attach
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW, BATCH = 16, 12


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(steps):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    data = TensorDataset(torch.stack([text[4 * i : 4 * i + WINDOW + 1] for i in range(10 * BATCH)]))
    loader = followed(DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=DistributedSampler(data)))
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256)).to(device)
    model = FullyShardedDataParallel(model, device_id=device)
    optimizer, progress = torch.optim.AdamW(model.parameters(), lr=1e-2), Progress()
    with Client.connect(job=os.environ.get("JOB", "fsdp1-example")) as client:
        attach(model, optimizer, client, data=loader, progress=progress)
        client.restore()
        while progress.step < steps:
            loader.sampler.set_epoch(progress.step // len(loader))
            for (windows,) in loader:
                windows = windows.to(device)
                logits = model(windows[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                client.snapshot(progress.step, must=progress.step == steps)
                loss = loss.detach() / dist.get_world_size()
                dist.all_reduce(loss)
                if dist.get_rank() == 0:
                    print(f"step {progress.step} loss {loss.item():.4f}", flush=True)
                if progress.step == steps:
                    break
        client.wait("durable")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
