"""restore() with a scripted daemon (D7, D11): everything comes back bit by bit, or everything that does not fit is named."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ckptd_client import CkptdError, Client, slices
from ckptd_client.dtypes import TORCH
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ckptd.core import failpoint
from tests.node.client_training import Training, assert_equal, bits_equal, load, net, save
from tests.node.rank_daemon_double import Held, RankDaemonDouble


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


class Everything(nn.Module):
    """Buffers of every dtype and shape."""

    def __init__(self, fill: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, dtype in TORCH.items():
            for shape in ((), (0, 2), (3, 5), (40, 50, 30)):
                size = torch.Size(shape).numel() * dtype.itemsize
                data = torch.randint(
                    0, 2 if name == "BOOL" else 256, (size,), dtype=torch.uint8, generator=generator
                )
                value = (data if fill else torch.zeros_like(data)).view(dtype).view(shape)
                self.register_buffer(f"{name}_{len(shape)}", value)
        strided = torch.randn(30, 40, generator=generator).t() if fill else torch.zeros(30, 40).t()
        self.strided = nn.Parameter(strided)
        self.register_buffer("transient", torch.ones(3), persistent=False)


def test_every_dtype_and_shape_comes_back_bit_by_bit(daemon: RankDaemonDouble) -> None:
    saved, fresh = Everything(fill=True), Everything(fill=False)
    save(daemon, model=saved)
    load(daemon, model=fresh)
    for (name, a), (_, b) in zip(saved.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert bits_equal(a, b), name
    assert not any("transient" in f.key for f in daemon.held[1, 1][0].layout.fragments)


@pytest.mark.parametrize("born", [False, True], ids=["optimizer state is made", "optimizer state is there"])
def test_each_tensor_is_looked_at_once(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, born: bool) -> None:
    """What the prediction of sizes found out serves what is wanted back: of 20,000 tensors each look is a second."""
    saved, fresh = Training(), Training(seed=2)
    saved.step()
    save(daemon, model=saved.model, optimizer=saved.optimizer)
    if born:
        fresh.step()
    looked, check = Counter[str](), slices.check_memory
    monkeypatch.setattr(slices, "check_memory", lambda key, tensor: (looked.update([key]), check(key, tensor))[1])
    load(daemon, model=fresh.model, optimizer=fresh.optimizer)
    assert_equal(fresh.tensors(), saved.tensors())
    known = saved.tensors() if born else {f"model.{name}": value for name, value in fresh.model.state_dict().items()}
    assert looked == dict.fromkeys(known, 1)


def test_what_is_made_for_a_parameter_that_is_left_out_is_looked_at(daemon: RankDaemonDouble) -> None:
    """P15: an optimizer's state of a parameter that the prediction had not to look at comes back as any other."""
    saved, fresh = Training(), Training(seed=2)
    saved.step()
    save(daemon, model=saved.model, optimizer=saved.optimizer)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=fresh.model, exclude="model.0.weight")
        client.register(optimizer=fresh.optimizer)
        assert client.restore() == 1
    key = "model.0.weight"
    differing = {key for key, value in saved.tensors().items() if not bits_equal(value, fresh.tensors()[key])}
    assert differing == {key}


class Loader:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "order": np.arange(5), "seen": Counter()}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_whole_program_goes_on_as_if_nothing_had_happened(daemon: RankDaemonDouble) -> None:
    """Losses after the restore are bit-equal to the unbroken run's: model, optimizer, schedule, loader, generators."""

    def program() -> tuple[Training, LambdaLR, Loader, dict[str, Any]]:
        training = Training()
        schedule = LambdaLR(training.optimizer, lambda step: 0.9**step)
        return training, schedule, Loader(), {"epoch": 0, "best": [1.0]}

    def run(parts: tuple[Training, LambdaLR, Loader, dict[str, Any]], steps: int) -> list[Any]:
        training, schedule, loader, progress = parts
        seen = []
        for _ in range(steps):
            training.step()
            schedule.step()
            loader.state["position"] += random.randrange(10)
            loader.state["seen"]["x"] += 1
            progress["best"].append(np.random.rand())
            seen.append(
                (torch.rand(1).item(), training.model[0].weight.sum().item(), schedule.get_last_lr()[0])
            )
        return seen

    first = program()
    run(first, 3)
    save(
        daemon, 3, model=first[0].model, optimizer=first[0].optimizer,
        extra={"scheduler": first[1], "loader": first[2], "progress": first[3]},
    )  # fmt: skip
    after, position, progress = run(first, 3), dict(first[2].state), first[3]
    second = program()
    kept, inner = second[3], second[3]["best"]
    client = load(
        daemon, model=second[0].model, optimizer=second[0].optimizer,
        extra={"scheduler": second[1], "loader": second[2], "progress": second[3]},
    )  # fmt: skip
    assert client.last_restore["step"] == 3
    assert client.last_restore["meta"] == {"note": "hello"}
    assert run(second, 3) == after
    assert second[2].state["position"] == position["position"]
    assert second[3] is kept  # filled in place
    assert second[3] == progress
    assert second[3]["best"] is inner


