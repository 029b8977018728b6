"""Frozen parameters with a scripted daemon: captured once into a slot of their own, and again when they change (D6)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptd.wire import rank as wire
from tests.node.client_training import Training, assert_same, connected
from tests.node.rank_daemon_double import RankDaemonDouble


def test_frozen_parameters_are_copied_once_and_again_when_they_change(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptd_client import copying as copies

    training = Training(width=400)
    for parameter in training.model[0].parameters():
        parameter.requires_grad_(False)
    frozen = training.model[0].weight
    training.optimizer = torch.optim.AdamW([p for p in training.model.parameters() if p.requires_grad])
    copied: list[str] = []
    run = copies.Copy.run
    monkeypatch.setattr(copies.Copy, "run", lambda self, *at: (copied.append(self.key), run(self, *at))[1])
    with connected(daemon, training) as client:
        client.restore()

        def snapshot(step: int) -> int:
            training.step()
            expected = training.tensors()
            copied.clear()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, step][0], expected)
            return copied.count("model.0.weight")

        times = [snapshot(step) for step in range(1, 8)]
        assert times == [1, 0, 0, 0, 0, 0, 0]
        layout = daemon.held[1, 7][0].layout
        assert layout.frozen_bytes >= frozen.nbytes, "it lies apart from what each snapshot captures"
        assert daemon.messages(wire.Join)[0].frozen_bytes == layout.frozen_bytes, "memory for it was asked for ahead"
        with torch.no_grad():
            frozen.mul_(2)
        assert snapshot(8) == 1
        frozen.data = torch.randn_like(frozen)
        assert snapshot(9) == 1
        assert snapshot(10) == 0
        assert len({message.frozen for message in daemon.messages(wire.SealedSlot)}) == 3, "each content has its slot"


def test_parameters_called_frozen_that_change_all_the_time_are_captured_with_the_others(
    daemon: RankDaemonDouble,
) -> None:
    """A teacher inside of the module, moved by hand after each step: no snapshot is lost to it for long."""
    training = Training(width=400)
    teacher = nn.Linear(400, 400).requires_grad_(False)
    training.model.add_module("teacher", teacher)
    net = training.model
    training.optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with connected(daemon, training) as client:
        client.restore()
        taken = []
        for number in range(1, 9):
            with torch.no_grad():
                teacher.weight.add_(1)
            expected = training.tensors()
            handle = client.snapshot(number, must=True)
            taken.append(handle.wait("sealed", 30) == "durable")
            if taken[-1]:
                assert_same(daemon.held[1, number][0], expected)
        assert taken.count(False) <= 1 and all(taken[4:])
        assert not daemon.held[1, 8][0].layout.frozen_bytes


def test_a_frozen_parameter_written_behind_our_back_is_found_and_copied_at_once_from_then_on(
    daemon: RankDaemonDouble,
) -> None:
    """A momentum encoder: requires_grad=False, written through .data, which bumps no version."""
    training = Training(width=400)
    momentum = nn.Linear(400, 400).requires_grad_(False)
    training.model.add_module("momentum", momentum)
    net = training.model

    def step() -> None:
        training.optimizer.zero_grad()
        net[2](net[1](net[0](torch.randn(4, 400)))).square().mean().backward()
        training.optimizer.step()
        momentum.weight.data.mul_(0.9).add_(net[0].weight.data, alpha=0.1)

    training.optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with connected(daemon, training) as client:
        client.restore()
        results = []
        for number in range(1, 10):
            step()
            expected = training.tensors()
            handle = client.snapshot(number, must=True)
            results.append(handle.wait("sealed", 30))
            if handle.taken:
                assert_same(daemon.held[1, number][0], expected)
        assert results[1] == "void: hidden write to model.momentum.weight"
        small = daemon.slot_count  # slots without room for it were granted already
        assert set(results[2 : 2 + small]) <= {"skipped: no memory", "durable"}
        assert results[2 + small :] == ["durable"] * 4
