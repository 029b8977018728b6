"""A GPT of Megatron-Core, tensor and pipeline parallel, through its own dist_checkpointing over ckptd. Its forward pass wants a
device; gradients are a function of the weights here, element by element, so that every cut of the model trains alike."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client

from tests.matrix.worker import SETTINGS, wrote

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
torch.cuda.synchronize = lambda *of: None

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import (  # noqa: E402
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

STEP = 3


def build() -> tuple[Any, torch.optim.Optimizer]:
    tp, pp = SETTINGS.get("tp", 1), SETTINGS.get("pp", 1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    config = TransformerConfig(
        num_layers=4, hidden_size=24, num_attention_heads=12, num_query_groups=6, ffn_hidden_size=36, gated_linear_unit=True,
        add_bias_linear=False, use_cpu_initialization=True, normalization="LayerNorm", tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
    )  # fmt: skip
    torch.manual_seed(SETTINGS.get("seed", 1))
    ends = {"pre_process": parallel_state.is_pipeline_first_stage(), "post_process": parallel_state.is_pipeline_last_stage()}
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=SETTINGS.get("words", 48), max_sequence_length=16,
        share_embeddings_and_output_weights=False, **ends,
    )  # fmt: skip
    return model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach() * 0.1 + 0.01
    optimizer.step()


def state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As Megatron saves them."""
    sharded = model.sharded_state_dict()
    of_optimizer = optimizer.state_dict()
    ids = get_param_id_to_sharded_param_map(sharded, iter(model.parameters()))
    optim_state_to_sharding_state(of_optimizer, ids, exclude_keys=("step",))
    return {"model": sharded, "optimizer": of_optimizer, "iteration": STEP}


def whole(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Of each key all of it, put together by what Megatron says of each part."""
    found = state(model, optimizer)
    apply_factories(found)
    parts = [one for one in nested_values(found) if isinstance(one, ShardedTensor) and is_main_replica(one.replica_id)]
    mine = [(one.key, one.global_shape, one.global_offset, one.prepend_axis_num, one.data.detach().clone()) for one in parts]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    tensors: dict[str, torch.Tensor] = {}
    for key, shape, offset, axes, data in (row for rows in everyone for row in rows):
        place = tuple(slice(start, start + size) for start, size in zip(offset, (1,) * axes + tuple(data.shape), strict=True))
        tensors.setdefault(key, torch.full(shape, float("nan")))[place] = data
    return tensors


def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save(tensors, Path(SETTINGS["folder"]) / name)


def main() -> None:
    from ckptd_client.integrations.megatron import CkptdSaveStrategy, loading

    dist.init_process_group("gloo")
    model, optimizer = build()
    with Client.connect(job=SETTINGS["job"], required=True) as client, tempfile.TemporaryDirectory() as directory:
        if SETTINGS["do"] == "save":
            for _ in range(STEP):
                step(optimizer)
            if "files" in SETTINGS:  # Megatron's own
                dist_checkpointing.save(state(model, optimizer), SETTINGS["files"])
            else:
                strategy = CkptdSaveStrategy(client, STEP, level=SETTINGS["level"])
                dist_checkpointing.save(state(model, optimizer), directory, sharded_strategy=strategy, **SETTINGS.get("how", {}))
            write("saved", whole(model, optimizer))
            step(optimizer)
            write("after", whole(model, optimizer))
            dist.barrier()
            wrote("dies", step=STEP)
            os.kill(os.getpid(), signal.SIGKILL)
        step(optimizer)  # so that there is state to be filled
        if "files" in SETTINGS:
            found = dist_checkpointing.load(state(model, optimizer), SETTINGS["files"])
        else:
            with loading(client) as (where, loads):
                found = dist_checkpointing.load(state(model, optimizer), where, loads)
                files = sorted(path.name for path in Path(where).iterdir())
                wrote("begins", step=loads.found, iteration=found["iteration"], files=files)
        model.load_state_dict(found["model"])
        for of_parameter in found["optimizer"]["state"].values():  # Megatron keeps one for all, too
            of_parameter["step"] = torch.tensor(float(found["iteration"]))
        optimizer.load_state_dict(found["optimizer"])
        write("loaded", whole(model, optimizer))
        step(optimizer)
        write("after", whole(model, optimizer))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
