"""A registered tensor that another thread writes while it is copied before snapshot() returns (P1): its version counter tells.

The write comes in the middle of the copy, each time or the first time only, whatever else the machine does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from ckptd_client import Client, _switches, libc, races
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.node.client_training import Training, begun, bits_equal, stored
from tests.node.raising_group import raising_group
from tests.node.rank_daemon_double import RankDaemonDouble

WIDTH = 200
ALWAYS = 1_000_000
AMID_A_COPY = pytest.mark.on_host("a device copies by itself, in the order of its stream: nobody comes in between")
CAUSE = "failed: written by another thread while it was copied: "


class Registered:
    """A tensor of each kind that is copied before snapshot() returns. Weight and moment were written past a fence before."""

    def __init__(self) -> None:
        self.training = Training(WIDTH)
        self.training.model.register_buffer("table", torch.zeros(100, 100))
        self.average = {"w": torch.zeros(100, 100)}
        self.training.step()

    def begin(self, client: Client) -> None:
        """The first snapshot is void, as weight and moment are written after it; from then on they are copied at once."""
        handle = client.snapshot(1, must=True)
        with torch.no_grad():
            self.training.model[0].weight.mul_(0.5)
            self.moment.mul_(0.5)
        self.training.step()
        assert handle.wait("sealed", 30).startswith("void: written before the fence: ")

    @property
    def moment(self) -> torch.Tensor:
        found: torch.Tensor = self.training.optimizer.state[self.training.model[0].weight]["exp_avg"]
        return found

    def tensor(self, key: str) -> torch.Tensor:
        if key == "optimizer.model.0.weight.exp_avg":
            return self.moment
        if key == "average.w":
            return self.average["w"]
        return self.training.model.state_dict(keep_vars=True)[key.removeprefix("model.")]


@contextmanager
def registering(daemon: RankDaemonDouble) -> Iterator[tuple[Client, Registered]]:
    """After that first snapshot."""
    registered = Registered()
    training = registered.training
    with begun(daemon, model=training.model, optimizer=training.optimizer, average=registered.average) as client:
        registered.begin(client)
        yield client, registered


KEYS = ["model.0.weight", "model.0.bias", "model.table", "optimizer.model.0.weight.exp_avg", "average.w"]


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def copied_by(monkeypatch: pytest.MonkeyPatch, copy: Callable[[int, int, int], None]) -> None:
    """Those that are copied many in one call, too."""
    monkeypatch.setattr(libc, "copy", copy)
    monkeypatch.setattr(libc, "copy_all", lambda *columns: [copy(*row) for row in zip(*columns, strict=True)])


def written_amid(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, times: int, how: Callable[[torch.Tensor], None] = write
) -> list[int]:
    """The thread writes between the two halves of a copy of the tensor. What comes back holds how many writes are left."""
    copy, left = libc.copy, [times]

    def amid(target: int, source: int, length: int) -> None:
        if source != tensor.data_ptr() or not left[0] or threading.current_thread() is not threading.main_thread():
            copy(target, source, length)
            return
        left[0] -= 1
        half = length // 2
        copy(target, source, half)
        thread = threading.Thread(target=how, args=(tensor,))
        thread.start()
        thread.join()
        copy(target + half, source + half, length - half)

    copied_by(monkeypatch, amid)
    return left


@AMID_A_COPY
@pytest.mark.parametrize("key", KEYS)
def test_what_another_thread_writes_once_is_copied_again(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with registering(daemon) as (client, registered):
        left = written_amid(monkeypatch, registered.tensor(key), 1)
        handle = client.snapshot(2, must=True)
        expected = registered.tensor(key).clone()
        assert handle.wait("sealed", 30) == "durable"
        assert left == [0]
        assert bits_equal(stored(daemon.held[1, 2][0])[key], expected), "torn"
        assert not any("another thread" in text for text in client.health().problems)


@AMID_A_COPY
@pytest.mark.parametrize("key", KEYS)
def test_what_another_thread_goes_on_writing_fails_the_snapshot_by_name(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with registering(daemon) as (client, registered):
        with monkeypatch.context() as during:
            written_amid(during, registered.tensor(key), ALWAYS)
            handle = client.snapshot(2, must=True)
        assert handle.status == CAUSE + key
        assert (1, 2) not in daemon.held
        told = [text for text in client.health().problems if "another thread" in text]
        assert len(told) == 1 and key in told[0] and "stop that thread around snapshot()" in told[0]
        registered.training.step()
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable", "the thread has stopped"
        assert not any("another thread" in text for text in client.health().problems)


@AMID_A_COPY
def test_a_first_copy_that_lies_within_one_long_write_is_known_by_samples(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counter moves when the write is over, after snapshot() has returned."""
    average = torch.zeros(500_000)

    def half(tensor: torch.Tensor) -> None:
        tensor.numpy()[:250_000] += 1

    with begun(daemon, average=average) as client:
        left = written_amid(monkeypatch, average, 1, half)
        handle = client.snapshot(1, must=True)
        assert handle.wait("sealed", 30) == "durable"
        assert left == [0]
        assert bits_equal(stored(daemon.held[1, 1][0])["average"], average), "torn"


