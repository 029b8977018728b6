"""Restores into an accelerator's tensors, on the simulated one (design D16): through a ring of registered memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import torch
from ckptd_client import Client, accelerator, bounce
from torch import nn

from ckptd.core.errors import CkptdError
from tests.accelerator import device
from tests.accelerator.device import simulated
from tests.node.client_training import assert_same, begun, bits_equal
from tests.node.rank_daemon_double import RankDaemonDouble, _objects
from tests.node.test_client_accelerator import Training, Turned, stepped

pytestmark = device.NEEDED
device.load_first()
PIECE_BYTES = 65536
TENSOR_BY_KEY = 16  # docs/FORMAT.md, section 6


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", PIECE_BYTES)
    accelerator._known.clear()
    with simulated():
        yield
    accelerator._known.clear()


def saved(daemon: RankDaemonDouble, place: str = "sim") -> dict[str, torch.Tensor]:
    training = Training(place, 256)
    training.model.add_module("turned", Turned(300))
    with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
        return stepped(client, training)


def other(place: str = "sim") -> Training:
    """Of the same structure, with other values, and two steps in."""
    training = Training(place, 256)
    training.model.add_module("turned", Turned(300, seed=2))
    training.step()
    training.step()
    return training


def restored(daemon: RankDaemonDouble, training: Training) -> dict[str, torch.Tensor]:
    with begun(daemon, model=training.model, optimizer=training.optimizer):
        return training.tensors()


def assert_all(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {key for key in expected if not bits_equal(found[key], expected[key])} == set()


def test_four_pieces_are_on_their_way_and_none_is_overwritten_before_it_arrived() -> None:
    ring = accelerator.of(torch.device("sim")).ring()
    assert ring is not None
    source, dest = torch.randn(6 * PIECE_BYTES // 4), torch.zeros(6 * PIECE_BYTES // 4, device="sim")
    cut = bounce.BOUNCES * PIECE_BYTES // 4
    with device.held():
        ring.into(source[:cut], dest[:cut])  # nothing waits
        rest = threading.Thread(target=lambda: ring.into(source[cut:], dest[cut:]))
        rest.start()
        rest.join(0.1)
        assert rest.is_alive(), "there are no more pieces"
    rest.join()
    assert torch.equal(dest.cpu(), source)


def test_slow_copies_bring_what_was_saved(daemon: RankDaemonDouble) -> None:
    expected = saved(daemon)
    fresh = other()
    device.tune(copy_us_per_mib=50_000)
    assert_all(restored(daemon, fresh), expected)


def test_a_restore_takes_one_ring_at_most_beyond_the_state(daemon: RankDaemonDouble) -> None:
    """Also of the device: a tensor that is not contiguous has its pieces laid out there on their way."""
    expected = saved(daemon)
    fresh = other()
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=fresh.model, optimizer=fresh.optimizer)
        device.ops.forget_peak(0)
        before = device.ops.peak(0)
        assert client.restore() == 1
        assert device.ops.peak(0) - before <= bounce.BOUNCES * PIECE_BYTES
    assert_all(fresh.tensors(), expected)


def test_where_memory_cannot_be_registered_it_is_only_slower(daemon: RankDaemonDouble) -> None:
    expected = saved(daemon)
    accelerator._known.clear()
    fresh = other()
    device.tune(registrations=0)
    assert_all(restored(daemon, fresh), expected)


def test_streams_that_still_use_the_tensors_end_first(daemon: RankDaemonDouble) -> None:
    expected = saved(daemon)
    fresh, reader = other(), torch.Stream("sim")
    reader.wait_stream(torch.accelerator.current_stream())
    with reader:
        fresh.frozen(torch.ones(4, 256, device="sim"))  # an evaluation beside training
    assert_all(restored(daemon, fresh), expected)


def test_whatever_stream_comes_next_sees_what_was_restored(daemon: RankDaemonDouble) -> None:
    weight = torch.randn(10, 10, device="sim")
    with begun(daemon, weight=weight) as client:
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
    fresh, reader = torch.zeros(10, 10, device="sim"), torch.Stream("sim")
    with begun(daemon, weight=fresh), reader:
        found = fresh.cpu()
    assert torch.equal(found, weight.cpu())


def test_a_rank_of_device_1_restores_without_a_context_on_device_0(daemon: RankDaemonDouble) -> None:
    torch.accelerator.set_device_index(1)
    try:
        training = Training("sim:1", 256)
        with begun(daemon, model=training.model, optimizer=training.optimizer) as client:
            expected = stepped(client, training)
        fresh = Training("sim:1", 256)
        device.fresh()
        assert_all(restored(daemon, fresh), expected)
        assert device.ops.contexts() == [1]
    finally:
        torch.accelerator.set_device_index(0)


def test_a_model_on_the_meta_device_is_refused_and_restored_once_it_has_memory(daemon: RankDaemonDouble) -> None:
    with torch.device("sim"):
        model = nn.Linear(40, 30)
    with begun(daemon, model=model) as client:
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
    with torch.device("meta"):
        fresh = nn.Linear(40, 30)
    with pytest.raises(CkptdError, match="to_empty"), begun(daemon, model=fresh):
        pass
    fresh = fresh.to_empty(device="sim")
    with begun(daemon, model=fresh):
        assert bits_equal(fresh.weight.cpu(), model.weight.cpu())


def test_a_device_that_fails_amid_a_restore_leaves_dirty_objects_and_says_so(daemon: RankDaemonDouble) -> None:
    saved(daemon)
    fresh = other()
    device.tune(copies=3)
    with pytest.raises(CkptdError, match=r"(?s)dirty.*a copy failed"):
        restored(daemon, fresh)


def test_what_was_saved_on_the_host_is_restored_into_a_device_and_back(daemon: RankDaemonDouble) -> None:
    expected = saved(daemon)
    host = Training("cpu", 256)
    host.model.add_module("turned", nn.Linear(1, 1).requires_grad_(False))
    host.model.turned.weight = nn.Parameter(torch.zeros(300, 200), requires_grad=False)
    del host.model.turned._parameters["bias"]
    with begun(daemon, model=host.model, optimizer=host.optimizer) as client:
        assert_all(host.tensors(), expected)
        expected = stepped(client, host, 2)
    assert_same(daemon.held[2, 2][0], expected)
    assert_all(restored(daemon, other()), expected)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "capturable": lambda parameters: torch.optim.Adam(parameters, capturable=True),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
}


class Scaled(nn.Module):
    """A logit scale (CLIP's), a bias, and a matrix."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale, self.bias, self.weight = (nn.Parameter(torch.randn(shape)) for shape in ((), (4,), (4, 4)))

    def trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (self.scale * (self.weight.sum() + self.bias.sum())).square().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_a_parameter_without_dimensions_comes_back_where_it_lay(daemon: RankDaemonDouble, kind: str) -> None:
    models = [Scaled(seed).to("sim") for seed in (1, 2)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    with begun(daemon, model=models[0], optimizer=optimizers[0]) as client:
        models[0].trained_by(optimizers[0])
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
    with begun(daemon, model=models[1], optimizer=optimizers[1]):
        pass

    def places(at: int) -> list[dict[str, str]]:
        return [{name: str(value.device) for name, value in state.items()} for state in optimizers[at].state.values()]

    assert places(1) == places(0)
    for model, optimizer in zip(models, optimizers, strict=True):
        model.trained_by(optimizer)
    assert all(bits_equal(mine.cpu(), its.cpu()) for mine, its in zip(*map(nn.Module.parameters, models), strict=True))


class Counts(torch.optim.SGD):
    """With a norm in its state, and one in a dict of its own, as other people's optimizers have them."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            own.setdefault("norm", torch.zeros((), device=parameter.device)).add_(parameter.grad.norm())
            own.setdefault("more", {"norm": torch.zeros((), device=parameter.device)})["norm"].add_(own["norm"])
        return super().step(closure)


class Mean:
    """A running mean on the device, as a metric or a normaliser keeps it, and one on the host."""

    def __init__(self, value: float) -> None:
        self.mean, self.seen = torch.full((3,), value, device="sim"), torch.full((3,), value)

    def state_dict(self) -> dict[str, object]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.mean, self.seen = saved["mean"], saved["seen"]


def test_what_other_peoples_objects_had_on_the_device_comes_back_there(daemon: RankDaemonDouble) -> None:
    models, means = [Scaled(seed).to("sim") for seed in (1, 2)], [Mean(7), Mean(0)]
    optimizers = [Counts(model.parameters(), lr=0.1) for model in models]
    kept = [{"scale": torch.ones(3, device="sim"), "host": torch.ones(3)}, dict[str, torch.Tensor]()]
    with begun(daemon, model=models[0], optimizer=optimizers[0], mean=means[0], kept=kept[0]) as client:
        models[0].trained_by(optimizers[0])
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
    found = msgpack.unpackb(_objects(daemon.held[1, 1][0])["mean"], ext_hook=lambda code, body: (code, msgpack.unpackb(body)))
    assert found["mean"] == (TENSOR_BY_KEY, "mean#0"), "as docs/FORMAT.md says, section 6"
    with begun(daemon, model=models[1], optimizer=optimizers[1], mean=means[1], kept=kept[1]):
        assert {key: value.device for key, value in kept[1].items()} == {key: value.device for key, value in kept[0].items()}
        assert (means[1].mean.device, means[1].seen.device) == (means[0].mean.device, means[0].seen.device)
        assert means[1].mean.tolist() == means[1].seen.tolist() == [7.0] * 3
        models[1].trained_by(optimizers[1])
