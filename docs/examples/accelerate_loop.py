"""Accelerate over ckptd: a small language model learns the bytes of this file.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/accelerate_loop.py 200
Kill it whenever you like, and start it again with as many processes as you like.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from ckptd_client import Client
from ckptd_client.integrations.accelerate import attach
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW, BATCH = 16, 12


def main(steps):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    data = TensorDataset(torch.stack([text[4 * i : 4 * i + WINDOW + 1] for i in range(10 * BATCH)]))
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with Client.connect(job=os.environ.get("JOB", "accelerate-example")) as client:
        attach(accelerator, client)
        step = client.restore() or 0
        while step < steps:
            for (windows,) in loader:
                logits = model(windows[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                client.snapshot(step, must=step == steps)
                accelerator.print(f"step {step} loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}", flush=True)
                if step == steps:
                    break
        client.wait("durable")
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]))
