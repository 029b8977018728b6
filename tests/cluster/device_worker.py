"""A training of one rank that is killed at a step, or goes on, or is left alone: what it computes must be the same, bit for bit.

python -m tests.cluster.device_worker SOCKET DEVICE HOW WHAT OUT      HOW: plain, scaler, sharded, graph; WHAT: alone, killed, again
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

STEPS, KILLED_AT = 24, 15
WIDTH, ROWS, WORDS = 128, 64, 512


class Rng:
    """Dropout's, of host and device."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def state_dict(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state() if self.kind == "cuda" else torch.zeros(1)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"].cpu())
        if self.kind == "cuda":
            torch.cuda.set_rng_state(state["device"].cpu())


class Training:
    def __init__(self, kind: str, how: str) -> None:
        torch.manual_seed(0)
        self.kind, self.how = kind, how
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WORDS)]
        self.model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers).to(kind)
        if how == "sharded":
            fully_shard(self.model)
        # As people write it on a device: fused, or made for a graph.
        options: dict[str, Any] = {"capturable": True} if how == "graph" else {"fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.scaler = torch.amp.GradScaler(kind, enabled=how == "scaler")
        self.words = torch.zeros(ROWS + 1, dtype=torch.long, device=kind)
        self.loss = torch.zeros((), device=kind)
        self.graph: Any = None

    def backward(self) -> Tensor:
        with torch.autocast(self.kind, dtype=torch.float16 if self.how == "scaler" else torch.bfloat16):
            loss: Tensor = functional.cross_entropy(self.model(self.words[:-1]).float(), self.words[1:])
        self.scaler.scale(loss).backward()
        return loss

    def captures(self, began: bool) -> None:
        """Three passes on another stream first, as torch's documentation says; they leave nothing behind."""
        kept = {key: value.clone() for key, value in self.model.state_dict().items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.backward()
                if not began:
                    self.optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        self.model.load_state_dict(kept)
        for value in [] if began else [value for state in self.optimizer.state.values() for value in state.values()]:
            value.zero_()
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.loss = self.backward()
            self.optimizer.step()

    def step(self, number: int) -> float:
        self.words.copy_(torch.randint(WORDS, (ROWS + 1,), generator=torch.Generator().manual_seed(number)))
        if self.graph is not None:
            torch.cuda.manual_seed(number)
            self.graph.replay()
            return self.loss.item()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def digest(self) -> str:
        found = hashlib.sha256()
        for key, value in sorted(self.model.state_dict().items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(key.encode() + whole.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def main(socket: str, kind: str, how: str, what: str, out: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if how == "sharded":
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    training, begun, losses = Training(kind, how), 0, {}
    client = None if what == "alone" else Client.connect(f"device-{how}", socket)
    if client is not None:
        extra = {"rng": Rng(kind), **({"scaler": training.scaler} if how == "scaler" else {})}
        client.register(model=training.model, optimizer=training.optimizer, extra=extra)
        begun = client.restore() or 0
    if how == "graph":
        training.captures(began=begun > 0)
    for step in range(begun + 1, STEPS + 1):
        losses[step] = training.step(step)
        if client is not None:
            client.snapshot(step, must=step in (KILLED_AT, STEPS))
        if step == KILLED_AT and what == "killed":
            assert client is not None
            client.wait("sealed", 60)
            os.kill(os.getpid(), signal.SIGKILL)
    problems = [] if client is None else client.health().problems
    ended = "" if client is None else client.wait("sealed", 60)
    newest = -1 if client is None else max(row["step"] for row in client.steps())
    told = {"losses": losses, "digest": training.digest(), "begun": begun, "ended": ended, "newest": newest, "problems": problems}
    Path(out).write_text(json.dumps(told))
    if client is not None:
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
