"""``torch.utils.swap_tensors`` gives a tensor another content and another type under the same identity (FSDP2's ``model.cpu()``,
``set_swap_module_params_on_conversion``). It refuses whatever has a weak reference, so the client holds none (P5)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ckptd_client import Client
from ckptd_client.handles import Handle
from torch import nn

from ckptd.core import failpoint
from tests.node.client_training import Training, assert_same, begun, restored
from tests.node.rank_daemon_double import RankDaemonDouble

UNWRAPPED = getattr(torch.utils.swap_tensors, "__wrapped__", torch.utils.swap_tensors)  # as who imported it before ckptd


@pytest.fixture(autouse=True)
def _conversions() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)
    failpoint.arm("")


def everything(training: Training) -> dict[str, torch.Tensor]:
    """All that hangs in a training, not cloned; the gradients, too."""
    found = dict(training.model.state_dict(keep_vars=True))
    for name, parameter in training.model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in training.optimizer.state[parameter].items()}
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
    return found


def held_weakly(training: Training) -> list[str]:
    return [name for name, tensor in everything(training).items() if weakref.getweakrefs(tensor)]


def swapped(training: Training) -> None:
    """Another content in the same tensors."""
    for parameter in training.model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.randn_like(parameter)))


def converted(training: Training) -> None:
    training.model.double()
    training.optimizer.state.clear()


def of_another_class(training: Training) -> None:
    class Marked(nn.Parameter):
        pass

    torch.utils.swap_tensors(training.model[0].weight, Marked(torch.randn(training.width, training.width)))


def test_no_tensor_of_the_trainers_is_held_weakly(daemon: RankDaemonDouble) -> None:
    """Neither while a snapshot is copied nor after it, nor for an audit or a look at gradients, nor after close()."""
    training, found = Training(), []
    with restored(daemon, training) as client:
        found += held_weakly(training)
        for step in range(1, 4):
            training.step()
            found += held_weakly(training)
            handle = client.snapshot(step, must=True)
            found += held_weakly(training)
            assert handle.wait("sealed", 30) == "durable"
            found += held_weakly(training)
        client.snapshot(9)
        found += held_weakly(training)
    assert found + held_weakly(training) == []


@pytest.mark.parametrize("change", [swapped, converted, of_another_class], ids=lambda change: change.__name__)
@pytest.mark.parametrize("stepping", [False, True])
def test_what_was_swapped_is_captured_next(
    daemon: RankDaemonDouble, change: Callable[[Training], None], stepping: bool
) -> None:
    """Also when no optimizer stepped since: the swap shows that there is something new."""
    training = Training()
    with restored(daemon, training, state_bytes=1 << 22) as client:
        for step in (1, 2):
            training.step()
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        refused = tried(change, training)
        assert not refused
        if stepping:
            training.model.zero_grad()
            sample = torch.randn(4, training.width, dtype=training.model[2].weight.dtype)
            training.model(sample).square().mean().backward()
            training.optimizer.step()
        expected = training.tensors()
        handle = client.snapshot(3)
        assert "no optimizer step" not in handle.status
        if not handle.taken:
            handle = client.snapshot(3, must=True)
        assert handle.wait("sealed", 30) == "durable", handle.status
    assert_same(daemon.held[1, 3][0], expected)


def tried(change: Callable[[Training], None], training: Training) -> str:
    try:
        change(training)
    except RuntimeError as error:
        return str(error)
    return ""


def swapped_amid_its_copy(client: Client, training: Training, step: int) -> tuple[Handle, dict[str, torch.Tensor], bool]:
    """A snapshot of the next step, what was there when it was called, and whether it was being copied then."""
    training.step()
    expected = training.tensors()
    failpoint.arm("capture.tensor:sleep=0.05")
    handle = client.snapshot(step, must=True)
    copied = client._engine._all_copied()
    refused = tried(swapped, training)
    assert not refused
    failpoint.arm("")
    return handle, expected, not copied


def test_a_swap_waits_until_a_snapshot_is_copied(daemon: RankDaemonDouble) -> None:
    """As an optimizer's step does: the snapshot is neither torn nor lost, and what was swapped needs no copy before snapshot()
    returns from then on."""
    training = Training(300)
    with restored(daemon, training) as client:
        for step in range(1, 4):
            handle, expected, amid = swapped_amid_its_copy(client, training, step)
            assert amid, "in the background"
            assert handle.wait("sealed", 30) == "durable", handle.status
            assert_same(daemon.held[1, step][0], expected)


def test_a_swap_that_nobody_saw_tears_nothing(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imported the function before ckptd did swaps past it. The snapshot is void or holds what was there."""
    monkeypatch.setattr(torch.utils, "swap_tensors", UNWRAPPED)
    training, sealed = Training(300), 0
    with restored(daemon, training) as client:
        for step in range(1, 5):
            handle, expected, _ = swapped_amid_its_copy(client, training, step)
            status = handle.wait("sealed", 30)
            assert status == "durable" or status.startswith("void: written before the fence"), status
            if status == "durable":
                assert_same(daemon.held[1, step][0], expected)
                sealed += 1
    assert sealed


def test_frozen_parameters_may_be_swapped(daemon: RankDaemonDouble) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        for step in range(1, 4):
            trained(model, optimizer)
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.randn(200, 200), requires_grad=False))
        trained(model, optimizer)
        expected = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
        assert client.snapshot(4, must=True).wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 4][0], expected)


def trained(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 200)).square().mean().backward()
    optimizer.step()


def test_a_restore_loads_into_what_was_swapped(daemon: RankDaemonDouble) -> None:
    training = Training()
    with restored(daemon, training) as client:
        training.step()
        expected = training.tensors()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        refused = tried(swapped, training)
        assert not refused
        assert client.restore() == 1
        found = training.tensors()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_client_is_left_without_a_trace(daemon: RankDaemonDouble) -> None:
    training = Training()
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=training.model, optimizer=training.optimizer)
        client.restore()
        training.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
    assert not tried(lambda t: t.model.half(), training)  # type: ignore[func-returns-value]


def test_a_sparse_gradient_is_no_obstacle(daemon: RankDaemonDouble) -> None:
    """It has no storage of its own by which it could be told from another."""
    model = nn.Embedding(300, 20, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        for step in range(1, 4):
            model(torch.tensor([1, 2, 2])).sum().backward()
            optimizer.step()
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
            assert not weakref.getweakrefs(model.weight.grad)
            assert client.snapshot(step + 1).status.startswith("skipped")
            optimizer.zero_grad(set_to_none=step == 1)
