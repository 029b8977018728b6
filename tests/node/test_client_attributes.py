"""P15: what an optimizer, or what wraps one, keeps in attributes that its state_dict() has not is told by name, once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ckptd_client import attributes
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from tests.node.client_training import begun, net
from tests.node.optimizer_zoo import HOLDING, train
from tests.node.rank_daemon_double import RankDaemonDouble

STEPS = 5


def told(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, optimizer: Any, model: nn.Module, **more: Any) -> list[str]:
    """The names, of the one line that may be said; every scheduler among ``more`` steps, too."""
    with begun(daemon, model=model, optimizer=optimizer, **more) as client:
        for step in range(1, STEPS + 1):
            train(model, [optimizer], 1)
            for each in more.values():
                each.step(1.0) if isinstance(each, ReduceLROnPlateau) else each.step() if hasattr(each, "step") else None
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
    said = [record.getMessage() for record in caplog.records if "changes its attributes" in record.getMessage()]
    assert len(said) < 2, said
    return said[0].partition("its attributes ")[2].partition(", which its")[0].split(", ") if said else []


class Own(AdamW):
    """Keeps ``a`` to itself, and changes it in each step by ``change(self)``."""

    def __init__(self, model: nn.Module, a: Any, change: Callable[[Any], object]) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.a, self.change = a, change

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.change(self)
        super().step()


def parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def slow(optimizer: Any) -> None:
    """As Lookahead's, made in the first step."""
    optimizer.a = optimizer.a or [p.detach().clone() for p in parameters(optimizer)]
    for one, p in zip(optimizer.a, parameters(optimizer), strict=True):
        one.lerp_(p, 0.5)


def by_parameter(optimizer: Any) -> None:
    for p in parameters(optimizer):
        optimizer.a.setdefault(p, torch.zeros_like(p)).add_(1)


def deeper(optimizer: Any) -> None:
    optimizer.a["x"]["y"] += 1


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list of a tensor": (lambda: [torch.zeros(3)], lambda o: o.a[0].add_(1)),
    "slow weights": (lambda: [], slow),
    "by parameter": (lambda: {}, by_parameter),
    "nested": (lambda: {"x": {"y": 0}}, deeper),
    "torch's generator": (lambda: torch.Generator().manual_seed(1), lambda o: torch.randn(3, generator=o.a)),
    "numpy's generator": (lambda: np.random.default_rng(1), lambda o: o.a.standard_normal()),
    "numpy's older one": (lambda: np.random.RandomState(1), lambda o: o.a.rand()),
    "random's": (lambda: random.Random(1), lambda o: o.a.random()),
    "deque": (lambda: deque([0], maxlen=8), lambda o: o.a.append(1)),
    "array": (lambda: np.zeros(3), lambda o: o.a.__iadd__(1)),
    "large array": (lambda: np.zeros(1_000_000), lambda o: o.a.__iadd__(1)),
    "module": (lambda: nn.Linear(2, 2), lambda o: o.a.weight.mul_(0.5)),
    "number": (lambda: 0, lambda o: setattr(o, "a", o.a + 1)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_in_an_attribute_is_told(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    make, change = CHANGES[kind]
    model = net()
    assert told(daemon, caplog, Own(model, make(), change), model) == ["a"]


class Around:
    """Holds an optimizer without being one; its state_dict() is that one's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.slow = [p.detach().clone() for p in parameters(optimizer)]

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.steps += 1
        for one, p in zip(self.slow, parameters(self), strict=True):
            one.lerp_(p, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class AroundAsOne(Around, Optimizer):
    """The same as an Optimizer, as Accelerate's."""

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]


class Below(Around):
    """Puts it below a name of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base"])


@pytest.mark.parametrize("kind", [Around, AroundAsOne, Below])
def test_what_a_wrapper_keeps_to_itself_is_told(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, kind: type[Around]
) -> None:
    model = net()
    assert told(daemon, caplog, kind(AdamW(model.parameters(), lr=1e-2)), model) == ["slow", "steps"]


class Saving(Around):
    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "slow": self.slow, "n": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base"])


def test_a_wrapper_that_saves_its_own_is_not_asked(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    assert told(daemon, caplog, Saving(AdamW(model.parameters(), lr=1e-2)), model) == []


# --- nobody cries wolf --------------------------------------------------------------------------------------
class Holding(AdamW):
    """Names for what is saved elsewhere, gradients, and scratch memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.model, self.models, self.sorted = model, [model], parameters(self)
        self.masters = {p: p for p in parameters(self)}
        self.generators = [torch.default_generator, random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
        self.average: dict[str, Tensor] = {}
        self.generator = torch.Generator()
        self.scratch: list[Tensor] = []
        self.moments: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.kernels: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        torch.randn(3, generator=self.generator)
        torch.rand(3), random.random(), np.random.rand()
        self.gradients = [p.grad for p in parameters(self) if p.grad is not None]
        self.moments = [state["exp_avg"] for state in self.state.values()]
        self.scratch = [torch.cat([p.detach().flatten() for p in parameters(self)])]
        self.kernels[len(self.kernels)] = print
        for one in self.average.values():
            one.add_(1)


def test_what_is_saved_elsewhere_is_not_told(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = Holding(model)
    optimizer.average = {"w": torch.zeros(200, 20)}
    more = {"average": optimizer.average["w"], "generator": optimizer.generator}
    assert told(daemon, caplog, optimizer, model, **more) == []


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "one after the other": lambda o: SequentialLR(o, [LambdaLR(o, lambda _: 1.0), CosineAnnealingLR(o, 5)], [2]),
}


@pytest.mark.parametrize("make", [lambda p: AdamW(p), lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False)])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_counts_in_what_it_has_patched(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, scheduler: str, make: Callable[[Any], Optimizer]
) -> None:
    model = net()
    optimizer = make(model.parameters())
    assert told(daemon, caplog, optimizer, model, scheduler=SCHEDULERS[scheduler](optimizer)) == []


def test_an_optimizer_that_holds_its_scheduler_says_nothing(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    optimizer.scheduler = LambdaLR(optimizer, lambda step: 0.9**step)  # type: ignore[attr-defined]
    assert told(daemon, caplog, optimizer, model, scheduler=optimizer.scheduler) == []  # type: ignore[attr-defined]


def test_lbfgs_and_a_grad_scaler_say_nothing(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = LBFGS(model.parameters(), max_iter=2, history_size=2)
    other = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    with begun(daemon, model=model, optimizer=optimizer, other=other, scaler=scaler) as client:
        for step in range(1, STEPS + 1):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(torch.ones(3, 20)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            scaler.scale(closure()).backward() if step > STEPS else scaler.step(other) if step < 0 else other.step()
            client.snapshot(step, must=True).wait("sealed", 30)
    assert not [record for record in caplog.records if "changes its attributes" in record.getMessage()]


@pytest.mark.parametrize("kind", HOLDING)
def test_the_libraries_wrappers_say_nothing(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    model = net()
    assert told(daemon, caplog, HOLDING[kind](model), model) == []


# --- what it may cost ---------------------------------------------------------------------------------------
def test_the_look_is_bounded() -> None:
    """However large, deep, or full of itself an attribute is."""
    itself: list[Any] = [0]
    itself.append(itself)
    deep: Any = 0
    for _ in range(10_000):
        deep = [deep]
    found = attributes.leaves({"many": list(range(1_000_000)), "itself": itself, "deep": deep})
    assert len(found["many"]) == attributes.LEAVES_MAX
    assert 0 < len(found["itself"]) <= attributes.DEPTH_MAX
    assert not found.get("deep")