class Nested(torch.optim.Optimizer):
    """State as Shampoo keeps it: lists of factors, numbers, and something of the whole optimizer's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.zeros(s, s) for s in p.shape]
                    state["count"] = 0
                    state["by"] = {"name": torch.zeros(p.shape, dtype=torch.float64)}
                state["count"] += 1
                for dim, factor in enumerate(state["factors"]):
                    flat = p.grad.transpose(0, dim).reshape(p.shape[dim], -1)
                    factor.add_(flat @ flat.t())
                state["by"]["name"].add_(p.grad)
                p.sub_(group["lr"] * p.grad)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "lr": 0.5}, {"params": p[1:], "weight_decay": 0.0}]
    ),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nested": Nested,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for seed in range(steps):
        data = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("born", [False, True])
def test_optimizer_state_comes_back_whether_it_was_born_or_not(
    daemon: RankDaemonDouble, name: str, born: bool
) -> None:
    """D11: existing state in place, missing state built with the saved dtype and shape; never a dry step."""
    make = OPTIMIZERS[name]
    model = net()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, 3)
    save(daemon, model=model, optimizer=optimizer)
    other = net()
    again = make(list(other.parameters()))
    held: dict[int, Any] = {}
    if born:
        train(other, again, 1)
        held = {
            id(v): k
            for state in again.state.values()
            for k, v in state.items()
            if isinstance(v, torch.Tensor)
        }
    lr = again.param_groups[0]["lr"]
    load(daemon, model=other, optimizer=again)
    assert_states_equal(optimizer, again)
    if born:
        now = {id(v) for state in again.state.values() for v in state.values() if isinstance(v, torch.Tensor)}
        assert now == set(held)  # written in place
    if isinstance(lr, torch.Tensor):
        assert again.param_groups[0]["lr"] is lr
    train(model, optimizer, 2)
    train(other, again, 2)
    assert_states_equal(optimizer, again)
    assert_equal(other.state_dict(), model.state_dict())


def assert_states_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    assert_tree_equal(a.state_dict(), b.state_dict())


def assert_tree_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.device == b.device or (a.ndim == 0 and b.is_cpu), "what torch counts on its default device counts on here"
        assert bits_equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_tree_equal(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_tree_equal(x, y)
    else:
        assert (a, type(a)) == (b, type(b))


def test_hyperparameters_follow_the_parameter_not_the_group(daemon: RankDaemonDouble) -> None:
    model = net()
    a, b, c, d = model.parameters()
    train(
        model, optimizer := torch.optim.SGD([{"params": [a, b], "lr": 0.1}, {"params": [c, d], "lr": 0.2}]), 1
    )
    save(daemon, model=model, optimizer=optimizer)
    other = net()
    w, x, y, z = other.parameters()
    turned = torch.optim.SGD([{"params": [z]}, {"params": [y]}, {"params": [x, w]}], lr=9.0)
    load(daemon, model=other, optimizer=turned)
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.2, 0.1]
    mixed = torch.optim.SGD([{"params": [w, y]}, {"params": [x, z]}], lr=9.0)
    with pytest.raises(CkptdError, match="group 0 mixes parameters"):
        load(daemon, model=other, optimizer=mixed)


def test_state_younger_than_the_snapshot_goes_away(daemon: RankDaemonDouble) -> None:
    """Absent stays absent: a snapshot of step 0 has no moments, so neither has the optimizer after it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    save(daemon, 0, model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    load(daemon, model=model, optimizer=optimizer)
    assert optimizer.state_dict()["state"] == {}
    fresh = net()
    assert_equal(model.state_dict(), fresh.state_dict())


def test_a_list_in_optimizer_state_that_has_grown_since_is_as_long_as_it_was(daemon: RankDaemonDouble) -> None:
    """LBFGS keeps its newest directions. A restore in the process that had gone on was refused: they are not in the snapshot."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=9)
    batch = torch.linspace(-1, 1, 24).view(4, 6)

    def loss() -> float:
        optimizer.zero_grad()
        found = (model(batch) - batch.flip(1).square()).square().mean()
        found.backward()
        return found.item()

    def steps(count: int) -> list[float]:
        return [optimizer.step(loss) for _ in range(count)]  # type: ignore[no-untyped-call]

    steps(2)
    save(daemon, model=model, optimizer=optimizer)
    expected = steps(3)
    load(daemon, model=model, optimizer=optimizer)
    assert steps(3) == expected


def test_several_optimizers_and_parameters_without_one(daemon: RankDaemonDouble) -> None:
    def parts() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = net()
        a, b, c, _ = model.parameters()
        return model, [torch.optim.AdamW([a], lr=0.1), torch.optim.SGD([b, c], lr=0.1, momentum=0.9)]

    model, optimizers = parts()
    for optimizer in optimizers:
        train(model, optimizer, 2)
    save(daemon, model=model, optimizers=optimizers)
    other, fresh = parts()
    load(daemon, model=other, optimizers=fresh)
    assert_equal(other.state_dict(), model.state_dict())
    assert [len(optimizer.state) for optimizer in fresh] == [1, 2], "one parameter has no optimizer, and no state"
    for a, b in zip(optimizers, fresh, strict=True):
        assert_states_equal(a, b)


# --- another number of ranks ----------------------------------------------------------------------------------
def saved_by_two(daemon: RankDaemonDouble, *of_rank: Any) -> None:
    """A snapshot of two ranks, of which each had one of these under the name "own"."""
    daemon.held = {}
    for step, value in enumerate(of_rank, 1):
        save(daemon, step, own=value)
    found = [ranks[0] for _, ranks in sorted(daemon.held.items())]
    made = {rank: Held(replace(h.layout, rank=rank, world=2), h.payload, h.objects_bytes) for rank, h in enumerate(found)}
    daemon.held = {(9, 9): made}


class Place:
    def __init__(self, read: int = 0) -> None:
        self.read = read

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        return {"read": sum(state.pop("read") for state in states) // world + rank}


@pytest.mark.parametrize(("first", "second"), [(100, 300), (100, 100)], ids=["different", "the same"])
def test_what_was_each_ranks_own_is_for_the_object_to_divide_anew(daemon: RankDaemonDouble, first: int, second: int) -> None:
    """Whether or not the ranks stood at the same place when it was saved."""
    saved_by_two(daemon, Place(first), Place(second))
    place = Place()
    load(daemon, own=place)
    assert place.read == first + second


class Drawing(Place):
    """Seeds the generators of its rank: torch's and Python's as on all ranks, numpy's otherwise."""

    def state_dict(self) -> dict[str, Any]:
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(self.read)
        return super().state_dict()


@pytest.mark.parametrize("second", [2, 1], ids=["others", "the same"])
def test_generators_that_drew_the_same_on_all_ranks_go_on_so_on_another_number(daemon: RankDaemonDouble, second: int) -> None:
    """A permutation that all ranks make for themselves was another one on each; so were the masks of a tensor-parallel group."""
    saved_by_two(daemon, Drawing(1), Drawing(second))
    np.random.seed(1)
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(5)), random.Random(6).random(), np.random.rand()
    client = load(daemon, own=Place())
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    assert (np.random.rand() == drawn[2]) == (second == 1), "those of two ranks that differ are seeded anew"
    (note,) = client.last_restore["notes"]
    assert "torch, which were the same on all" in note and ("numpy" in note) == (second == 1)


