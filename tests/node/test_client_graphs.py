"""Training that a graph replays, on the simulated device and by torch's neutral class: nothing of ours breaks its capture, no
replay is missed, and none tears a snapshot (design D16)."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from ckptd_client import Client, Handle, accelerator, graphs
from ckptd_client.device import Batch
from torch import nn

from ckptd.core.errors import CkptdError
from tests.accelerator import device
from tests.accelerator.device import simulated
from tests.node.client_training import assert_same, begun, bits_equal
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until

pytestmark = device.NEEDED
device.load_first()
STEPS = 6
LOOKS = 30  # at whether copies have arrived


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    accelerator._known.clear()
    with simulated():
        yield
    accelerator._known.clear()


@contextmanager
def unseen() -> Iterator[None]:
    """As before the first ``connect()`` of the process, after which torch's class is wrapped."""
    kind, names = torch.accelerator.Graph, ("capture_begin", "capture_end")  # type: ignore[attr-defined]
    wrapped = {name: getattr(kind, name) for name in names}
    try:
        for name, method in wrapped.items():
            setattr(kind, name, inspect.unwrap(method))
        yield
    finally:
        for name, method in wrapped.items():
            setattr(kind, name, method)


class Graphed:
    """A training step, whole or without its optimizer, on a stream of its own."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.BatchNorm1d(256), nn.Linear(256, 3)).to("sim")
        self.optimizer = optimizer(self.model.parameters())
        self.batch = torch.randn(32, 64, device="sim")
        self.stream = torch.Stream("sim")
        self.graph = torch.accelerator.Graph()  # type: ignore[attr-defined]
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            self.forward()
            self.optimizer.step()
        torch.accelerator.synchronize()

    def forward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()

    def captures(self, *, optimizer: bool) -> Graphed:
        with self.stream, self.graph:
            self.forward()
            if optimizer:
                self.optimizer.step()
        return self

    def replays(self) -> None:
        self.graph.replay()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": value.cpu() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"optimizer.model.{name}.{key}"] = value.cpu()
        return found


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, capturable=True)


def trained(client: Client, daemon: RankDaemonDouble, training: Graphed, step: Callable[[], None]) -> list[str]:
    """Each step is followed by its snapshot, and the next one by no wait. What became of them; none is torn."""
    expected, handles = {}, {}
    for number in range(1, STEPS + 1):
        step()
        expected[number] = training.tensors()
        until(lambda: client._session.grants, what="a grant")
        handles[number] = client.snapshot(number)
    said = [handle.wait("sealed", 30) if handle.taken else handle.status for handle in handles.values()]
    for (_, number), ranks in daemon.held.items():
        assert_same(ranks[0], expected[number])
    return said


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("before", [True, False], ids=["captured before connect", "captured after it"])
def test_each_replay_of_a_whole_step_is_a_step_and_tears_nothing(
    daemon: RankDaemonDouble, optimizer: Callable[..., torch.optim.Optimizer], before: bool
) -> None:
    training = Graphed(optimizer)
    if before:
        with unseen():
            training.captures(optimizer=True)
    device.tune(copy_us_per_mib=50_000)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        if not before:
            training.captures(optimizer=True)
        assert trained(client, daemon, training, training.replays) == ["durable"] * STEPS
        report = client.health()
        assert report.problems == []
        assert list(report.facts["synchronous"]) == ["optimizer"]


def test_wait_captures_no_step_of_a_graph_late(daemon: RankDaemonDouble) -> None:
    """On a real device 53 of 60 steps of 11 ms were skipped; `wait()` at the end said "durable" of step 46."""
    daemon.granting = "asked"
    training = Graphed(adam)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.captures(optimizer=True)
        for number in range(1, 4):
            training.replays()
            expected = training.tensors()
            assert client.snapshot(number).status.startswith("skipped")
        assert client.wait("sealed", 30).startswith("skipped") and daemon.held == {}
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"
    torch.accelerator.synchronize()  # before the memory of what was replayed is freed
    assert_same(daemon.held[1, 3][0], expected)


def test_wait_does_not_spin_on_a_void_step_that_a_graph_has_left(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """287,470 times in 4 s."""
    training = Graphed(adam)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.captures(optimizer=True)
        training.replays()
        client.snapshot(1, must=True)
        until(lambda: client._engine.idle, what="the end of the capture")
        client._newest = Handle(1, "void: for this test", client._wait_for_handle)
        training.replays()
        asked: list[Handle] = []
        monkeypatch.setattr(client, "_captures_again", lambda void, deadline: asked.append(void))
        assert client.wait("durable", 5).startswith("void")
    assert asked == []


def test_a_replay_right_behind_the_first_snapshot_tears_nothing(daemon: RankDaemonDouble) -> None:
    """Nobody knows yet that this graph makes steps."""
    with unseen():
        training = Graphed(sgd).captures(optimizer=True)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        device.tune(copy_us_per_mib=200_000)
        expected = training.tensors()
        handle = client.snapshot(1, must=True)
        training.replays()
        assert handle.wait("sealed", 30) == "durable"
        assert_same(daemon.held[1, 1][0], expected)


def test_a_graph_of_forward_and_backward_pass_is_held_back_by_no_capture(daemon: RankDaemonDouble) -> None:
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.captures(optimizer=False)

        def step() -> None:
            training.replays()
            training.optimizer.step()

        assert trained(client, daemon, training, step) == ["durable"] * STEPS
        assert client.health().facts["synchronous"] == {}
        step()
        before = client.health().facts["device_fence_s"]
        device.tune(copy_us_per_mib=200_000)
        client.snapshot(STEPS + 1, must=True)
        training.replays()
        torch.accelerator.synchronize()
        assert client.health().facts["device_fence_s"] == before


def test_a_graph_is_captured_while_a_snapshot_is_on_its_way(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread asks a device for its events, or for memory, breaks it."""
    done, looked = Batch.done, list[Batch]()
    monkeypatch.setattr(Batch, "done", lambda batch: (looked.append(batch), done(batch))[1])
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.optimizer.step()
        device.tune(copy_us_per_mib=500_000)
        handle = client.snapshot(1, must=True)
        until(lambda: client._engine._jobs and client._engine._jobs[0].enqueued, what="copies on their way")
        with training.stream:
            training.graph.capture_begin()
            training.model(training.batch)
            looked.clear()
            until(lambda: len(looked) > LOOKS, what="looks of the capture thread")
            training.graph.capture_end()
        assert handle.wait("sealed", 30) == "durable"


