"""What lies in a registered dict or list is what lies there at each snapshot, not what lay there at ``register`` (P15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ckptd_client import Client

from tests.node.client_training import Training, connected
from tests.node.rank_daemon_double import RankDaemonDouble

STEPS = 3


def live() -> dict[str, Any]:
    """As a trainer keeps it: counters beside tensors, averages made by hand."""
    zeros = torch.zeros(2)
    return {"n": 0, "deep": {"k": 0}, "lst": [0], "ema": zeros, "in": zeros.clone(), "mixed": [zeros.clone(), 0]}


def advance(values: dict[str, Any]) -> None:
    values["n"] += 1
    values["deep"]["k"] += 1
    values["lst"][0] += 1
    values["ema"] = values["ema"] * 0.5 + 1
    values["in"] += 1
    values["mixed"][0] = values["mixed"][0] + 1
    values["mixed"][1] += 1


def trained(client: Client, training: Training, values: dict[str, Any], steps: int) -> list[str]:
    statuses = []
    for step in range(1, steps + 1):
        training.step()
        advance(values)
        statuses.append(client.snapshot(step, must=True).wait("sealed", 30))
    return statuses


@pytest.mark.parametrize("name", ["extra", "mine"])
def test_what_was_replaced_in_a_dict_or_list_comes_back(daemon: RankDaemonDouble, name: str) -> None:
    values, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(**{name: values})
        client.restore()
        assert trained(client, training, values, STEPS) == ["durable"] * STEPS
    again, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(**{name: again})
        assert client.restore() == STEPS
    assert (again["n"], again["deep"], again["lst"], again["mixed"][1]) == (STEPS, {"k": STEPS}, [STEPS], STEPS)
    assert torch.equal(again["ema"], values["ema"]), "an average made by hand is another tensor at each step"
    assert torch.equal(again["in"], values["in"])
    assert torch.equal(again["mixed"][0], values["mixed"][0])


def test_a_key_that_came_later_is_captured_and_missed_by_name(daemon: RankDaemonDouble) -> None:
    values, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(extra=values)
        client.restore()
        values["late"] = torch.ones(1)
        trained(client, training, values, 1)
    again, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(extra=again)
        with pytest.raises(Exception, match=r"extra\.late"):
            client.restore()
        again["late"] = torch.zeros(1)
        assert client.restore() == 1
    assert torch.equal(again["late"], torch.ones(1))
