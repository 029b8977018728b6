"""What a real accelerator punishes, on the simulated one (design D16): each rule of captures by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ckptd_client import Client, accelerator, bounce, segments
from ckptd_client import device as captures
from ckptd_client.accelerator import REGISTRATIONS, Registration
from ckptd_client.capture import Engine
from ckptd_client.copying import Copy
from torch import nn

from ckptd.core import failpoint
from ckptd.core.errors import CkptdError
from ckptd.wire.rank import GaveUp
from tests.accelerator import device
from tests.accelerator.device import simulated
from tests.node.client_training import all_copied, assert_same, begun
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.node.test_client_accelerator import Training, Turned, stepped
from tests.waiting import until

pytestmark = device.NEEDED
device.load_first()


@pytest.fixture(autouse=True)
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    accelerator._known.clear()
    with simulated(request.node):
        yield
    failpoint.arm("")


def registrations(register: Any) -> None:
    REGISTRATIONS[device.KIND] = lambda: Registration(register, device.ops.unregister_host)


def train(client: Client, training: Training, steps: int) -> None:
    """From step 1 on, each with its snapshot."""
    for step in range(1, steps + 1):
        stepped(client, training, step)


def test_every_thread_of_ours_is_on_the_ranks_device(daemon: RankDaemonDouble) -> None:
    torch.accelerator.set_device_index(1)
    try:
        device.fresh()
        training = Training("sim:1", 64)
        with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
            train(client, training, 3)
        assert device.ops.contexts() == [1]
    finally:
        torch.accelerator.set_device_index(0)


def test_memory_is_registered_by_the_capture_thread_and_no_grant_comes_before_it_is(daemon: RankDaemonDouble) -> None:
    go, threads = threading.Event(), set[str]()

    def register(address: int, nbytes: int) -> None:
        threads.add(threading.current_thread().name)
        assert go.wait(30)
        device.ops.register_host(address, nbytes)

    registrations(register)
    training = Training("sim", 64)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        until(lambda: threads, what="a registration")
        training.step()
        assert not client.snapshot(1).taken
        training.step()  # nothing holds the optimizer up
        go.set()
        expected = training.tensors()
        client.snapshot(2, must=True)
        assert client.wait("sealed", 30) == "durable"
    assert threads == {"ckptd-capture"}
    assert_same(daemon.held[1, 2][0], expected)


def test_a_segment_is_registered_in_pieces_and_no_copy_lies_across_two(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "REGISTERED_BYTES", 65536)
    sizes: list[int] = []

    def register(address: int, nbytes: int) -> None:
        sizes.append(nbytes)
        device.ops.register_host(address, nbytes)

    registrations(register)
    training = Training("sim", 256)
    training.model.add_module("turned", Turned(300))
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        expected = stepped(client, training)
    assert len(sizes) > 3 and max(sizes) == 65536
    assert_same(daemon.held[1, 1][0], expected)


@pytest.mark.parametrize("even_a_ring", [True, False])
def test_where_memory_cannot_be_registered_copies_go_through_a_ring(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, even_a_ring: bool
) -> None:
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", 65536)

    def register(address: int, nbytes: int) -> None:
        device.tune(registrations=0)
        try:
            device.ops.register_host(address, nbytes)
        finally:
            device.tune(registrations=-1 if even_a_ring else 0)

    registrations(register)
    training = Training("sim", 256)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        for step in range(1, 4):
            expected = stepped(client, training, step)
            assert_same(daemon.held[1, step][0], expected)
    assert daemon.voided == {}, "the error of the registration is nobody else's"


def test_nothing_large_is_cloned_on_the_device(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be written before the side stream gets to it is copied before training goes on instead."""
    monkeypatch.setattr(captures, "CLONE_BYTES_MAX", 100_000)
    table = torch.randn(500, 500, device="sim")  # registered as it is: whoever writes it asks nobody
    with begun(daemon, table=table) as client:
        device.ops.forget_peak(0)
        before = device.ops.peak(0)
        expected = table.cpu()
        with device.held():
            client.snapshot(1, must=True)
            table.add_(1)
        assert device.ops.peak(0) - before < table.nbytes // 10
        assert client.wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 1][0], {"table": expected})