@AMID_A_COPY
def test_many_such_tensors_are_counted(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{at}": torch.zeros(10) for at in range(9)}
    copy = libc.copy

    def amid(target: int, source: int, length: int) -> None:
        thread = threading.Thread(target=lambda: [write(each) for each in tensors.values()])
        thread.start()
        thread.join()
        copy(target, source, length)

    with begun(daemon, many=tensors) as client:
        copied_by(monkeypatch, amid)
        handle = client.snapshot(1, must=True)
        assert handle.status == CAUSE + "many.0, many.1, many.2, many.3, many.4 and 4 more"


@pytest.mark.parametrize("local", [False, True])
def test_a_dtensor_and_its_local_part_count_for_themselves(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    def by_the_thread(part: torch.Tensor) -> None:
        write(part if local else sharded)

    with raising_group():
        sharded = DTensor.from_local(torch.zeros(100, 100), init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)
        with begun(daemon, w=sharded) as client:
            written_amid(monkeypatch, sharded._local_tensor, ALWAYS, by_the_thread)
            assert client.snapshot(1, must=True).status == CAUSE + "w"


@AMID_A_COPY
def test_a_write_that_is_under_way_at_the_last_byte_of_a_second_copy_is_found(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter moves when the write is over, which may be a moment after the copy."""
    average = torch.zeros(100, 100)

    def late(tensor: torch.Tensor) -> None:
        tensor.numpy()[:] += 1
        threading.Timer(0.05, write, (tensor,)).start()

    monkeypatch.setattr(races, "SETTLE_S", 0.5)
    with begun(daemon, average=average) as client:
        first = iter([write])
        left = written_amid(monkeypatch, average, 2, lambda tensor: next(first, late)(tensor))
        handle = client.snapshot(1, must=True)
        expected = average.clone()
        assert handle.wait("sealed", 30) == "durable"
        assert left == [0]
        assert bits_equal(stored(daemon.held[1, 1][0])["average"], expected), "torn"


@AMID_A_COPY
def test_who_was_caught_once_is_looked_at_more_closely_for_a_while(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of a later snapshot may end within a write, and its counter stand still."""
    average = torch.zeros(100, 100)

    def silently(tensor: torch.Tensor) -> None:
        tensor.numpy()[:] += 1

    with begun(daemon, average=average) as client:
        for step in range(1, races.QUIET_MAX + 2):
            with monkeypatch.context() as during:
                left = written_amid(during, average, 1, write if step == 1 else silently)
                handle = client.snapshot(step, must=True)
            expected = average.clone()
            assert handle.wait("sealed", 30) == "durable"
            assert left == [0]
            assert bits_equal(stored(daemon.held[1, step][0])["average"], expected), f"torn at {step}"
        assert not client._snapshots._races._caught, "nothing moved for so long that it is trusted again"


def test_one_number_cannot_be_torn(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of batches that a loader's thread moves all the time."""
    count = torch.zeros((), dtype=torch.int64)
    with begun(daemon, count=count) as client:
        written_amid(monkeypatch, count, ALWAYS)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"


def test_a_tensor_of_inference_mode_in_the_place_of_another_has_no_counter(daemon: RankDaemonDouble) -> None:
    module = nn.BatchNorm1d(WIDTH)
    with begun(daemon, module=module) as client:
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        with torch.inference_mode():
            module.running_mean = torch.ones(WIDTH)
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable", client.health().problems
        assert bits_equal(stored(daemon.held[1, 2][0])["module.running_mean"], torch.ones(WIDTH))


@AMID_A_COPY
def test_without_the_look_at_the_counters_it_is_torn(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_switches, "VERSIONS", False)
    average = torch.zeros(100, 100)
    with begun(daemon, average=average) as client:
        written_amid(monkeypatch, average, ALWAYS)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        assert len(stored(daemon.held[1, 1][0])["average"].unique()) == 2


@AMID_A_COPY
def test_the_wait_for_a_busy_thread_is_bounded(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: a few copies and as many short waits, whatever the thread does."""
    average = torch.zeros(1_000_000)
    with begun(daemon, average=average) as client:
        written_amid(monkeypatch, average, ALWAYS)
        began = time.monotonic()
        assert client.snapshot(1, must=True).status == CAUSE + "average"
        assert time.monotonic() - began < races.TRIES * races.SETTLE_MAX_S + 5