def test_a_capture_that_is_given_up_keeps_our_threads_away_no_longer(daemon: RankDaemonDouble) -> None:
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.optimizer.step()
        graph = torch.accelerator.Graph()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="default stream"):
            graph.capture_begin()
        with training.stream:
            graph.capture_begin()
            with pytest.raises(RuntimeError, match="not permitted"):
                torch.accelerator.synchronize()
            with pytest.raises(RuntimeError, match="broken"):
                graph.capture_end()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"


def registering(nbytes: int) -> tuple[threading.Thread, threading.Event]:
    """A thread of ours that registers so much."""
    done = threading.Event()

    def register() -> None:
        accelerator.of(torch.device("sim", 0)).register(1 << 40, nbytes)
        done.set()

    thread = threading.Thread(target=register, name=f"{accelerator.OURS}test", daemon=True)
    thread.start()
    return thread, done


def test_a_capture_waits_for_what_our_threads_have_begun(daemon: RankDaemonDouble) -> None:
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer):
        device.tune(register_us_per_mib=300_000)
        thread, done = registering(1 << 20)
        until(lambda: graphs._known.inside, what="its call")
        with training.stream:
            training.graph.capture_begin()
            assert done.is_set()
            training.graph.capture_end()
        thread.join()


def test_slots_that_are_registered_while_a_graph_is_captured_wait_for_its_end(daemon: RankDaemonDouble) -> None:
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client, training.stream:
        training.graph.capture_begin()
        training.model(training.batch)
        thread, done = registering(4096)
        assert not done.wait(0.1)
        training.graph.capture_end()
        assert done.wait(30)
        thread.join()
        assert client.health().problems == []


def test_a_snapshot_within_a_capture_is_skipped_in_words_and_the_next_one_is_right(daemon: RankDaemonDouble) -> None:
    """What it copies would be recorded, and copied at the replays."""
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        with training.stream:
            training.graph.capture_begin()
            training.forward()
            training.optimizer.step()
            assert client.snapshot(1, must=True).status == "skipped: a graph is being captured"
            training.graph.capture_end()
        training.replays()
        expected = training.tensors()
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
        assert_same(daemon.held[1, 2][0], expected)


def rescaled(training: Graphed) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.9)