def test_a_large_copy_that_cannot_be_enqueued_fails_by_name_and_gives_its_slot_back(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After what was enqueued before has arrived: the slot is the next one's then."""
    monkeypatch.setattr(captures, "CLONE_BYTES_MAX", 100_000)
    copy_one = captures.Batch._copy_one

    def half(batch: captures.Batch, source: torch.Tensor, copy: Copy) -> Iterator[int]:
        if copy.key == "second":
            raise RuntimeError("half way")
        return copy_one(batch, source, copy)

    tables = {name: torch.randn(500, 500, device="sim") for name in ("first", "second")}
    with begun(daemon, **tables) as client:
        device.tune(copy_us_per_mib=50_000)
        with monkeypatch.context() as failing:
            failing.setattr(captures.Batch, "_copy_one", half)
            assert "half way" in client.snapshot(1, must=True).status
        expected = {name: table.cpu() for name, table in tables.items()}
        client.snapshot(2, must=True)
        assert client.wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 2][0], expected)


def test_a_large_copy_on_its_way_keeps_its_slot_also_where_the_rest_is_stopped(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grant is taken back before the capture thread has enqueued anything."""
    monkeypatch.setattr(captures, "CLONE_BYTES_MAX", 100_000)
    table = torch.randn(500, 500, device="sim")
    with begun(daemon, table=table) as client:
        monkeypatch.setattr(client._engine, "_not_enqueued", lambda: None)
        with device.held():
            handle = client.snapshot(1, must=True)
            daemon.take_back(handle.grant)
            until(lambda: any(job.stop for job in client._engine._jobs), what="the word that it is void")
            assert client._engine._jobs[0].on_device
            assert not any(message.grant == handle.grant for message in daemon.messages(GaveUp))
        until(lambda: not client._engine._jobs, what="its end")


def test_a_capture_that_fails_half_way_keeps_its_slot_until_its_copies_are_over(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_one = captures.Batch._copy_one

    def four(batch: captures.Batch, source: torch.Tensor, copy: Copy) -> Iterator[int]:
        if not left:
            raise RuntimeError("half way")
        left.pop()
        return copy_one(batch, source, copy)

    training = Training("sim", 64)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
        training.step()
        with device.held():
            left = [1, 2, 3]
            monkeypatch.setattr(captures.Batch, "_copy_one", four)
            handle = client.snapshot(2)
            assert handle.taken
            until(lambda: any(job.stop for job in client._engine._jobs), what="a failed capture")
            job = client._engine._jobs[0]
            assert job.on_device and not job.over, "what was enqueued is still to come"
        assert handle.wait("sealed", 30) == "void: device copies failed: half way"


def test_a_device_that_fails_is_told_of_each_snapshot_and_nothing_hangs(daemon: RankDaemonDouble) -> None:
    training = Training("sim", 64)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        with device.held():
            handle = client.snapshot(1, must=True)
            until(lambda: client._engine._jobs and client._engine._jobs[0].enqueued, what="copies on their way")
            device.ops.fail("an unspecified launch failure")
        until(lambda: not client._engine._jobs, what="its end")
        assert "an unspecified launch failure" in handle.status
        assert "an unspecified launch failure" in client.snapshot(2, must=True).status


def test_the_device_is_let_go_of_without_the_sessions_lock(daemon: RankDaemonDouble) -> None:
    free: list[bool] = []

    def look() -> None:
        free.append(client._session.changed.acquire(timeout=5))
        if free[-1]:
            client._session.changed.release()

    def unregister(address: int) -> None:
        asked = threading.Thread(target=look)
        asked.start()
        asked.join()
        device.ops.unregister_host(address)

    REGISTRATIONS[device.KIND] = lambda: Registration(device.ops.register_host, unregister)
    training = Training("sim", 64)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
        training.model.register_buffer("more", torch.zeros(1 << 20, device="sim"))  # other slots are needed
        training.step()
        client.snapshot(2, must=True)
        assert client.wait("sealed", 30) == "durable"
    assert free and all(free)


def test_kinds_and_numbers_of_devices_are_refused_in_words(daemon: RankDaemonDouble) -> None:
    with Client.connect("job", socket=daemon.path) as client:
        client.register(here=torch.ones(2, device="sim:0"), there=torch.ones(2, device="sim:1"))
        with pytest.raises(CkptdError, match="one device per rank"):
            client.restore()
    del REGISTRATIONS[device.KIND]
    with Client.connect("job", socket=daemon.path) as client, pytest.raises(CkptdError, match="tensors on sim cannot be captured"):
        client.register(here=torch.ones(2, device="sim"))


def test_an_audit_digests_on_the_side_stream_and_cries_no_wolf(daemon: RankDaemonDouble) -> None:
    """Nothing is brought to the device for it, and no write is enqueued behind it before it is done."""
    daemon.policy["audit_every"] = 1
    training = Training("sim", 256)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        train(client, training, 3)
        training.step()
        handle = client.snapshot(4, must=True)
        all_copied(client)
        training.model[0].weight.data.add_(1)  # moves no counter
        training.optimizer.step()  # the host has not waited for that
        assert handle.wait("sealed", 30) == "void: hidden write: model.0.weight"
        expected = training.tensors()
        client.snapshot(5, must=True)  # from now on it is copied at once
        training.model[0].weight.data.add_(1)
        training.step()
        assert client.wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 5][0], expected)


def test_a_write_past_the_counters_of_what_is_frozen_is_found_by_its_samples(daemon: RankDaemonDouble) -> None:
    training = Training("sim", 256)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        train(client, training, 2)
        training.frozen.weight.data.add_(1)
        training.step()
        handle = client.snapshot(3, must=True)
        training.step()
        assert handle.wait("sealed", 30).startswith("void: hidden write: model.frozen.weight")


def test_who_was_aside_beside_another_thread_comes_back_to_its_own_stream() -> None:
    """P5: training that has a stream of its own went on upon another one after an audit, beside the kernels before."""
    one, training = accelerator.of(torch.device(device.KIND)), torch.Stream(device.KIND)
    came, may_go = threading.Event(), threading.Event()

    def other() -> None:
        with one.aside():
            came.set()
            may_go.wait(20)

    thread = threading.Thread(target=other)
    with training:
        with one.aside():
            thread.start()
            assert came.wait(20)
        assert torch.accelerator.current_stream() == training
        may_go.set()
        thread.join()


def test_a_thread_of_the_programs_that_fences_asks_its_own_device_nothing() -> None:
    """A thread begins on device 0, and the rank's is another: that one would hold a context of every rank."""
    one = accelerator.Accelerator(torch.device(device.KIND, 1))
    one.hold_back(one.event())
    device.fresh()
    thread = threading.Thread(target=one.hold_back, args=(one.event(),))  # which looks how long the one before was
    thread.start()
    thread.join()
    assert 0 not in device.ops.contexts()


@pytest.mark.writes_what_is_read
@pytest.mark.parametrize("times", [1, 100])
def test_what_is_too_large_to_be_cloned_is_copied_again_where_another_thread_writes_it(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """P1: its kernel comes between ours on the stream that both train on, before that waits for the copy."""
    monkeypatch.setattr(captures, "CLONE_BYTES_MAX", 1024)
    average, left, copy_one = torch.zeros(256, 256, device=device.KIND), [times], captures.Batch._copy_one

    def amid(batch: captures.Batch, source: torch.Tensor, copy: Copy) -> Iterator[int]:
        yield from copy_one(batch, source, copy)
        if copy.key == "average" and left[0]:
            left[0] -= 1
            other = threading.Thread(target=average.add_, args=(1,))
            other.start()
            other.join()

    monkeypatch.setattr(captures.Batch, "_copy_one", amid)
    with begun(daemon, average=average) as client:
        handle = client.snapshot(1, must=True)
        if times == 1:
            assert handle.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, 1][0], {"average": average.cpu()})
        else:
            assert handle.status == "failed: written by another thread while it was copied: average"


