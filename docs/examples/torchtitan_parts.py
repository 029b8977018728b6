"""torchtitan's optimizers, schedules and checkpoint manager over ckptd: a small language model learns the bytes of this file.

In a training of torchtitan's own the manager is one line of its config:
    checkpoint=CkptdCheckpointManager.Config(enable=True, job="run")
Its Trainer wants a device. This loop calls the same parts in the same order, on any machine. On each node `ckptd run` (alone on one
machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/torchtitan_parts.py 200
Kill it whenever you like, and start it again with as many processes as you like.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ckptd_client.integrations.torchtitan import CkptdCheckpointManager
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

WINDOW, BATCH = 16, 12


class TrainState:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(steps):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=10_000)
    state = TrainState()
    job = os.environ.get("JOB", "torchtitan-example")
    manager = CkptdCheckpointManager.Config(enable=True, job=job).build(
        dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedules, states={"train_state": state},
        sd_adapter=None, base_folder=os.path.join(os.environ.get("OUTPUT", "outputs"), job),
    )  # fmt: skip
    manager.load(step=-1)
    while state.step < steps:
        start = BATCH * state.step % 600
        windows = [text[at : at + WINDOW + 1] for at in range(start, start + BATCH)]
        mine = torch.stack(windows[rank::world])
        logits = model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        optimizers.zero_grad()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedules.step()
        state.step += 1
        manager.save(state.step, last_step=state.step == steps)
        loss = loss.detach() / world
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {state.step} loss {loss.item():.4f}", flush=True)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
