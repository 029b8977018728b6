"""P15 for gradients: a snapshot amid an accumulation holds them when asked to, and else says once that it does not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ckptd_client import Client
from ckptd_client.session import READY
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ckptd.wire import rank as wire
from tests.node.client_training import begun, net
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until

ACCUMULATED = 4  # micro-batches to a step


@contextmanager
def training(
    daemon: RankDaemonDouble, *, restores: bool = True, **how: Any
) -> Iterator[tuple[Client, nn.Module, Optimizer]]:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, optimizer=optimizer, **how)
        if restores:
            client.restore()
        yield client, model, optimizer


def micro_batch(model: nn.Module, number: int) -> None:
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
    model(batch.to(next(model.parameters()).device)).square().mean().backward()


def accumulating(model: nn.Module, optimizer: Optimizer, numbers: range) -> None:
    """Micro-batches, and a step after every fourth."""
    for number in numbers:
        micro_batch(model, number)
        if (number + 1) % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_an_accumulation_goes_on_where_it_was(daemon: RankDaemonDouble) -> None:
    with training(daemon, gradients=True) as (client, model, optimizer):
        accumulating(model, optimizer, range(6))
        assert client.snapshot(6, must=True).wait("sealed", 30) == "durable"
    assert not daemon.messages(wire.Resize)
    accumulating(model, optimizer, range(6, 16))
    with training(daemon, restores=False, gradients=True) as (client, fresh, other):
        assert client.restore() == 6
    accumulating(fresh, other, range(6, 16))
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


def test_gradients_come_and_go_between_snapshots(daemon: RankDaemonDouble) -> None:
    with training(daemon, gradients=True) as (client, model, optimizer):
        for step, end in enumerate((6, 8, 11, 13, 16), 1):
            accumulating(model, optimizer, range(end - 3 if step > 1 else 0, end))
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
            held = {f.key for f in daemon.held[1, step][0].layout.fragments if f.key.endswith(".grad")}
            assert held == ({f"model.{n}.grad" for n, p in model.named_parameters() if p.grad is not None})
        micro_batch(model, 99)
        assert client.restore(step=2) == 2
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_micro_batch_is_progress(daemon: RankDaemonDouble) -> None:
    """Its snapshot was skipped: no optimizer step since the last."""
    with training(daemon, gradients=True) as (client, model, optimizer):
        accumulating(model, optimizer, range(4))
        changes: tuple[Callable[[], None], ...] = (
            lambda: micro_batch(model, 4),  # others than were there
            lambda: micro_batch(model, 5),  # written in place
            lambda: nn.init.zeros_(model.get_parameter("0.bias").grad),  # type: ignore[arg-type]
            optimizer.zero_grad,
        )
        for step, change in enumerate(changes, 1):
            change()
            until(lambda: client._session.grants, what="a grant")
            handle = client.snapshot(step)
            assert handle.taken, (step, handle.status)
            assert handle.wait("sealed", 30) == "durable"
        until(lambda: client._session.grants, what="a grant")
        assert client.snapshot(9).status == "skipped: no optimizer step since the last snapshot"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    return [text for text in said if "accumulation" in text]


def test_without_them_it_is_said_once(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    with training(daemon) as (client, model, optimizer):
        for step in range(1, 6):
            accumulating(model, optimizer, range(6 * step - 6, 6 * step))
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
    said = warnings(caplog)
    assert len(said) == 1, said
    assert "gradients=True" in said[0]


@pytest.mark.parametrize("restores", [True, False], ids=["restored", "begun by snapshot()"])
def test_the_first_snapshot_amid_an_accumulation_is_told_of(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, restores: bool
) -> None:
    with training(daemon, restores=restores) as (client, model, optimizer):
        if not restores:
            client.snapshot(0)
            until(lambda: client._session.phase == READY, what="the join in the background")
        accumulating(model, optimizer, range(ACCUMULATED))
        micro_batch(model, ACCUMULATED)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
    assert len(warnings(caplog)) == 1


def test_an_optimizer_of_another_thread_uses_none_of_them(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """They were read by its hook while this thread's backward pass wrote them: a segmentation fault, once in 100 runs."""
    unrelated = net()
    other = SGD(unrelated.parameters(), lr=0.1)
    micro_batch(unrelated, 1)
    with training(daemon) as (client, model, optimizer):
        accumulating(model, optimizer, range(ACCUMULATED))
        micro_batch(model, ACCUMULATED)
        for call in (other.step, other.zero_grad):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
    assert len(warnings(caplog)) == 1


def test_a_thread_that_trains_for_the_one_that_takes_snapshots_uses_them(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    with training(daemon) as (client, model, optimizer):
        for step in range(1, 4):
            thread = threading.Thread(target=accumulating, args=(model, optimizer, range(ACCUMULATED)))
            thread.start()
            thread.join()
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
    assert warnings(caplog) == []


@contextmanager
def reads_of_gradients(models: Iterable[nn.Module]) -> Iterator[list[tuple[int, int]]]:
    """Which model's, and by which thread."""
    held = {id(parameter): number for number, model in enumerate(models) for parameter in model.parameters()}
    real: Any = torch.Tensor.grad
    seen = []

    def read(parameter: nn.Parameter) -> Any:
        if id(parameter) in held:
            seen.append((held[id(parameter)], threading.get_ident()))
        return real.__get__(parameter)

    nn.Parameter.grad = property(read, lambda parameter, value: real.__set__(parameter, value))  # type: ignore[assignment]
    try:
        yield seen
    finally:
        del nn.Parameter.grad


def two_that_train(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], threads: Sequence[Executor]) -> None:
    for model, optimizer, thread in zip(models, optimizers, threads, strict=True):
        thread.submit(accumulating, model, optimizer, range(ACCUMULATED)).result()