def test_what_alone_lies_on_the_device_is_compared_behind_what_training_asked_for(daemon: RankDaemonDouble) -> None:
    """P1: a frozen encoder below a head on the host. Nothing was copied, so nothing waited: a write past the counters that the
    device had yet to make was not found, and the snapshot sealed without it."""
    model = nn.ModuleList([nn.Linear(256, 256, bias=False).to(device.KIND).requires_grad_(False), nn.Linear(256, 3)])
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def step() -> None:
        model[1](torch.randn(2, 256)).sum().backward()
        optimizer.step()

    with begun(daemon, model=model, optimizer=optimizer) as client:
        step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        step()
        with device.held():
            model[0].weight.data.add_(1)
            handle = client.snapshot(2, must=True)
            step()
        assert handle.wait("sealed", 30).startswith("void: hidden write: model.0.weight")


@pytest.mark.writes_what_is_read
def test_little_is_on_its_way_at_once_and_a_fences_timeout_calls_back_the_rest(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "CHUNK_BYTES", 65536)
    monkeypatch.setattr(captures, "WINDOW_BYTES", 131072)
    daemon.policy["fence_timeout_s"] = 0.3
    training, copied = Training("sim", 256), list[int]()
    copy_one = captures.Batch._copy_one

    def counted(batch: captures.Batch, source: torch.Tensor, copy: Copy) -> Iterator[int]:
        for nbytes in copy_one(batch, source, copy):
            copied.append(nbytes)
            yield nbytes

    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        train(client, training, 2)
        training.step()
        monkeypatch.setattr(captures.Batch, "_copy_one", counted)
        with device.held():
            handle = client.snapshot(3, must=True)
            training.optimizer.step()
        assert 131072 <= sum(copied) < 131072 + 65536 * 2
        assert handle.wait("sealed", 30) == "void: fence timeout"
        monkeypatch.setattr(captures.Batch, "_copy_one", copy_one)
        daemon.policy["fence_timeout_s"] = 30.0
        expected = stepped(client, training, 4)
    assert_same(daemon.held[1, 4][0], expected)


