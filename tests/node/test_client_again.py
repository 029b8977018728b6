"""A second ``snapshot()`` of one step: the same snapshot if nothing changed, else refused in words (P15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ckptd_client import Client
from torch import nn

from ckptd.wire import rank as wire
from tests.node.client_training import Training, assert_same, connected, restored, stepped
from tests.node.rank_daemon_double import RankDaemonDouble

CHANGED = "failed: captured before under this step, and the state has changed since"


class Loader:
    """Where a loader is: a number, and an order too large to lie among the small values."""

    def __init__(self) -> None:
        self.at, self.order = 0, torch.arange(9000)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


def one_more_step(training: Training, loader: Loader) -> None:
    training.step()


def batch_norm(training: Training, loader: Loader) -> None:
    torch.optim.swa_utils.update_bn([torch.randn(8, training.width) + 3], training.model)


def by_hand(training: Training, loader: Loader) -> None:
    with torch.no_grad():
        training.model[2].bias.zero_()


def moments_by_hand(training: Training, loader: Loader) -> None:
    training.optimizer.state[training.model[0].weight]["exp_avg"].zero_()


def replaced(training: Training, loader: Loader) -> None:
    training.model[0].register_buffer("more", torch.ones(3))


def learning_rate(training: Training, loader: Loader) -> None:
    training.optimizer.param_groups[0]["lr"] *= 0.5


def loader_goes_on(training: Training, loader: Loader) -> None:
    loader.at += 1


def loader_shuffles(training: Training, loader: Loader) -> None:
    loader.order = torch.randperm(9000)


CHANGES: list[Callable[[Training, Loader], None]] = [
    one_more_step, batch_norm, by_hand, moments_by_hand, replaced, learning_rate, loader_goes_on, loader_shuffles,
]  # fmt: skip


@pytest.mark.parametrize("must", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changed_since_is_not_called_captured(
    daemon: RankDaemonDouble, change: Callable[[Training, Loader], None], must: bool, caplog: pytest.LogCaptureFixture
) -> None:
    training, loader = Training(), Loader()
    with connected(daemon, training, state_bytes=1 << 22) as client:
        client.register(loader=loader)
        client.restore()
        training.step()
        expected = training.tensors() | {"loader#0": loader.order.clone()}
        first = client.snapshot(5, must=True)
        assert first.wait("sealed", 30) == "durable"
        change(training, loader)
        second = client.snapshot(5, must=must)
        assert second.status.startswith(CHANGED)
        assert second.wait("sealed", 1) == second.status
        assert client.wait("sealed", 1) == second.status
        assert first.status == "durable"
        assert any("snapshot 5" in text and "has changed since" in text for text in client.health().problems)
        assert "has changed since" in caplog.text
        assert_same(daemon.held[1, 5][0], expected)
        expected = training.tensors() | {"loader#0": loader.order.clone()}
        assert client.snapshot(6, must=True).wait("sealed", 30) == "durable"  # the remedy that the words name
        assert client.wait("sealed", 30) == "durable" and client.health().problems == []
    assert_same(daemon.held[1, 6][0], expected)


def test_the_words_name_what_changed_and_the_remedy(daemon: RankDaemonDouble) -> None:
    with stepped(daemon) as (client, training):
        assert client.snapshot(5, must=True).wait("sealed", 30) == "durable"
        with torch.no_grad():
            training.model[2].bias.zero_()
        status = client.snapshot(5).status
    assert "model.2.bias" in status and "snapshot(6, must=True)" in status


@pytest.mark.parametrize("must", [False, True])
def test_a_second_call_with_nothing_new_is_the_same_snapshot(daemon: RankDaemonDouble, must: bool) -> None:
    training, loader = Training(), Loader()
    with connected(daemon, training) as client:
        client.register(loader=loader)
        client.restore()
        for step in (1, 2):
            training.step()
            first = client.snapshot(step, {"loss": 0.5}, keep=True, must=True)
            torch.rand(3)  # an evaluation draws random numbers, which are no reason for another snapshot
            training.model.eval()(torch.randn(4, training.width))
            training.model.train()
            assert client.snapshot(step, must=must) is first
            assert client.snapshot(step, {"loss": 0.5}, keep=True, must=must) is first
            assert client.wait("durable", 30) == "durable"
        assert client.health().problems == []
    assert len(daemon.messages(wire.SealedSlot)) == 2


@pytest.mark.parametrize("more", [{"keep": True}, {"meta": {"best": 1}}, {"meta": {"best": 2}, "keep": True}], ids=str)
def test_what_the_first_call_did_not_ask_for_is_refused(daemon: RankDaemonDouble, more: dict[str, Any]) -> None:
    with stepped(daemon) as (client, _):
        first = client.snapshot(5, {"best": 0}, must=True)
        assert first.wait("sealed", 30) == "durable"
        second = client.snapshot(5, must=True, **more)
        assert second.status.startswith("failed: captured before under this step, without this")
        assert all(f"{name}=" in second.status for name in more) and "snapshot(6, " in second.status
        assert any("without this" in text for text in client.health().problems)
        assert client.wait("sealed", 1) == "durable"  # the state is
        assert client.snapshot(6, must=True, **more).wait("sealed", 30) == "durable"  # the remedy that the words name
        assert client.health().problems == []
    assert daemon.messages(wire.SealedSlot)[-1].keep == more.get("keep", False)


def test_a_meta_that_cannot_be_saved_is_refused_too(daemon: RankDaemonDouble) -> None:
    with stepped(daemon) as (client, _):
        assert client.snapshot(5, must=True).wait("sealed", 30) == "durable"
        assert client.snapshot(5, {"what": object()}).status.startswith("failed: type: ")


def test_what_was_skipped_is_captured_by_the_second_call(daemon: RankDaemonDouble) -> None:
    daemon.granting = "asked"
    with stepped(daemon) as (client, training):
        assert client.snapshot(5).status.startswith("skipped")
        with torch.no_grad():
            training.model[2].bias.zero_()
        expected = training.tensors()
        assert client.snapshot(5, {"best": 1}, keep=True, must=True).wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 5][0], expected)


def test_a_closed_client_has_nothing_to_say_of_it(daemon: RankDaemonDouble) -> None:
    training = Training()
    client: Client
    with restored(daemon, training) as client:
        training.step()
        client.snapshot(5, must=True)
    nn.init.zeros_(training.model[2].bias)
    assert client.snapshot(5).status == "skipped: the client is closed"
