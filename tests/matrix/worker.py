"""What the workers of all frameworks have in common: their settings, their data, what they write, their end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

SETTINGS: dict[str, Any] = json.loads(os.environ.get("WORKER", "{}"))
RANK = int(os.environ.get("RANK", "0"))
SAMPLES, WINDOW = 96, 8


def wrote(kind: str, **row: Any) -> None:
    with (Path(SETTINGS["folder"]) / f"rank-{RANK}").open("a") as out:
        out.write(json.dumps({"kind": kind, "rank": RANK, **row}) + "\n")


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Bytes of this file; each window with its number."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= SAMPLES:
            raise IndexError(number)
        return {"tokens": self.text[3 * number : 3 * number + WINDOW].clone(), "number": torch.tensor(number)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([Windows()[number] for number in range(SAMPLES)])


class Counters:
    def __init__(self, **counters: int) -> None:
        vars(self).update(counters)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def leave() -> None:
    """The end of a process with DeepSpeed, which keeps Gloo's threads beyond destroy_process_group(): one of them that lets go of a
    tensor while the interpreter ends aborts the process (pytorch PR 179291), once in hundreds of ends beside much other work."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def until_saved(client: Any, step: int, level: str) -> str:
    """Also where its snapshot was skipped."""
    if client.wait(level, 60).startswith("skipped"):
        client.snapshot(step, must=True)
    return str(client.wait(level, 60))


def maybe_die(client: Any, step: int) -> None:
    """Between this step's snapshot and the next step."""
    if step == SETTINGS.get("dies_at"):
        status = until_saved(client, step, "sealed")
        assert status in ("sealed", "protected", "durable"), status
        wrote("dies", step=step)
        os.kill(os.getpid(), signal.SIGKILL)