def test_what_training_waits_for_copies_on_the_device_is_counted(daemon: RankDaemonDouble) -> None:
    training = Training("sim", 256)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        train(client, training, 2)
        training.step()
        device.tune(copy_us_per_mib=100_000)
        before = client.health().facts["fence_s"]
        client.snapshot(3, must=True)
        training.optimizer.step()
        assert client.wait("sealed", 30) == "durable"
        torch.accelerator.synchronize()
        facts = client.health().facts
        assert facts["device_fence_s"] > 0.02
        assert facts["fence_s"] - before >= facts["device_fence_s"]


def test_events_of_waits_that_are_over_are_kept_for_nobody(daemon: RankDaemonDouble) -> None:
    """Also where nobody asks how long they took: a process has so many events."""
    training = Training("sim", 64)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        train(client, training, 12)
        torch.accelerator.synchronize()
        training.step()
    assert len(accelerator.of(torch.device("sim"))._held_back) <= 2


def test_copies_that_arrive_while_the_thread_lies_down_are_sealed(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, stepped_on = Engine._task, threading.Event()

    def arriving(engine: Engine) -> Any:
        found = task(engine)
        if found is None and stepped_on.is_set() and engine._jobs:
            device.ops.hold(0, False)
            until(lambda: not engine._jobs[0].on_device, what="the copies")
        return found

    training = Training("sim", 64)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        train(client, training, 1)
        training.step()
        monkeypatch.setattr(Engine, "_task", arriving)
        device.ops.hold(0, True)
        client.snapshot(2, must=True)
        training.optimizer.step()
        stepped_on.set()
        assert client.wait("sealed", 10) == "durable"
