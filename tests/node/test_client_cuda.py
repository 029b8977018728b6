"""Captures from CUDA (D6): exact under load, and the host never waits. Needs a GPU; a machine without one says so."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from ckptd_client import Client, _switches, resolve
from torch import nn

from ckptd.core import failpoint
from tests.node.client_training import assert_same, begun, bits_equal, stored
from tests.node.rank_daemon_double import RankDaemonDouble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

QUEUED_S = 0.2
RETURN_S = 0.002  # snapshot() with that much work queued


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


class Training:
    def __init__(self, width: int, **adamw: bool) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3)).cuda()
        self.frozen = nn.Linear(width, width).cuda().requires_grad_(False)
        self.model.add_module("frozen", self.frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, **adamw)
        self.width = width

    def step(self) -> None:
        self.optimizer.zero_grad()
        hidden = self.model[1](self.model[0](torch.randn(64, self.width, device="cuda")))
        self.model[2](self.frozen(hidden)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": value.cpu() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.model.{name}.{key}"] = value.detach().cpu().clone()
        return found


def torn(daemon: RankDaemonDouble, **adamw: bool) -> list[str]:
    training, expected = Training(1024, **adamw), {}
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        failpoint.arm("capture.tensor:sleep=0.01")
        for step in range(1, 5):
            expected[step] = training.tensors()
            client.snapshot(step, must=True)
            training.model[1](torch.randn(64, 1024, device="cuda"))  # BatchNorm's buffers move at once
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
def test_no_snapshot_is_torn(daemon: RankDaemonDouble, adamw: dict[str, bool]) -> None:
    assert torn(daemon, **adamw) == []


def test_without_the_fence_snapshots_are_torn(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "FENCE", False)
    assert torn(daemon) != []


def test_without_the_clones_buffers_are_torn(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "SYNC_COPIES", False)
    assert any("running_mean" in key for key in torn(daemon))


def test_the_host_never_waits_for_the_device(daemon: RankDaemonDouble) -> None:
    """With 200 ms of kernels queued, snapshot() and the optimizer's step return at once."""
    training = Training(2048)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        for step in range(1, 4):  # warm: slots registered as pinned
            client.snapshot(step, must=True)
            client.wait("sealed", 30)
            training.step()
        expected = training.tensors()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(QUEUED_S * 2e9))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        handle = client.snapshot(10)
        returned = time.perf_counter() - began
        training.step()
        stepped = time.perf_counter() - began
        assert handle.taken
        assert returned < RETURN_S
        assert stepped < QUEUED_S / 2
        assert handle.wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 10][0], expected)


def test_restore_into_a_device(daemon: RankDaemonDouble) -> None:
    training = Training(512)
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        training.step()
        expected = training.tensors()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
    fresh = Training(512)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=fresh.model, optimizer=fresh.optimizer)
        assert client.restore() == 1
    found = fresh.tensors()
    assert all(bits_equal(found[key], value) for key, value in expected.items())
    steps = [state["step"].device.type for state in fresh.optimizer.state.values()]
    assert set(steps) == {"cpu"}


def test_a_scaler_does_not_cost_the_known_structure(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, scaler = Training(512), torch.amp.GradScaler("cuda")
    looked_up: list[int] = []
    tensors = resolve.tensors
    monkeypatch.setattr(resolve, "tensors", lambda registry: (looked_up.append(1), tensors(registry))[1])
    with begun(daemon, model=training.model, optimizer=training.optimizer, scaler=scaler) as client:
        for step in range(1, 4):
            scaler.scale(torch.ones((), device="cuda"))
            training.step()
            looked_up.clear()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
        assert looked_up == []
