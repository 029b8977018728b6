"""Flat parameters of FSDP1, for client_ranks.py: through its adapter, out of them and into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ckptd_client import Client
from ckptd_client.integrations.fsdp1 import attach
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.cluster.client_models import Built, Net, adamw, fsdp, same, seeded, train, truth


class Counting(torch.optim.Optimizer):
    """It counts its steps by an int, as optimizers did before torch counted in tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state.setdefault("count", 0)
            state.setdefault("mean", torch.zeros_like(p))
            state["count"] += 1
            p.sub_(state["mean"].lerp_(p.grad, 0.1) * 0.1)


def without_unused(seed: int) -> Net:
    """FSDP1 has a gradient of zeros for what has none elsewhere, and weights decay."""
    model = seeded(seed)
    model.unused.requires_grad_(False)
    return model


def fsdp1(seed: int) -> Built:
    """use_orig_params, as Net has frozen parameters."""
    policy = ModuleWrapPolicy({torch.nn.Linear})
    model = without_unused(seed)
    tied = [model.head, model.tied]  # FSDP1 keeps parameters tied within one unit only
    made = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), ignored_modules=tied
    )
    return made, adamw(made)


def attached(folder: Path, built: Built) -> Client:
    client = Client.connect(job="parallel", socket=folder / "flat.s", required=True)
    attach(*built, client)
    return client


def out_and_in(connect: Callable[..., Client], until_durable: Callable[..., Any], folder: Path) -> None:
    """All ranks train on the same batch, so the plain model in one process is what each kind is."""
    model = without_unused(1)
    saved, expected = fsdp1(1), (model, adamw(model))
    with attached(folder, saved) as client:
        assert client.restore() is None
        for step in (1, 2):
            train(saved, 1)
            train(expected, 1)
            until_durable(client, client.snapshot(step, must=True))
    same(into(connect, fsdp(2)), truth(expected))
    again = fsdp1(3)
    with attached(folder, again) as client:
        assert client.restore() == 2
        train(again, 1)
        until_durable(client, client.snapshot(3, must=True))
    train(expected, 1)
    same(into(connect, fsdp(4)), truth(expected))
    counts(folder)


def counts(folder: Path) -> None:
    """In its place among others a count of its own, which the restore fills (P1)."""
    for expected in (None, 2):
        model = fsdp1(5)[0]
        built = model, Counting([p for p in model.parameters() if p.requires_grad], {"lr": 1.0})
        client = Client.connect(job="counting", socket=folder / "counts.s", required=True)
        attach(*built, client)
        with client:
            assert client.restore() == expected
            if expected is None:
                train(built, 2)
                client.snapshot(2, must=True)
                assert client.wait("sealed", 30) == "durable"
            assert {state["count"] for state in built[1].state.values()} == {2}


def into(connect: Callable[..., Client], built: Built) -> dict[str, torch.Tensor]:
    with connect("flat", model=built[0], optimizer=built[1]) as client:
        assert client.restore(strict=False) is not None
    return truth(built)
