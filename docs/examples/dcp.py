"""FSDP2 with torch.distributed.checkpoint over ckptd: a small language model of bytes, on this very file.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/dcp.py 200
Kill it whenever you like, and start it again with as many ranks as you like: it goes on at the newest saved step.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckptd_client import Client
from ckptd_client.integrations.dcp import CkptdStorageReader, CkptdStorageWriter
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

EVERY, WINDOW, BATCH = 5, 16, 12


def batch(text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same one for a step, whatever the number of ranks; each rank takes its part of it."""
    starts = torch.randint(0, len(text) - WINDOW - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[start : start + WINDOW + 1] for start in starts])
    mine = windows.tensor_split(dist.get_world_size())[dist.get_rank()]
    return mine[:, :-1], mine[:, 1:]


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    beside = dist.new_group(backend="gloo")  # saves speak to each other while training does
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Client.connect(job=os.environ.get("JOB", "dcp-example")) as client:
        step, saving = 0, None
        if client.open() is not None:
            parameters, states = get_state_dict(model, optimizer)
            state = {"model": parameters, "optimizer": states, "step": 0}
            dcp.load(state, storage_reader=CkptdStorageReader(client))
            set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
            step = state["step"]
        while step < steps:
            inputs, targets = batch(text, step)
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            total = loss.detach()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step {step} loss {total.item() / dist.get_world_size():.4f}", flush=True)
            if step % EVERY == 0:
                if saving is not None:
                    saving.result()  # the one before; raises why it failed
                parameters, states = get_state_dict(model, optimizer)
                state = {"model": parameters, "optimizer": states, "step": step}
                writer = CkptdStorageWriter(client, step, level="sealed")
                saving = dcp.async_save(state, storage_writer=writer, process_group=beside)
        if saving is not None:
            saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
