"""Stock PyTorch reads a checkpoint directory into FSDP2 models: run as a plain script, without ckptd.

``python stock_reader.py DIRECTORY RESULT`` under RANK/WORLD_SIZE/MASTER_*: loads with torch's HuggingFaceStorageReader
into a sharded model and its AdamW state, and rank 0 writes the SHA-256 of every full tensor to RESULT. Also reads every
file with safetensors.safe_open.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, zeros

NAMES = ("exp_avg", "exp_avg_sq")


def build() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(20, 33), nn.LayerNorm(33), nn.Linear(33, 7, dtype=torch.bfloat16))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def optimizer_state(model: nn.Module) -> dict[str, object]:
    state: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        moments = {
            key: zeros(
                parameter.shape,
                dtype=parameter.dtype,
                device_mesh=parameter.device_mesh,
                placements=parameter.placements,
            )
            for key in NAMES
        }
        state[name] = {"step": torch.tensor(float("nan")), **moments}
    return state


def digest(tensor: torch.Tensor) -> str:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(
        full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def open_safely(directory: str) -> int:
    count = 0
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                count += file.get_tensor(name).numel()
    return count


def main(directory: str, result: str) -> None:
    dist.init_process_group("gloo")
    model = build()
    state = {"model": model.state_dict(), "optim": optimizer_state(model)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(directory))
    sums = {f"model.{name}": digest(value) for name, value in model.state_dict().items()}
    for name, values in state["optim"].items():
        sums.update({f"optim.{name}.{key}": digest(value) for key, value in values.items()})
    sums["elements"] = str(open_safely(directory))
    assert not any(name.startswith("ckptd") for name in sys.modules)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(sums))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main(sys.argv[1], sys.argv[2])
