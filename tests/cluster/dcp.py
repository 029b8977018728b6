"""What trainer.py of the kind ``dcp`` does: torch's own save and load, over tensors whose values say where they lie."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckptd_client import Client
from ckptd_client.integrations.dcp import CkptdStorageReader, CkptdStorageWriter
from ckptd_client.integrations.dcp_staging import CkptdStagingWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

PLACEMENTS = {"row": Shard(0), "column": Shard(1), "copy": Replicate()}
TENSOR_MB = 40  # beyond 32 glibc gives back what was freed, and all that is allocated is seen
ROWS, COLUMNS = 7, 9  # which two and three ranks share unevenly


def state(step: int, way: str, fill: bool) -> dict[str, Any]:
    """way: how the matrix is placed."""
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + step if fill else torch.full((ROWS, COLUMNS), -1.0)
    matrix = whole
    if dist.is_initialized():
        matrix = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [PLACEMENTS[way]])
    return {
        "model": {"matrix": matrix, "half": whole.bfloat16() if fill else torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)},
        "empty": torch.empty(0, 3), "number": torch.tensor(float(step) if fill else -1.0),
        "nested": {"list": [step, {"lr": 0.1 * step}] if fill else [0, {"lr": 0.0}]},
        "rank": f"rank {dist.get_rank()}" if fill and dist.is_initialized() else "",
    }  # fmt: skip


def save(client: Client, step: int, way: str = "row", how: str = "save", **options: Any) -> None:
    """Raises RuntimeError for DCP's exception, which is no Exception."""
    try:
        _save(client, step, way, how, options)
    except CheckpointException as error:
        raise RuntimeError(str(error)) from None


def _save(client: Client, step: int, way: str, how: str, options: dict[str, Any]) -> None:
    found = state(step, way, True)
    if options.pop("part", False):
        options["process_group"] = dist.new_group([0])
        if dist.get_rank() != 0:
            return
    level, name, timeout = options.pop("level", "protected"), options.pop("name", None), options.pop("timeout", 60.0)
    writer = CkptdStorageWriter(client, step, level=level, name=name, timeout=timeout)
    if how.startswith("staged"):
        hold_s = options.pop("hold_s", 60.0)
        writer = CkptdStagingWriter(client, step, level=level, name=name, timeout=timeout, hold_timeout=hold_s)
    if how == "save":
        dcp.save(found, storage_writer=writer, **options)
        return
    if options.pop("fails", -1) == rank():
        options["planner"] = Failing()
    kind = AsyncCheckpointerType.PROCESS if how.endswith("process") else AsyncCheckpointerType.THREAD
    began = time.monotonic()
    future: Any = dcp.async_save(found, storage_writer=writer, async_checkpointer_type=kind, **options)
    returned_s = time.monotonic() - began
    spoil(found)
    try:
        future.result()
    except (Exception, CheckpointException) as error:
        raise RuntimeError(f"async_save returned after {returned_s:.1f} s: {error}") from None


class Failing(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise ValueError("this planner has no plan")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def spoil(found: Any) -> None:
    """Training goes on."""
    for key, value in list(found.items() if isinstance(found, dict) else enumerate(found)):
        if isinstance(value, torch.Tensor):
            (value.to_local() if isinstance(value, DTensor) else value).fill_(99.0)
        elif isinstance(value, dict | list):
            spoil(value)
        else:
            found[key] = 99


def cost(client: Client, megabytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """What async_save takes of this process with torch's own stager and with ours, by turns: seconds until it returns, and
    megabytes of memory at the most, beyond what there was."""
    found = {"model": {f"layer {i}": torch.full((TENSOR_MB << 18,), float(i)) for i in range(megabytes // TENSOR_MB)}}
    told: dict[str, dict[str, list[float]]] = {kind: {"seconds": [], "megabytes": []} for kind in ("default", "ckptd")}
    for step in range(1, 2 * rounds + 1):
        kind = ("default", "ckptd")[step % 2]
        writer = (CkptdStagingWriter if kind == "ckptd" else CkptdStorageWriter)(client, step, level="sealed")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = megabytes_of("VmRSS"), time.monotonic()
        future: Any = dcp.async_save(found, storage_writer=writer)
        told[kind]["seconds"].append(time.monotonic() - began)
        future.result()
        told[kind]["megabytes"].append(megabytes_of("VmHWM") - before)
    return told


def megabytes_of(what: str) -> float:
    said = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert said is not None
    return int(said[1]) / 1024


def load(
    client: Client, way: str = "row", step: int | None = None, partial: bool = False, name: str | None = None
) -> dict[str, Any]:
    found = state(0, way, False)
    if partial:
        found = {"model": {"matrix": found["model"]["matrix"]}}
    reader = CkptdStorageReader(client, step, name=name)
    dcp.load(found, storage_reader=reader)
    matrix = found["model"]["matrix"]
    whole = matrix.full_tensor() if hasattr(matrix, "full_tensor") else matrix
    told = {"step": reader.found, "matrix": whole.tolist()}
    if not partial:
        told |= {"half": found["model"]["half"].tolist(), "number": float(found["number"]), "nested": found["nested"]["list"]}
    return told
