"""One rank of bench/pacing.py: DDP over gloo, told line by line over stdin what to do. Not started by hand.

A step is a pause that stands for an accelerator's computing (the host is idle then), a backward pass whose all-reduce takes the
link, and the optimizer. What a snapshot holds beside it is a tensor of this rank alone, as a shard of sharded training is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.request
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client, Handle
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GROUP_TIMEOUT_S = 600
SETTLE_TIMEOUT_S = 120.0


class Rank:
    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.order, self.rank = order, int(os.environ["RANK"])
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        torch.manual_seed(0)
        width = max(1, int((order["reduce_bytes"] / 4) ** 0.5))
        self.model = DistributedDataParallel(nn.Linear(width, width, bias=False), bucket_cap_mb=1 << 10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(4, width)
        self.client: Client | None = None
        self.newest: Handle | None = None  # of the snapshots that were taken
        self.at = 0
        if order["socket"]:
            self._connect()

    def _connect(self) -> None:
        self.client = Client.connect("bench", socket=self.order["socket"], required=True)
        shard = torch.randn(
            int(self.order["state_bytes"]) // 4, generator=torch.Generator().manual_seed(self.rank)
        )
        shards: dict[str, Any] = {f"shard{self.rank}": shard}
        self.client.register(fenced=True, **shards)
        self.client.restore()

    def step(self) -> None:
        self.at += 1
        time.sleep(self.order["compute_s"])
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        with self.client.communication() if self.client is not None else contextlib.nullcontext():
            loss.backward()
        self.optimizer.step()
        if self.client is not None:
            handle = self.client.snapshot(self.at)
            self.newest = handle if handle.taken else self.newest

    def block(self, warm: int, steps: int) -> dict[str, Any]:
        """Seconds of each step after the warm ones."""
        for _ in range(warm):
            self.step()
        times = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        return {"steps": [b - a for a, b in pairwise(times)], **self.state()}

    def settle(self) -> dict[str, Any]:
        """Nothing of ours moves any more: the other contenders have the link to themselves."""
        if self.newest is not None:
            self.newest.wait("protected", SETTLE_TIMEOUT_S)
        dist.barrier()
        return self.state()

    def state(self) -> dict[str, Any]:
        """Of pacing on this node."""
        if self.client is None:
            return {"pacing": {}}
        address = Path(self.order["socket"]).with_suffix(".http").read_text().strip()
        with urllib.request.urlopen(f"http://{address}/status", timeout=30) as answer:
            return {"pacing": json.loads(answer.read())["pacing"]}


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    rank = Rank(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        do = json.loads(line)
        answer = getattr(rank, do.pop("do"))(**do)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
