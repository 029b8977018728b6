"""``optimizer.step(closure)``, as Lightning calls it: forward and backward pass overlap with the capture, the writes wait (D6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptd.core import failpoint
from tests.node.client_training import assert_same, begun
from tests.node.rank_daemon_double import RankDaemonDouble

WIDTH = 100  # one weight of 40 KB: too large to be copied among the small ones
DELAY_S = 0.3  # before each tensor's copy; the closure below begins at once

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TORCHS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "LBFGS, searching": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}


class Sam(torch.optim.SGD):
    """Climbs before it looks: the weights are written before the closure is called."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        up = [(p, torch.full_like(p, 0.1)) for group in self.param_groups for p in group["params"]]
        for p, climb in up:
            p.data.add_(climb)  # moves no version
        with torch.enable_grad():
            loss = closure()
        for p, climb in up:
            p.data.sub_(climb)
        super().step()
        return loss


class Clipped(torch.optim.SGD):
    """Somebody's own class, which keeps torch's step()."""


class Run:
    """One weight, its closure, and whether the capture still had to read whenever the closure was called."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = make(list(self.model.parameters()))
        self.reading: Callable[[], bool] | None = None
        self.seen: list[bool] = []

    def closure(self, scale: float = 1.0) -> torch.Tensor:
        if self.reading is not None:
            self.seen.append(self.reading())
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(2, WIDTH)) - 1).square().mean() * scale
        loss.backward()
        return loss

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"model.weight": self.model.weight.detach().clone()}
        for name, value in self.optimizer.state.get(self.model.weight, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.model.weight.{name}"] = value.clone()
        return found


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


def stepped(daemon: RankDaemonDouble, make: Make, step: Callable[[Run], object]) -> Run:
    """A run whose snapshot 1 was under way when its optimizer's next step began; that snapshot is exact."""
    run = Run(make)
    with begun(daemon, model=run.model, optimizer=run.optimizer) as client:
        run.optimizer.step(run.closure)
        failpoint.arm(f"capture.tensor:sleep={DELAY_S},capture.helping:sleep={DELAY_S}")
        expected = run.tensors()
        handle = client.snapshot(1, must=True)
        run.reading = lambda: not client._engine._all_copied()
        loss = step(run)
        assert torch.is_tensor(loss) and loss.requires_grad, "what the closure returned"
        assert not torch.equal(run.model.weight, expected["model.weight"]), "it stepped"
        failpoint.arm("")
        assert handle.wait("sealed", 30) == "durable"
    if "LBFGS" not in type(run.optimizer).__name__:  # its state is nested
        assert_same(daemon.held[1, 1][0], expected)
    else:
        held = daemon.held[1, 1][0]
        weight = next(f for f in held.layout.fragments if f.key == "model.weight")
        assert held.payload[weight.offset : weight.offset + weight.nbytes] == expected["model.weight"].cpu().numpy().tobytes()
    return run


@pytest.mark.parametrize("name", TORCHS)
def test_the_closure_of_torchs_optimizers_overlaps_with_the_capture(daemon: RankDaemonDouble, name: str) -> None:
    run = stepped(daemon, TORCHS[name], lambda run: run.optimizer.step(run.closure))
    assert run.seen[0], "forward and backward pass waited for the capture"
    assert not any(run.seen[1:]), "written while it was captured"


def test_a_closure_given_by_name_overlaps_too(daemon: RankDaemonDouble) -> None:
    run = stepped(daemon, TORCHS["AdamW"], lambda run: run.optimizer.step(closure=run.closure))
    assert run.seen[0]


def test_a_class_of_ones_own_that_keeps_torchs_step_overlaps(daemon: RankDaemonDouble) -> None:
    run = stepped(daemon, lambda p: Clipped(p, lr=0.1), lambda run: run.optimizer.step(run.closure))
    assert run.seen[0]


def test_an_optimizer_that_writes_before_its_closure_waits_first(daemon: RankDaemonDouble) -> None:
    run = stepped(daemon, lambda p: Sam(p, lr=0.1), lambda run: run.optimizer.step(run.closure))
    assert not run.seen[0]


def test_a_hook_of_the_users_that_writes_before_the_step_is_waited_for(daemon: RankDaemonDouble) -> None:
    """It runs after ours, and before the closure."""

    def step(run: Run) -> object:
        def halve(*_: object) -> None:
            run.model.weight.data.mul_(0.5)

        run.optimizer.register_step_pre_hook(halve)
        return run.optimizer.step(run.closure)

    run = stepped(daemon, TORCHS["SGD"], step)
    assert not run.seen[0]


@pytest.mark.parametrize("register", [None, register_optimizer_step_pre_hook], ids=["its own", "of all"])
@pytest.mark.parametrize("name", ["SGD", "fused"])
def test_a_snapshot_in_a_hook_of_the_users_is_fenced_from_the_step_behind_it(
    name: str, register: Callable[..., Any] | None, daemon: RankDaemonDouble
) -> None:
    """P1: our hook has run before it, and a fused step moves no counter that could tell."""
    run, expected, handles = Run(TORCHS[name]), {}, []
    with begun(daemon, model=run.model, optimizer=run.optimizer) as client:
        run.optimizer.step(run.closure)

        def hook(*_: object) -> None:
            expected.update(run.tensors())
            handles.append(client.snapshot(1, must=True))

        failpoint.arm(f"capture.tensor:sleep={DELAY_S}")
        hooked = (register or run.optimizer.register_step_pre_hook)(hook)
        try:
            run.optimizer.step()
        finally:
            hooked.remove()
        failpoint.arm("")
        assert handles[0].wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 1][0], expected)


def test_what_the_closure_raises_is_the_trainers(daemon: RankDaemonDouble) -> None:
    run = Run(TORCHS["SGD"])
    with begun(daemon, model=run.model, optimizer=run.optimizer) as client:

        def broken() -> torch.Tensor:
            raise KeyError("batch")

        with pytest.raises(KeyError, match="batch"):
            run.optimizer.step(broken)
        run.optimizer.step(run.closure)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
