"""One rank of the test of ckptd/demo/record.py: ``python gather_worker.py RANK WORLD PORT FOLDER``.

Trains a little, compares the record's gathered tensors with DTensor.full_tensor(), saves, loads into a fresh trainer and
trains on both: exits non-zero when anything differs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptd.demo import record
from ckptd.demo.train import Trainer


def full_digests(trainer: Trainer) -> dict[str, str] | None:
    full = record.gather_full(record.named_tensors(trainer.model, trainer.optimizer))
    plain = record.plain_state(trainer.optimizer, trainer.scheduler, trainer.loader)
    return record.digests(full, plain) if full is not None else None


def check_gather(trainer: Trainer) -> None:
    tensors = record.named_tensors(trainer.model, trainer.optimizer)
    gathered = record.gather_full(tensors)
    for name, tensor in tensors.items():
        expected = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if gathered is not None:
            assert torch.equal(gathered[name], expected), name


def check_reload(trainer: Trainer, folder: Path) -> None:
    full = record.gather_full(record.named_tensors(trainer.model, trainer.optimizer))
    if full is not None:
        plain = record.plain_state(trainer.optimizer, trainer.scheduler, trainer.loader)
        trainer.save(2, full, plain, folder)
    dist.barrier()
    other = Trainer()
    assert other.load(folder / "2.pt") == 2
    assert full_digests(other) == full_digests(trainer)
    ours, theirs = trainer.train_one(), other.train_one()
    assert ours == theirs, f"{ours!r} after training on, {theirs!r} after a reload"
    assert full_digests(other) == full_digests(trainer)


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    trainer = Trainer()
    before = [trainer.train_one() for _ in range(2)]
    assert before[0] != before[1]
    check_gather(trainer)
    check_reload(trainer, folder)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may outlive the interpreter, and then abort a process that did all it had to


if __name__ == "__main__":
    main()
