"""Ranks that register different things, for client_ranks.py, which hands in how it connects, waits and is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Client
from torch import nn

Connect = Callable[..., Client]


def average_on_rank_zero(connect: Connect, until_durable: Callable[..., None], refusal: Callable[[Client], str]) -> None:
    """DDP, and weights averaged by rank 0 alone. Each rank registers at the restore what it registered before."""
    first = dist.get_rank() == 0

    def made(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.parallel.DistributedDataParallel(nn.Linear(70, 70))
        torch.manual_seed(seed + 1)
        return model, {"ema": nn.Linear(70, 70), "scheduler": {"n": seed}} if first else {}

    model, own = made(1)
    with connect("apart", model=model, **own) as client:
        client.restore()
        until_durable(client, client.snapshot(1, must=True))
    model, again = made(5)
    with connect("apart", model=model, **again) as client:
        assert client.restore() == 1
        if first:
            assert torch.equal(again["ema"].weight, own["ema"].weight) and again["scheduler"] == {"n": 1}
        else:
            assert any("ema.weight" in note for note in client.last_restore["notes"]), client.last_restore
    model, _ = made(7)
    with connect("apart", model=model) as client:
        why = refusal(client)
        assert "ema.bias" in why and "scheduler" in why and "nobody registered it" in why, why
    model, again = made(8)
    again.pop("scheduler", None)
    with connect("apart", model=model, **again) as client:
        why = refusal(client)
        assert "scheduler: in the snapshot, but nobody registered it" in why and "ema" not in why, why


def optimizer_forgotten_on_one_rank(
    connect: Connect, until_durable: Callable[..., None], refusal: Callable[[Client], str]
) -> None:
    """It had one when it saved; that another rank has one again is no excuse."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    with connect("apart_forgotten", model=model, optimizer=optimizer, extra={"n": 1}) as client:
        client.restore()
        until_durable(client, client.snapshot(1, must=True))
    rest: dict[str, Any] = {} if dist.get_rank() == 1 else {"optimizer": optimizer, "extra": {"n": 0}}
    with connect("apart_forgotten", model=model, **rest) as client:
        why = refusal(client)
        assert "extra.n" in why and "optimizer." in why and "(8 in all)" in why, why
        assert "saved by this rank, but not registered on it now" in why, why


def parts_of_a_dict(connect: Connect, until_durable: Callable[..., None]) -> None:
    """A dict that holds other tensors on each rank: what it holds elsewhere does not come here."""
    rank = dist.get_rank()
    parts, fresh = {f"of{rank}": torch.full((3000,), float(rank))}, {f"of{rank}": torch.zeros(3000)}
    with connect("apart_parts", parts=parts) as client:
        client.restore()
        until_durable(client, client.snapshot(1, must=True))
    with connect("apart_parts", parts=fresh) as client:
        assert client.restore() == 1
    assert list(fresh) == list(parts) and torch.equal(fresh[f"of{rank}"], parts[f"of{rank}"])


def stages_undeclared(connect: Connect, until_durable: Callable[..., None]) -> None:
    """Pipeline stages under one name, each rank with a layer of its own, and nothing declared."""
    rank = dist.get_rank()

    def stage(seed: int) -> nn.Module:
        torch.manual_seed(seed + rank)
        return nn.ModuleDict({f"layer{rank}": nn.Linear(50, 50)})

    model, fresh = stage(1), stage(11)
    with connect("apart_stages", model=model) as client:
        client.restore()
        until_durable(client, client.snapshot(1, must=True))
    with connect("apart_stages", model=fresh) as client:
        assert client.restore() == 1
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
