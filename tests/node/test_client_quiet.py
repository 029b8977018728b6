"""P5, P15: snapshot() asks no other rank anything. Each rank calls it at its own time; a collective would hang all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckptd_client import CkptdError, Client
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from tests.node.module_zoo import Metric, Observer
from tests.node.optimizer_zoo import Container, Counting, Sam
from tests.node.raising_group import armed, raising_group
from tests.node.rank_daemon_double import RankDaemonDouble


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.observer, self.second = nn.Linear(20, 130), Observer(), nn.Linear(130, 20)
        self.metric = Metric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.metric(self.second(self.observer(self.first(x))))


@pytest.mark.filterwarnings("ignore")
def test_a_snapshot_of_everything_runs_no_collective(daemon: RankDaemonDouble) -> None:
    """FSDP2 after an evaluation, a container, a wrapper, modules that save themselves: a group that raises proves it."""
    with raising_group(), Client.connect("job", socket=daemon.path) as client:
        model = Body()
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        container = Container([model.first, model.second])
        sam = Sam(model.metric.parameters(), Counting, lr=1e-2)
        client.register(model=model, optimizer=container, sam=sam)
        client.restore()
        for step in (1, 2, 3):
            model(torch.randn(3, 20)).square().mean().backward()
            container.step()
            sam.step()
            with torch.no_grad():
                model.eval()(torch.randn(3, 20))
            with armed():
                handle = client.snapshot(step, must=True)
                assert handle.wait("sealed", 30) == "durable", handle.status
            model.train()
    keys = {fragment.key for fragment in daemon.held[1, 3][0].layout.fragments}
    assert {"optimizer.model.first.weight.exp_avg", "sam.model.metric.inner.weight.exp_avg"} <= keys


class Counted(TorchDispatchMode):
    """Which collectives really begin."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.begun.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _gloo() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Gathering:
    """Collects from all ranks what it saves, as a loader of the whole job does."""

    def state_dict(self) -> dict[str, Any]:
        seen = torch.ones(3)
        dist.all_reduce(seen)
        return {"seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GatheringModule(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = Gathering().state_dict()["seen"]


class GatheringOptimizer(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **Gathering().state_dict()}


@pytest.mark.usefixtures("_gloo")
@pytest.mark.parametrize("made", [Gathering, lambda: GatheringModule(3, 3)], ids=["stateful", "module"])
def test_what_runs_a_collective_to_be_saved_is_refused(daemon: RankDaemonDouble, made: Any) -> None:
    """It worked as long as all ranks were asked at the same moment."""
    why = ""
    with Counted() as counted, Client.connect("job", socket=daemon.path) as client:
        try:
            client.register(thing=made())
        except CkptdError as error:
            why = str(error)
    assert "its state_dict() runs a collective (c10d.allreduce_" in why, why
    assert "thing" in why
    assert counted.begun == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_gloo")
def test_a_dtensor_may_be_computed_with_for_it(daemon: RankDaemonDouble) -> None:
    """A sharding that was never asked for is found by a run on fake tensors, which reach no rank: it was refused with torch's own
    words, once, and worked the next time (a framework's author: the AppState of DCP's tutorial)."""

    class Norms:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.hypot(model.weight.detach(), model.weight.detach()).to_local()}  # type: ignore[operator, union-attr]

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = nn.Linear(37, 41)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, norms=Norms())
        client.restore()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"


@pytest.mark.usefixtures("_gloo")
def test_an_optimizer_that_runs_one_fails_and_a_container_is_looked_into_without_it(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    class GatheringContainer(Container):
        def state_dict(self) -> dict[str, Any]:
            return Gathering().state_dict()

    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))

    def step(optimizer: Any) -> None:
        model(torch.randn(3, 20)).sum().backward()
        optimizer.step()

    with Counted() as counted, Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, optimizer=(own := GatheringOptimizer(model.parameters())))
        client.restore()
        step(own)
        status = client.snapshot(1, must=True).wait("sealed", 30)
        assert "its state_dict() runs a collective" in status, status
        client.register(optimizer=(container := GatheringContainer([model[:1], model[1:]])))
        step(container)
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
    assert counted.begun == []
    assert "GatheringContainer (optimizer) may have beside the optimizers that it holds is not saved" in caplog.text
    assert isinstance(container.optimizers[0], AdamW)
