"""Captures from an accelerator (D6): exact under load, and the host never waits. On the simulated one, and on CUDA where there
is one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from ckptd_client import Client, _switches
from torch import nn

from ckptd.core import failpoint
from tests.accelerator import device
from tests.accelerator.device import simulated
from tests.node.client_training import assert_same, begun, bits_equal, stored
from tests.node.rank_daemon_double import RankDaemonDouble

QUEUED_S = 0.2
WIDTH = 256

device.load_first()


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


@pytest.fixture(params=[pytest.param("sim", marks=device.NEEDED), "cuda"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device's kind. On the simulated one nothing may race."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        yield "cuda"
        return
    with simulated() as kind:
        yield kind


class Training:
    def __init__(self, kind: str, width: int, **adamw: bool) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3)).to(kind)
        self.frozen = nn.Linear(width, width).to(kind).requires_grad_(False)
        self.model.add_module("frozen", self.frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, **adamw)
        self.kind, self.width = kind, width

    def step(self) -> None:
        self.optimizer.zero_grad()
        hidden = self.model[1](self.model[0](torch.randn(64, self.width, device=self.kind)))
        self.model[2](self.frozen(hidden)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": value.cpu() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.model.{name}.{key}"] = value.detach().cpu().clone()
        return found


class Turned(nn.Module):
    """A frozen parameter that is not contiguous."""

    def __init__(self, width: int, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(200, width).to("sim").t(), requires_grad=False)


def stepped(client: Client, training: Training, step: int = 1) -> dict[str, torch.Tensor]:
    """A step and its snapshot, waited for: what that must hold."""
    training.step()
    expected = training.tensors()
    client.snapshot(step, must=True)
    assert client.wait("sealed", 30) == "durable"
    return expected


@contextmanager
def busy(kind: str) -> Iterator[None]:
    """The training stream, and the host may not wait for it: on a real device it has work for QUEUED_S."""
    if kind == device.KIND:
        with device.held():
            yield
        return
    torch.cuda._sleep(int(QUEUED_S * 2e9))  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    yield
    assert time.perf_counter() - began < QUEUED_S / 2


def ordered_out() -> list[str]:
    """What races now, as an ordering is taken out; the fixture hears nothing of it."""
    races = device.races()
    device.fresh()
    return races


def torn(kind: str, daemon: RankDaemonDouble, **adamw: bool) -> list[str]:
    training, expected = Training(kind, WIDTH, **adamw), {}
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        failpoint.arm("capture.tensor:sleep=0.01")
        for step in range(1, 5):
            expected[step] = training.tensors()
            client.snapshot(step, must=True)
            training.model[1](torch.randn(64, WIDTH, device=kind))  # BatchNorm's buffers move at once
            training.step()
        assert client.wait("sealed", 30) == "durable"
    wrong = []
    for (_, step), ranks in daemon.held.items():
        found = stored(ranks[0])
        wrong += [
            f"{step}: {key}" for key, value in expected[step].items() if not bits_equal(found[key], value)
        ]
    return wrong


@pytest.mark.parametrize("adamw", [{}, {"fused": True}, {"capturable": True, "foreach": True}])
def test_no_snapshot_is_torn(kind: str, daemon: RankDaemonDouble, adamw: dict[str, bool]) -> None:
    assert torn(kind, daemon, **adamw) == []


def test_without_the_fence_snapshots_are_torn(
    kind: str, daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "FENCE", False)
    monkeypatch.setattr(_switches, "VERSIONS", False)  # else they are void
    wrong = torn(kind, daemon)
    assert ordered_out() if kind == device.KIND else wrong


def test_without_the_clones_buffers_are_torn(
    kind: str, daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "SYNC_COPIES", False)
    wrong = torn(kind, daemon)
    assert ordered_out() if kind == device.KIND else any("running_mean" in key for key in wrong)


def test_the_host_never_waits_for_the_device(kind: str, daemon: RankDaemonDouble) -> None:
    """With kernels queued, snapshot() and the optimizer's step return at once."""
    training = Training(kind, 512)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        for step in range(1, 4):  # warm: slots registered as pinned
            client.snapshot(step, must=True)
            client.wait("sealed", 30)
            training.step()
        expected = training.tensors()
        torch.accelerator.synchronize()
        with busy(kind):
            handle = client.snapshot(10)
            training.step()
        assert handle.taken
        assert handle.wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 10][0], expected)


def test_restore_into_a_device(kind: str, daemon: RankDaemonDouble) -> None:
    training = Training(kind, 512)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        expected = training.tensors()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
    fresh = Training(kind, 512)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=fresh.model, optimizer=fresh.optimizer)
        assert client.restore() == 1
    found = fresh.tensors()
    assert all(bits_equal(found[key], value) for key, value in expected.items())
    steps = [state["step"].device.type for state in fresh.optimizer.state.values()]
    assert set(steps) == {"cpu"}


def test_a_scaler_does_not_cost_the_known_structure(kind: str, daemon: RankDaemonDouble, looked_up: list[int]) -> None:
    training, scaler = Training(kind, 512), torch.amp.GradScaler(kind)
    with begun(daemon, model=training.model, optimizer=training.optimizer, scaler=scaler) as client:
        for step in range(1, 4):
            scaler.scale(torch.ones((), device=kind))
            training.step()
            looked_up.clear()
            handle = client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
        assert looked_up == [], (handle.status, client.health())


class Lion(torch.optim.Optimizer):
    """As some optimizers do, it keeps numbers and names beside its moments."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["scale"] = 1.0 / state["step"]
            state["phase"] = "warm" if state["step"] < 3 else "hot"
            moment = state.setdefault("moment", torch.zeros_like(parameter))
            parameter.sub_(moment.mul_(0.9).add_(parameter.grad, alpha=0.1).sign(), alpha=1e-3)


def test_numbers_in_optimizer_state_do_not_cost_the_known_structure(
    kind: str, daemon: RankDaemonDouble, looked_up: list[int]
) -> None:
    training = Training(kind, 512)
    training.optimizer = Lion(p for p in training.model.parameters() if p.requires_grad)  # type: ignore[assignment]
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        for step in range(1, 6):
            training.step()
            looked_up.clear()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
        assert looked_up == []
    fresh = Training(kind, 512)
    fresh.optimizer = Lion(p for p in fresh.model.parameters() if p.requires_grad)  # type: ignore[assignment]
    with begun(daemon, model=fresh.model, optimizer=fresh.optimizer):
        found = [(state["step"], state["scale"], state["phase"]) for state in fresh.optimizer.state.values()]
        assert found == [(5, 0.2, "hot")] * len(found) and found


def test_a_snapshot_at_the_end_of_an_evaluation_in_inference_mode(kind: str, daemon: RankDaemonDouble) -> None:
    training = Training(kind, 256)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        expected = training.tensors()
        with torch.inference_mode():
            assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        training.step()
    assert_same(daemon.held[1, 1][0], expected)
