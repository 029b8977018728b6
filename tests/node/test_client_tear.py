"""THE TEAR TEST (P1): every tensor's copy is delayed, training goes on, and each snapshot must still be exact.

Without the delay most snapshots pass with no fence at all, so a test without it proves nothing. Each guard is switched off
in turn, and then the test must see a torn snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend of that name
from ckptd_client import Client, _switches
from ckptd_client.dtypes import TORCH
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptd.core import failpoint
from tests.accelerator import device
from tests.node.client_training import bits_equal, stored
from tests.node.rank_daemon_double import RankDaemonDouble

SNAPSHOTS = 4
DELAY_S = 0.02  # before every tensor's copy
LONG_DELAY_S = 0.1  # where a guard is off: on a busy machine too, a forward pass takes less than all of these together
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", device.KIND: f"cpu:gloo,{device.KIND}:fake"}
HELD_S = 30.0  # without the fence each copy waits until the step behind its snapshot is over, but no longer


@pytest.fixture(autouse=True)
def _delayed() -> Iterator[None]:
    failpoint.arm(f"capture.tensor:sleep={DELAY_S}")
    yield
    failpoint.arm("")


class Everything:
    """All that a step writes: parameters and state of two optimizers, BatchNorm, an EMA in three ways."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96))
        self.wide = nn.BatchNorm1d(6000)  # buffers of 24 KB: too large to be copied among the small ones
        first, second = list(self.model.parameters())[:2], list(self.model.parameters())[2:]
        options = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}[kind]
        self.optimizers = [
            torch.optim.AdamW(first, lr=0.05, **options),
            torch.optim.SGD(second, lr=0.05, momentum=0.9, **options),
        ]
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.ema = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.fenced_ema = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def register(self, client: Client) -> None:
        client.register(
            model=self.model, wide=self.wide, optimizers=self.optimizers, averaged=self.averaged, ema=self.ema
        )
        client.register(fenced_ema=self.fenced_ema, fenced=True)

    def step(self, client: Client) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.randn(8, 96))  # an eval pass between the snapshot and the next step
        self.model.train()
        for _ in range(2):
            self.wide(torch.randn(2, 6000))
            self.model(torch.randn(8, 96)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.averaged.update_parameters(self.model)
        if _switches.FENCE:
            client.fence()
        for name, value in self.model.named_parameters():
            self.ema[name].data.mul_(0.9).add_(value.data, alpha=0.1)  # bumps no version
            self.fenced_ema[name].data.mul_(0.9).add_(value.data, alpha=0.1)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"wide.{name}": value for name, value in self.wide.state_dict().items()}
        found |= {f"averaged.{name}": value for name, value in self.averaged.state_dict().items()}
        found |= {f"ema.{name}": value for name, value in self.ema.items()}
        found |= {f"fenced_ema.{name}": value for name, value in self.fenced_ema.items()}
        names = {id(value): name for name, value in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    found[f"optimizers.model.{names[id(parameter)]}.{key}"] = value
        return {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}


def torn(
    daemon: RankDaemonDouble, kind: str = "foreach", snapshots: int = SNAPSHOTS, stepped: threading.Event | None = None
) -> list[str]:
    """Keys that some sealed snapshot holds wrong. ``stepped``: set from the end of a step to the snapshot that follows it."""
    everything, expected, wrong = Everything(kind), {}, []
    stepped = stepped or threading.Event()

    def step_behind_it() -> None:
        everything.step(client)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        stepped.set()

    with Client.connect("job", socket=daemon.path) as client:
        everything.register(client)
        client.restore()
        for step in range(1, snapshots + 1):
            step_behind_it()
            expected[step] = everything.tensors()
            stepped.clear()
            assert client.snapshot(step, must=True).taken
        step_behind_it()
        assert client.wait("sealed", 30) == "durable"
    assert len(daemon.held) == snapshots
    for (_, step), ranks in daemon.held.items():
        found = stored(ranks[0])
        assert set(found) == set(expected[step])
        wrong += [
            f"{step}: {key}" for key, value in expected[step].items() if not bits_equal(found[key], value)
        ]
    return wrong


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_no_snapshot_is_torn(daemon: RankDaemonDouble, kind: str) -> None:
    assert torn(daemon, kind) == []


@pytest.mark.writes_what_is_read
def test_without_the_fence_the_optimizers_tensors_are_torn(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "FENCE", False)
    monkeypatch.setattr(_switches, "VERSIONS", False)  # which find most of it, but not in the optimizer's own state
    stepped = threading.Event()
    monkeypatch.setattr(failpoint, "_act", lambda *_: stepped.wait(HELD_S))
    found = torn(daemon, snapshots=2, stepped=stepped)
    assert any(".exp_avg" in key for key in found), found
    assert any("averaged." in key for key in found), found


@pytest.mark.chaos
@pytest.mark.writes_what_is_read
def test_without_the_synchronous_copies_the_rest_is_torn(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "SYNC_COPIES", False)
    failpoint.arm(f"capture.tensor:sleep={LONG_DELAY_S}")
    found = torn(daemon, snapshots=2)
    assert any("running_mean" in key for key in found), found


def test_all_the_delays_are_real(daemon: RankDaemonDouble) -> None:
    """The failpoint stands before the copies that the guards protect: there are many, and TORCH names their types."""
    assert torn(daemon, snapshots=1) == []
    plan = daemon.held[1, 1][0].layout
    large = [f for f in plan.fragments if f.nbytes > 16 * 1024]
    assert len(large) >= 10
    assert {f.dtype for f in plan.fragments} <= set(TORCH)


@pytest.fixture
def group(default_device: str) -> Iterator[None]:
    dist.init_process_group(BACKENDS[default_device], rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.ones(1))  # the first one takes as long as it takes to find the others
    yield
    dist.destroy_process_group()


def torn_behind(daemon: RankDaemonDouble, elsewhere: Callable[[], object], call: Callable[[torch.Tensor], object]) -> list[str]:
    """Keys that are torn where parameters are written as soon as ``call``, which is given each of them amid its capture, returns.
    ``elsewhere``, of what is not captured, must not wait."""
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, optimizer=optimizer)
        client.restore()
        model(torch.randn(2, 96)).sum().backward()
        optimizer.step()
        before = {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
        handle = client.snapshot(1, must=True)
        elsewhere()
        assert handle.status == "capturing", "what is not ours does not wait"
        with torch.no_grad():
            for parameter in model.parameters():
                call(parameter.detach())
                parameter.data.zero_()  # no counter moves, and a collective of one rank alone changes nothing itself
        assert handle.wait("sealed", 30) in ("sealed", "durable")
    (ranks,) = daemon.held.values()
    found = stored(ranks[0])
    return [key for key, value in before.items() if not bits_equal(found[key], value)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_a_collective_waits_for_what_it_is_to_write(daemon: RankDaemonDouble, call: str) -> None:
    """P1: the backend writes below autograd, and no version counter tells (`dist.all_reduce(p)` after snapshot(), two ranks on
    gloo: snapshots of old, new and half-reduced tensors were sealed)."""
    options = {"src": 0} if call == "broadcast" else {}
    found = torn_behind(daemon, lambda: dist.all_reduce(torch.ones(3)), lambda tensor: getattr(dist, call)(tensor, **options))
    assert found == []


def resize(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().size())


def test_a_storage_whose_memory_goes_waits_for_what_reads_it(daemon: RankDaemonDouble) -> None:
    """P5: the trainer died of SIGSEGV where it was copied."""
    assert torn_behind(daemon, lambda: resize(torch.ones(3)), resize) == []


@pytest.mark.on_host("what lies on a device stays where it is")
def test_a_storage_that_moves_into_shared_memory_waits_for_what_reads_it(daemon: RankDaemonDouble) -> None:
    move = torch.Tensor.share_memory_
    assert torn_behind(daemon, lambda: move(torch.ones(3)), move) == []