@pytest.mark.parametrize("told", ["not at all", "by fence() within the capture", "by stepped() behind each replay"])
def test_a_graph_that_writes_without_an_optimizer_is_known_by_its_counters(daemon: RankDaemonDouble, told: str) -> None:
    """A weight that is rescaled, an EMA, a functional optimizer. A replay moves no counter, but its capture did."""
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.optimizer.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        with training.stream:
            training.graph.capture_begin()
            if told.startswith("by fence"):
                client.fence()
            rescaled(training)
            training.graph.capture_end()
        device.tune(copy_us_per_mib=200_000)
        if told.startswith("by stepped"):
            client.stepped()
        training.optimizer.step()
        expected = training.tensors()
        handle = client.snapshot(2, must=True)
        training.replays()
        assert handle.wait("sealed", 30) == "durable"
        assert_same(daemon.held[1, 2][0], expected)


@contextmanager
def copied_slowly(daemon: RankDaemonDouble, training: Graphed) -> Iterator[tuple[Client, Handle]]:
    """A client, and its first snapshot, on its way; it is right in the end."""
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.optimizer.step()
        device.tune(copy_us_per_mib=200_000)
        expected = training.tensors()
        handle = client.snapshot(1, must=True)
        yield client, handle
        if not client._closed:
            assert handle.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, 1][0], expected)


def right_beside(training: Graphed, call: Callable[[], object]) -> bool:
    """A forward pass is captured, with ``call`` within, and replayed: does it give what the model gives?"""
    with training.stream:
        training.graph.capture_begin()
        found = training.model(training.batch)
        call()
        training.graph.capture_end()
        training.graph.replay()
        expected = training.model(training.batch)
    torch.accelerator.synchronize()
    return bits_equal(found.cpu(), expected.cpu())


def test_a_capture_within_which_the_user_fences_is_not_broken_by_a_snapshot_on_its_way(daemon: RankDaemonDouble) -> None:
    """The fence would make the graph wait for what is not in it."""
    training = Graphed(sgd)
    with copied_slowly(daemon, training) as (client, _):
        assert right_beside(training, client.fence)


@pytest.mark.parametrize("mode", ["global", "relaxed"])
def test_a_step_that_is_only_captured_makes_no_snapshot_void(daemon: RankDaemonDouble, mode: str) -> None:
    """It moves the counters of what it will write when it is replayed."""
    training = Graphed(adam)
    training.graph = torch.accelerator.Graph(capture_error_mode=mode)  # type: ignore[attr-defined]
    with copied_slowly(daemon, training) as (_, handle):
        training.captures(optimizer=True)
    assert handle.status == "durable"


def refused(client: Client) -> None:
    with pytest.raises(CkptdError, match="within a graph's capture"):
        client.restore()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.wait("sealed", 0.1),
        lambda client: client.snapshot(2, must=True),
        lambda client: client.register(more=nn.Linear(2, 2)),
        lambda client: client.close(),
        lambda client: client.steps(),
        refused,
    ],
    ids=["wait", "must", "register", "close", "steps", "restore"],
)
def test_no_call_within_a_capture_breaks_it(daemon: RankDaemonDouble, call: Callable[[Client], object]) -> None:
    training = Graphed(sgd)
    with copied_slowly(daemon, training) as (client, _):
        client.fence()
        assert right_beside(training, lambda: call(client))


def test_health_tells_of_a_capture_that_does_not_end_and_breaks_none(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Graphed(sgd)

    def asked() -> None:
        assert client.health().ok
        monkeypatch.setattr("ckptd_client.client.CAPTURE_LONG_S", 0.0)
        (problem,) = client.health().problems
        assert "snapshots wait for its capture_end()" in problem

    with copied_slowly(daemon, training) as (client, _):
        client.fence()  # the stream waits, and how long it did is asked of the device
        assert right_beside(training, asked)
        assert client.health().ok


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_snapshots_end_beside_a_capture_that_other_threads_cannot_break(daemon: RankDaemonDouble, mode: str) -> None:
    training = Graphed(sgd)
    training.graph = torch.accelerator.Graph(capture_error_mode=mode)  # type: ignore[attr-defined]
    with copied_slowly(daemon, training) as (client, handle):
        client.fence()
        assert right_beside(training, lambda: until(lambda: handle.status == "durable", timeout=10, what="its end"))


def test_a_second_capture_into_a_graph_that_is_being_captured_raises_and_breaks_nothing(daemon: RankDaemonDouble) -> None:
    training = Graphed(sgd)
    with begun(daemon, model=training.model, optimizer=training.optimizer), training.stream:
        training.graph.capture_begin()
        with pytest.raises(RuntimeError, match="captured already"):
            training.graph.capture_begin()
        assert graphs._known.captures[training.graph].guarded
        training.graph.capture_end()
