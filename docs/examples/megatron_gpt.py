"""Megatron-Core's distributed checkpoints over ckptd: the weights of a GPT, tensor parallel over all processes.

Its forward pass wants a device, and its checkpoints do not: here the weights shrink by gradients that each has for itself, so that
this runs on any machine. On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/megatron_gpt.py 200
Kill it whenever you like, and start it again with 1, 2, 3, 4, 6 or 12 processes.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from ckptd_client import Client
from ckptd_client.integrations.megatron import CkptdSaveStrategy, loading

if not torch.cuda.is_available():  # Megatron asks for a device even where it needs none
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *of: None

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig


def build():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    config = TransformerConfig(
        num_layers=2, hidden_size=48, num_attention_heads=12, ffn_hidden_size=96, use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=48, max_sequence_length=16)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def state_of(model, optimizer, step):
    """As Megatron's own trainers make it."""
    sharded, of_optimizer = model.sharded_state_dict(), optimizer.state_dict()
    names = get_param_id_to_sharded_param_map(sharded, iter(model.parameters()))
    optim_state_to_sharding_state(of_optimizer, names, exclude_keys=("step",))
    return {"model": sharded, "optimizer": of_optimizer, "iteration": step}


def train(model, optimizer):
    """One step. Of what all ranks hold the first one's counts."""
    squares = [p.square().sum() for p in model.parameters()]
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    cut = [first or getattr(p, "tensor_model_parallel", False) for p in model.parameters()]
    loss = sum(square for square, counts in zip(squares, cut, strict=True) if counts) / 1000
    sum(squares).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def load(client, model, optimizer):
    """The step that was found, 0: there is none."""
    if client.open() is None:
        return 0
    train(model, optimizer)  # so that the optimizer has state to be filled
    with loading(client) as (directory, strategy):
        found = dist_checkpointing.load(state_of(model, optimizer, 0), directory, strategy)
    model.load_state_dict(found["model"])
    for state in found["optimizer"]["state"].values():  # Megatron keeps one for all, too
        state["step"] = torch.tensor(float(found["iteration"]))
    optimizer.load_state_dict(found["optimizer"])
    return found["iteration"]


def main(steps):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model, optimizer = build()
    with Client.connect(job=os.environ.get("JOB", "megatron-example")) as client, tempfile.TemporaryDirectory() as directory:
        step = load(client, model, optimizer)
        while step < steps:
            loss = train(model, optimizer)
            dist.all_reduce(loss)
            step += 1
            strategy = CkptdSaveStrategy(client, step, level="sealed")
            dist_checkpointing.save(state_of(model, optimizer, step), directory, sharded_strategy=strategy)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        client.wait("durable")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