def test_gradients_are_read_by_the_thread_that_trains_them(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """Two threads train a model each, and each one's optimizer read the gradients of both: a segmentation fault within 200 steps
    where the other's backward pass wrote them at that moment."""
    models = [net(), net()]
    optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
    registered = dict(zip(("first", "second", "one", "other"), [*models, *optimizers], strict=True))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other, begun(daemon, **registered) as client:
        two_that_train(models, optimizers, (one, other))
        with reads_of_gradients(models) as reads:
            two_that_train(models, optimizers, (one, other))
            assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        assert set(reads) == {(number, each.submit(threading.get_ident).result()) for number, each in enumerate((one, other))}
    assert warnings(caplog) == []


def test_a_thread_for_each_step_reads_none_of_anothers_gradients(daemon: RankDaemonDouble) -> None:
    """The number of a thread that trained the first model is often the next one's at once, which trains the second."""
    models = [net(), net()]
    optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
    with begun(daemon, **dict(zip(("first", "second", "one", "other"), [*models, *optimizers], strict=True))):
        for number in (0, 1, 0, 1, 0, 1):
            with reads_of_gradients(models) as reads, ThreadPoolExecutor(1) as thread:
                thread.submit(accumulating, models[number], optimizers[number], range(ACCUMULATED)).result()
            assert {whose for whose, _ in reads} == {number}


def test_gradients_from_before_a_restore_are_not_told_of(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    with training(daemon) as (client, model, optimizer):
        accumulating(model, optimizer, range(ACCUMULATED))
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        micro_batch(model, ACCUMULATED)
        assert client.restore() == 1
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
    assert warnings(caplog) == []


def snapshot_before_zero_grad(model: nn.Module, optimizer: Any, snapshot: Callable[[], None]) -> None:
    micro_batch(model, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    snapshot()
    optimizer.zero_grad()


def snapshot_after_zeros(model: nn.Module, optimizer: Any, snapshot: Callable[[], None]) -> None:
    micro_batch(model, 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    snapshot()


def snapshot_after_the_models_zero_grad(model: nn.Module, optimizer: Any, snapshot: Callable[[], None]) -> None:
    micro_batch(model, 1)
    optimizer.step()
    model.zero_grad()
    snapshot()


def snapshot_after_a_step_that_the_scaler_left_out(
    model: nn.Module, optimizer: Any, snapshot: Callable[[], None]
) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((2, 20), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    snapshot()
    optimizer.zero_grad()


def snapshot_after_a_change_of_dtype(model: nn.Module, optimizer: Any, snapshot: Callable[[], None]) -> None:
    """The gradients, which the step has used, go with the parameters."""
    model.to(torch.float32)
    micro_batch(model, 1)
    optimizer.step()
    model.to(torch.float64)
    snapshot()
    optimizer.zero_grad()


def snapshot_amid_two_optimizers(model: nn.Module, optimizer: Any, snapshot: Callable[[], None]) -> None:
    """A generator's loss reaches the discriminator's parameters; its gradients are dropped before they are used."""
    other = SGD(model.parameters(), lr=0.0)
    micro_batch(model, 1)
    optimizer.step()
    micro_batch(model, 2)
    other.step()
    snapshot()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [
        snapshot_before_zero_grad, snapshot_after_zeros, snapshot_after_the_models_zero_grad,
        snapshot_after_a_step_that_the_scaler_left_out, snapshot_after_a_change_of_dtype, snapshot_amid_two_optimizers,
    ],
)  # fmt: skip
def test_an_ordinary_loop_is_not_warned_of(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, loop: Callable[..., None]
) -> None:
    with training(daemon) as (client, model, optimizer):
        for step in range(1, 5):
            handles = []
            loop(model, optimizer, lambda step=step, handles=handles: handles.append(client.snapshot(step, must=True)))
            assert handles[0].wait("sealed", 30) == "durable"
    assert warnings(caplog) == []


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_the_gradients_of_a_scripted_module_are_looked_at(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """Its parameters hang in no dict, and restore() raised a bare AttributeError."""
    model = torch.jit.script(nn.Sequential(nn.Linear(20, 5)))
    optimizer = AdamW(model.parameters())
    with begun(daemon, model=model, optimizer=optimizer) as client:
        accumulating(model, optimizer, range(ACCUMULATED))
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        assert warnings(caplog) == []
        micro_batch(model, ACCUMULATED)
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
    assert len(warnings(caplog)) == 1


def test_gradients_of_a_step_that_was_not_made_are_dropped_by_a_restore(daemon: RankDaemonDouble) -> None:
    """The loop was left between backward() and step(), and went on from the snapshot: the next batch was added to them."""
    with training(daemon) as (client, model, optimizer):
        accumulating(model, optimizer, range(ACCUMULATED))
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        micro_batch(model, ACCUMULATED)
        assert client.restore(only="optimizer.*") == 1
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert client.restore() == 1
        assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_snapshot_in_a_hook_behind_the_step_is_not_amid_an_accumulation(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook of the optimizer's own comes before the one of all."""
    with training(daemon) as (client, model, optimizer):
        steps = iter(range(1, 4))
        optimizer.register_step_post_hook(lambda *_: client.snapshot(next(steps), must=True).wait("sealed", 30))
        for step in range(3):
            accumulating(model, optimizer, range(step * ACCUMULATED, (step + 1) * ACCUMULATED))
    assert warnings(caplog) == []
    assert len(daemon.held) == 3
