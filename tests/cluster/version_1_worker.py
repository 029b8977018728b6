"""A rank of a small sharded run: wrote ``version_1_data`` under commit d476889, whose format version was 1, and restores it.

    python version_1_worker.py save|restore    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and CKPTD_SOCKET are set

It says on stdout what the state is, by name.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from ckptd_client import Client
from torch import nn
from torch.distributed.fsdp import fully_shard

JOB, STEPS = "version-1", 3


class Loader:
    """What is not a tensor, and each rank's own."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def main(do: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Linear(10, 4, bias=False))
    fully_shard(model)
    optimizer, loader = torch.optim.AdamW(model.parameters(), lr=0.01), Loader()
    with Client.connect(job=JOB) as client:
        client.register(model=model, optimizer=optimizer, extra={"loader": loader})
        step = client.restore() or 0
        assert step == (STEPS if do == "restore" else 0), step
        torch.manual_seed(7 + rank)  # each rank has other batches, so other running means
        while step < STEPS:
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().sum().backward()
            optimizer.step()
            loader.at += 1 + rank
            step += 1
        client.snapshot(step + (do == "restore"), must=True)
        client.wait(level="durable")
    print(f"loader {loader.at}")
    for name, value in (*model.state_dict().items(), *states(model, optimizer)):
        local = value.to_local() if hasattr(value, "to_local") else value
        print(name, hashlib.sha256(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Of the optimizer, by parameter."""
    return [
        (f"{name}.{key}", value)
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state[parameter].items())
    ]


if __name__ == "__main__":
    main(sys.argv[1])