def test_a_dict_that_held_a_tensor_on_one_rank_and_nothing_on_another_comes_back(daemon: RankDaemonDouble) -> None:
    """The second rank saved it whole, as there was nothing in it to look into."""
    saved_by_two(daemon, {"t": torch.arange(6.0)}, {})
    own = {"t": torch.zeros(6)}
    load(daemon, own=own)
    assert torch.equal(own["t"], torch.arange(6.0))
    saved_by_two(daemon, {"t": torch.arange(6.0)}, {"n": 1})
    with pytest.raises(CkptdError, match="own: another rank saved it whole, with values in it"):
        load(daemon, own=own)
    saved_by_two(daemon, {"n": 1}, {"n": 1})
    with pytest.raises(CkptdError, match=r"own.t: not in the snapshot.*own: in the snapshot, but nobody registered it"):
        load(daemon, own=own)


class Counting(nn.Module):
    """FSDP2's modules have a method of that name, which is about something else."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def reshard(self) -> None:
        raise AssertionError("nothing was gathered")


def test_a_module_with_a_method_reshard_divides_nothing(daemon: RankDaemonDouble) -> None:
    saved_by_two(daemon, Counting(1), Counting(2))
    with pytest.raises(CkptdError, match="its value was each rank's own; restore it into 2 ranks"):
        load(daemon, own=Counting())
    saved_by_two(daemon, Counting(3), Counting(3))
    module = Counting()
    load(daemon, own=module)
    assert module.count == 3
