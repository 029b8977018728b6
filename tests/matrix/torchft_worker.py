"""One replica group of torchft, whose peers heal it through ckptd."""

from __future__ import annotations

import hashlib
import os
import signal
from datetime import timedelta
from typing import Any

import torch
from ckptd_client import Client
from ckptd_client.integrations.torchft import CkptdTransport
from torch import nn
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from tests.matrix.worker import SETTINGS, wrote

TOGETHER = 10  # steps of both groups, before each ends
STEPS_MAX = 20_000
TIMEOUT = timedelta(seconds=10)  # a dead peer is waited for so long


class Told(CkptdTransport):
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        found = super().recv_checkpoint(src_rank, metadata, step, timeout)
        wrote("healed", step=step)
        return found


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    group = SETTINGS["group"]
    torch.manual_seed(group)  # torchft makes them equal at step 0
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 20))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    with Client.connect(job=SETTINGS["job"], required=True) as client:
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=1, replica_id=f"group_{group}", timeout=TIMEOUT,
            load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            lighthouse_addr=SETTINGS["lighthouse"], checkpoint_transport=Told(client), hostname="127.0.0.1",
        )  # fmt: skip
        wrapped, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, inner)
        seen: list[int] = []  # participants of each step
        while len(seen) < STEPS_MAX:
            torch.manual_seed(1000 * group + manager.current_step())
            optimizer.zero_grad()
            wrapped(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            seen.append(manager.num_participants())
            wrote("seen", step=manager.current_step(), together=seen[-1], digest=digest(model))
            if seen.count(2) == SETTINGS.get("dies_at"):  # the other group may have been making steps alone before it was there
                wrote("dies", step=manager.current_step())
                os.kill(os.getpid(), signal.SIGKILL)
            was_alone = SETTINGS.get("again", False) or (2 in seen and 1 in seen[seen.index(2) :])
            if was_alone and seen[-TOGETHER:] == [2] * TOGETHER:
                break
        wrote("ends", step=manager.current_step())
        manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
