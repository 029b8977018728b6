"""The trainer of the demo: FSDP2 + AdamW + schedule + resumable loader; ``torchrun -m ckptd.demo.train``.

With ``--job`` it protects itself with ckptd, the loop as in the README. Without, it is the control: the same training,
optionally resumed from a plain ``torch.save``. What it records about itself (notebook, record) uses no code of ckptd.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from ckptd.demo import record
from ckptd.demo.loader import Loader
from ckptd.demo.model import CharGPT, Shape
from ckptd.demo.notebook import Notebook
from ckptd.demo.text import load_text

SEED = 1337
GLOBAL_BATCH = 12  # windows; divides over 4, 3, 2 and 1 ranks
LEARNING_RATE = 1e-3
WARMUP_STEPS = 20
LEARNING_RATE_HALVES_STEPS = 200
DURABLE_TIMEOUT_S = 60.0
SAVES_KEPT = 16  # plain torch.save files; more than a restore can lie behind


class Trainer:
    """Everything that one rank owns, and one step of it."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.world,))
        text = load_text()
        shape = Shape(text.size)
        torch.manual_seed(SEED)
        self.model = self._shard(CharGPT(shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        self.scheduler = LambdaLR(self.optimizer, schedule)
        self.loader = Loader(
            text.tokens, context=shape.context, batch=GLOBAL_BATCH, seed=SEED, rank=self.rank, world=self.world
        )

    def _shard(self, model: CharGPT) -> CharGPT:
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    def train_one(self) -> float:
        """One optimizer step; the mean loss of the global batch."""
        tokens, targets = self.loader.next()
        losses = self.model(tokens, targets)
        losses.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return mean_loss(losses.detach())

    def save(self, step: int, full: dict[str, Tensor], plain: dict[str, Any], folder: Path) -> None:
        """The reference run's start: a plain torch.save on rank 0, complete or absent."""
        draft = folder / f"{step}.part"
        torch.save({"step": step, "tensors": full, "plain": plain}, draft)
        draft.rename(folder / f"{step}.pt")
        (folder / f"{step - SAVES_KEPT}.pt").unlink(missing_ok=True)

    def load(self, path: Path) -> int:
        """Resume from ``save``, into any world, without ckptd. Returns the step."""
        saved = torch.load(path, weights_only=True)
        tensors, plain = saved["tensors"], saved["plain"]
        for name, parameter in self.model.named_parameters():
            self._fill(name, parameter, tensors)
        for group, values in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            group.update(values)
        self.scheduler.load_state_dict(plain["scheduler"])
        self.loader.load_state_dict(plain["loader"])
        return int(saved["step"])

    def _fill(self, name: str, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.copy_(self._scatter(tensors[f"model.{name}"]))
        prefix = f"optimizer.{name}."
        state = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
        self.optimizer.state[parameter] = {k: self._scatter(v) if v.dim() else v for k, v in state.items()}

    def _scatter(self, full: Tensor) -> DTensor:
        from torch.distributed.tensor import Shard

        return distribute_tensor(full, self.mesh, [Shard(0)])


def schedule(step: int) -> float:
    """Linear warm-up, then decay by half every LEARNING_RATE_HALVES_STEPS."""
    return float(min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 ** (step / LEARNING_RATE_HALVES_STEPS))


def mean_loss(losses: Tensor) -> float:
    """Samples in their global order, summed in float64: the value does not depend on how they were dealt out."""
    parts = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, losses)
    return float(torch.cat(parts).double().mean())


class Witness:
    """Writes down losses and digests, and the plain saves if asked; rank 0 has the digests."""

    def __init__(self, trainer: Trainer, args: argparse.Namespace) -> None:
        self._trainer, self._saves = trainer, args.saves
        self._with_digests = bool(args.job or args.saves)
        self._book = Notebook(args.notebook, args.name, trainer.rank)

    def started(self) -> None:
        self._book.write("start", pid=os.getpid(), world=self._trainer.world)

    def restored(self, step: int, **facts: Any) -> None:
        self._book.write("restored", step=step, **facts)
        if step:
            self._digests("restored_digests", step)

    def step(self, step: int, loss: float, seconds: float) -> None:
        self._book.write("step", step=step, loss=loss, seconds=seconds)
        if self._with_digests:
            self._digests("digests", step)

    def snapshot(self, step: int, status: str, seconds: float) -> None:
        self._book.write("snapshot", step=step, status=status, seconds=seconds)

    def finished(self, **facts: Any) -> None:
        self._book.write("finished", **facts)

    def _digests(self, kind: str, step: int) -> None:
        t = self._trainer
        full = record.gather_full(record.named_tensors(t.model, t.optimizer))
        plain = record.plain_state(t.optimizer, t.scheduler, t.loader)
        if full is None:
            return
        self._book.write(kind, step=step, digests=record.digests(full, plain))
        if self._saves and kind == "digests":
            t.save(step, full, plain, self._saves)


def protected_training(trainer: Trainer, witness: Witness, job: str, steps: int) -> None:
    from ckptd_client import Client

    with Client.connect(job=job) as client:
        extra = {"scheduler": trainer.scheduler, "loader": trainer.loader}
        client.register(model=trainer.model, optimizer=trainer.optimizer, extra=extra)
        began = time.time()
        step = client.restore() or 0
        witness.restored(step, began=began, info=client.last_restore)
        while step < steps:
            step = _timed_step(trainer, witness, step)
            asked = time.monotonic()
            handle = client.snapshot(step, must=step == steps)
            witness.snapshot(step, handle.status, time.monotonic() - asked)
        status = client.wait(level="durable", timeout=DURABLE_TIMEOUT_S)
        witness.finished(status=str(status))


def control_training(trainer: Trainer, witness: Witness, load: Path | None, steps: int) -> None:
    step = trainer.load(load) if load else 0
    while step < steps:
        step = _timed_step(trainer, witness, step)
    witness.finished()


def _timed_step(trainer: Trainer, witness: Witness, step: int) -> int:
    began = time.monotonic()
    loss = trainer.train_one()
    witness.step(step + 1, loss, time.monotonic() - began)
    return step + 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ckptd.demo.train")
    parser.add_argument("--name", required=True, help="name of this run's notebook")
    parser.add_argument("--notebook", type=Path, required=True, help="folder of the notebooks")
    parser.add_argument("--steps", type=int, required=True, help="stop after this step")
    parser.add_argument("--job", default="", help="protect with ckptd under this name; empty: control run without it")
    parser.add_argument("--saves", type=Path, help="folder for a plain torch.save of every step")
    parser.add_argument("--load", type=Path, help="control run: resume from this torch.save")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    trainer = Trainer()
    witness = Witness(trainer, args)
    witness.started()
    if args.job:
        protected_training(trainer, witness, args.job, args.steps)
    else:
        control_training(trainer, witness, args.load, args.steps)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, and then abort a process that did all it had to


if __name__ == "__main__":
    main()
