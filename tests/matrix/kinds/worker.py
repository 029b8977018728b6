"""torchrun worker.py: cells of the matrix, one after the other, in processes that live as long as all of them."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client

from tests.matrix.kinds import spread
from tests.matrix.kinds.by_hand import ByHand
from tests.matrix.kinds.distributed import Distributed
from tests.matrix.kinds.fsdp1 import Fsdp1, Original
from tests.matrix.kinds.spread import Kind
from tests.matrix.kinds.zero import Zero1, Zero2, Zero3

ORDER: dict[str, Any] = json.loads(os.environ["ORDER"])
FOLDER = Path(ORDER["folder"])
KINDS: dict[str, type[Kind]] = {
    "plain": Kind, "DDP": spread.Data, "FSDP2": spread.Fsdp2, "HSDP": spread.Hsdp, "CP": spread.Context, "TP": spread.Tensors,
    "FSDP2xTP": spread.TensorsSharded, "PP": spread.Pipeline, "PPxFSDP2": spread.PipelineSharded, "EP": spread.Expert,
    "TP by rules": ByHand, "FSDP1": Fsdp1, "FSDP1 (use_orig_params)": Original, "ZeRO-1": Zero1, "ZeRO-2": Zero2, "ZeRO-3": Zero3,
    "Megatron's distributed optimizer": Distributed,
}  # fmt: skip
STEPS, AFTER = 2, 2
WAIT_S = 60.0
TIMEOUT = timedelta(seconds=90)


def connected(kind: Kind, job: str) -> Client:
    sockets = ORDER["sockets"]
    client = Client.connect(job=job, socket=Path(sockets[kind.rank * len(sockets) // kind.world]), required=True)
    kind.attach(client)
    return client


def saved(job: str, kind: Kind, level: str) -> dict[str, Any]:
    """Trains, snapshots, and goes on without: what the snapshot should hold, and the losses behind it."""
    with connected(kind, job) as client:
        assert client.restore() is None
        before = [kind.step(number) for number in range(1, STEPS + 1)]
        handle = client.snapshot(STEPS, must=True)
        assert handle.taken, handle.status
        values = kind.values()
        reached = client.wait(level, WAIT_S)
        assert reached in (level, "durable"), f"{reached}: {client.health().problems}"
        after = [kind.step(STEPS + number) for number in range(1, AFTER + 1)]
        client.close(finished=False)
    write(f"{job}.values", values)
    return {"before": before, "after": after, "how": kind.how}


def restored(job: str, kind: Kind, name: str, strict: bool) -> dict[str, Any]:
    """What came back, as this kind holds it, and the losses behind it."""
    with connected(kind, job) as client:
        step = client.restore(strict=strict)
        values = kind.values()
        told = client.last_restore
        after = [kind.step(STEPS + number) for number in range(1, AFTER + 1)]
        client.close(finished=False)
    write(f"{name}.values", values)
    return {"step": step, "after": after, "told": str(told)}


def write(name: str, values: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save({key: value.clone() for key, value in values.items()}, FOLDER / name)
    dist.barrier()


def run(cell: dict[str, Any]) -> dict[str, Any]:
    made: Callable[[int], Kind] = lambda seed: KINDS[cell["kind"]](cell["model"], seed)  # noqa: E731
    if cell["do"] == "save":
        return saved(cell["job"], made(1), cell["level"])
    return restored(cell["job"], made(2), cell["name"], cell["strict"])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = []
    for cell in ORDER["cells"]:
        try:
            found.append(run(cell))
        except Exception:
            found.append({"error": traceback.format_exc()})
            break  # the others of this launch may be in the middle of it
        gc.collect()
    (FOLDER / f"{ORDER['name']}.{dist.get_rank()}.json").write_text(json.dumps(found))
    if len(found) == len(ORDER["cells"]) and "error" not in found[-1]:
        dist.destroy_process_group()
    else:
        os._exit(1)


if __name__ == "__main__":
    main()
