"""A worker for torchrun's elastic mode: trains with a snapshot per step, until it has reached STEPS in a world of WORLD.

``elastic_worker.py JOB STEPS WORLD``; one JSON line per event on stdout.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from ckptd_client import Client
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 64


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    job, steps, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)))
    assert init_device_mesh("cpu", (world,)).size() == world
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Client.connect(job=job) as client:
        client.register(model=model, optimizer=optimizer)
        step = client.restore() or 0
        seen = (client.last_restore or {}).get("bytes")
        say(event="restored", rank=rank, world=world, step=step, pid=os.getpid(), bytes=seen)
        while step < steps or world != wanted:
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            status = client.snapshot(step).status
            if step % 20 == 0:
                say(event="step", rank=rank, world=world, step=step, status=status)
    say(event="done", rank=rank, world=world, step=step)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may outlive the interpreter, and then abort a process that did all it had to


if __name__ == "__main__":
    main()
