"""Frozen parameters written past every counter: samples of their bytes show it at the next snapshot, the audit what passes
between the samples (P1, P15)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ckptd_client import Client, samples
from ckptd_client.copying import Copy
from ckptd_client.dtypes import as_bits
from ckptd_client.samples import OnDevice, Samples
from torch import nn

from tests.node.client_training import all_copied, begun, bits_equal, stored
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.node.test_client_device import copies

WIDTH = 600


class Pair(nn.Module):
    """An online network and its target, which is synchronised now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.online, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.online(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()


def through_data(net: Pair) -> None:
    net.target.weight.data.copy_(net.online.weight.data)


def through_numpy(net: Pair) -> None:
    net.target.weight.numpy()[:] = net.online.weight.detach().numpy()


def written_past_the_counters(daemon: RankDaemonDouble, write: Callable[[Pair], None], lies: str) -> dict[int, str]:
    """What becomes of twenty snapshots, of which those that are sealed hold what was there. Before the fifth it is written."""
    daemon.policy["audit_every"] = 100
    net = Pair()
    if lies == "transposed":
        net.target.weight.data = net.target.weight.data.t().contiguous().t()
    optimizer = torch.optim.SGD(net.online.parameters(), lr=0.1)
    statuses = {}
    with begun(daemon, model=net, optimizer=optimizer) as client:
        for step in range(1, 21):
            net.step(optimizer)
            if step == 5:
                write(net)
            expected = net.target.weight.detach().clone()
            statuses[step] = client.snapshot(step, must=True).wait("sealed", 30)
            if (1, step) in daemon.held:
                assert bits_equal(stored(daemon.held[1, step][0])["model.target.weight"], expected), f"stale at {step}"
        apart = daemon.held[1, 20][0].layout.frozen_bytes > 0
        assert apart == (set(statuses.values()) == {"durable"}), "once is not often; but who voids a snapshot is copied at once"
    return statuses


LIES = ["as it is", "transposed"]


@pytest.mark.parametrize("lies", LIES)
def test_a_write_past_the_counters_is_in_the_next_snapshot(daemon: RankDaemonDouble, default_device: str, lies: str) -> None:
    """Or that is void: samples on a device are looked at behind the copies, since snapshot() waits for none of it."""
    void = {} if default_device == "cpu" else {5: "void: hidden write: model.target.weight"}
    statuses = written_past_the_counters(daemon, through_data, lies)
    assert statuses == dict.fromkeys(range(1, 21), "durable") | void


@pytest.mark.on_host("numpy has what lies there")
@pytest.mark.parametrize("lies", LIES)
def test_a_write_by_numpy_is_in_the_next_snapshot(daemon: RankDaemonDouble, lies: str) -> None:
    assert set(written_past_the_counters(daemon, through_numpy, lies).values()) == {"durable"}


@pytest.mark.on_host("a device copies by itself: nobody comes in between")
def test_a_write_past_the_counters_amid_the_copy_tears_no_snapshot(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, writing, written = Pair(), threading.Event(), threading.Event()
    optimizer = torch.optim.SGD(net.online.parameters(), lr=0.1)
    run = Copy.run

    def held_up(self: Copy, begin: int, length: int) -> None:
        if self.key == "model.target.weight":
            writing.wait(20)
            run(self, begin, length // 2)
            through_data(net)
            written.set()
        run(self, begin, length)

    with begun(daemon, model=net, optimizer=optimizer) as client:
        net.step(optimizer)
        expected = net.target.weight.detach().clone()
        monkeypatch.setattr(Copy, "run", held_up)
        handle = client.snapshot(1, must=True)
        writing.set()
        assert handle.wait("sealed", 30) == "void: written while it was copied: model.target.weight"
        assert written.is_set() and not bits_equal(net.target.weight.detach(), expected)


def between_the_samples(net: Pair) -> None:
    net.target.weight.data.view(-1)[samples.SAMPLE_BYTES] += 1


def statuses_of(
    client: Client, net: Pair, optimizer: torch.optim.Optimizer, missed: int, beside: bool = False
) -> dict[int, str]:
    """What becomes of the snapshots of eight steps; before that of step ``missed`` a write passes between the samples. beside: one
    of what is trained passes the fence of the last."""
    statuses = {}
    for step in range(1, 9):
        net.step(optimizer)
        if step == missed:
            between_the_samples(net)
        handle = client.snapshot(step, must=True)
        if beside and step == 8:
            all_copied(client)
            net.online.weight.data.add_(1)
        net.step(optimizer)  # the fence, at which an audit compares
        statuses[step] = handle.wait("sealed", 30)
    return statuses


def test_what_passes_between_the_samples_makes_earlier_snapshots_doubtful_by_name(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.policy["audit_every"] = 8
    net = Pair()
    optimizer = torch.optim.SGD(net.online.parameters(), lr=0.1)
    with begun(daemon, model=net, optimizer=optimizer) as client:
        statuses = statuses_of(client, net, optimizer, 5)
        problems = client.health().problems
    assert statuses[8] == "void: hidden write: model.target.weight; doubtful: the steps 3 to 7", "2 was compared"
    assert any("steps 3 to 7 may hold model.target.weight as it was earlier" in text for text in problems), problems
    assert "steps 3 to 7" in caplog.text
    assert all(statuses[step] == "durable" for step in range(1, 8))


def test_what_was_written_past_the_fence_makes_no_earlier_snapshot_doubtful(daemon: RankDaemonDouble) -> None:
    """It was named among what is."""
    daemon.policy["audit_every"] = 8
    net = Pair()
    optimizer = torch.optim.SGD(net.online.parameters(), lr=0.1)
    with begun(daemon, model=net, optimizer=optimizer) as client:
        statuses = statuses_of(client, net, optimizer, 5, beside=True)
        problems = client.health().problems
    assert statuses[8] == "void: hidden write: model.online.weight, model.target.weight; doubtful: the steps 3 to 7"
    assert any("steps 3 to 7 may hold model.target.weight as it was earlier" in text for text in problems), problems


def test_an_audit_that_finds_nothing_clears_what_came_before(daemon: RankDaemonDouble) -> None:
    daemon.policy["audit_every"] = 4
    net = Pair()
    optimizer = torch.optim.SGD(net.online.parameters(), lr=0.1)
    with begun(daemon, model=net, optimizer=optimizer) as client:
        statuses = statuses_of(client, net, optimizer, 7)
    assert statuses[8] == "void: hidden write: model.target.weight; doubtful: the steps 5 to 7"


@pytest.mark.on_host("OnDevice looks at what lies on a device")
def test_samples_are_bounded_and_spread_over_the_whole_tensor() -> None:
    many = [torch.zeros(5000) for _ in range(10_000)]
    assert len(Samples(many).read()) <= samples.SAMPLES_MAX * samples.SAMPLE_BYTES
    few = [torch.zeros(100_000), torch.zeros(300, 400).t(), torch.zeros(3, 5, 7000)[:, 1:3]]
    looked_at = Samples(few)
    for number, tensor in enumerate(few):
        for begin in range(0, tensor.numel(), piece := tensor.numel() // (samples.OF_A_TENSOR_MAX - 2)):
            if begin + piece > tensor.numel():
                continue
            before, whole = looked_at.read(), tensor.clone(memory_format=torch.contiguous_format)
            whole.view(-1)[begin : begin + piece] = 1
            tensor.data.copy_(whole)
            assert looked_at.differing(before, looked_at.read()) == [number], (number, begin)
            tensor.data.zero_()


def test_on_a_device_the_samples_of_slot_and_source_are_compared() -> None:
    sources: list[Any] = [
        torch.randn(5000), torch.full((80, 90), torch.nan), torch.randn(70, 80).t(), torch.randn(9000).to(torch.float8_e5m2),
        torch.randint(0, 9, (4000,)),
    ]  # fmt: skip
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cpu")
    made = copies(sources, memory)
    for copy in made:
        copy.target_tensor().copy_(as_bits(copy.source))
    look = OnDevice(made)
    look.compare()
    assert look.differing() == []
    sources[2].data.add_(1)
    sources[3].view(torch.uint8).add_(1)
    look.compare()
    assert look.differing() == [made[2], made[3]]
    assert OnDevice(()).differing() == []
