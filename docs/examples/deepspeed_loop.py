"""DeepSpeed over ckptd: a small language model learns the bytes of this file, its optimizer's state shared by ZeRO.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/deepspeed_loop.py 200        # or with the deepspeed launcher
Kill it whenever you like, and start it again with as many processes as you like; ZERO=3 is another stage.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from ckptd_client import Client, followed
from ckptd_client.integrations.deepspeed import attach
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW, BATCH = 16, 12


def main(steps):
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    data = TensorDataset(torch.stack([text[4 * i : 4 * i + WINDOW + 1] for i in range(10 * BATCH)]))
    mine = BATCH // dist.get_world_size()
    loader = followed(DataLoader(data, batch_size=mine, sampler=DistributedSampler(data)))
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": mine,
            "zero_optimization": {"stage": int(os.environ.get("ZERO", "2"))},
        },
    )
    with Client.connect(job=os.environ.get("JOB", "deepspeed-example")) as client:
        attach(engine, client, data=loader)
        client.restore()
        while engine.global_steps < steps:
            loader.sampler.set_epoch(engine.global_steps // len(loader))
            for (windows,) in loader:
                windows = windows.to(engine.device)
                logits = engine(windows[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
                engine.backward(loss)
                ends = engine.is_gradient_accumulation_boundary()
                engine.step()
                if ends:
                    client.snapshot(engine.global_steps, must=engine.global_steps == steps)
                loss = loss.detach() / dist.get_world_size()
                dist.all_reduce(loss)
                if dist.get_rank() == 0:
                    print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
                if engine.global_steps == steps:
                    break
        client.wait("durable")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[-1]))  # the deepspeed launcher puts --local_rank before it
