"""Optimizers that hold others, and one whose state is shared, as the libraries that publish them build them.

Written after torchtitan's OptimizersContainer, davda54's SAM, the Lookahead of several collections, Accelerate's wrapper and
bitsandbytes' 8-bit optimizers; none of them is needed to run the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


class Container(Optimizer):
    """torchtitan's: one optimizer per model part, and an own group of all parameters without any hyperparameter."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        parts = list(parts)
        self.optimizers = [AdamW(part.parameters(), lr=1e-2) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class Sam(Optimizer):
    """Two forward passes to a step; its own state beside that of the base optimizer, under the same groups."""

    def __init__(self, params: Iterable[Tensor], base: type[Optimizer] = AdamW, **how: Any) -> None:
        super().__init__(params, {"rho": 0.05, **how})
        self.base_optimizer = base(self.param_groups, **how)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
        self.base_optimizer.step()


class Lookahead(Optimizer):
    """Slow weights in a state of its own, a counter under the name of the inner one's, no call of super().__init__."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        self.optimizer, self.k = optimizer, k
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state: Any = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                step = self.state[p].setdefault("step", torch.zeros(()))
                step += 1
                if step % self.k == 0:
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Counting(AdamW):
    """Steps every other time by its own count, which is in its state_dict() only."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        if self.count % 2:
            super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        super().load_state_dict(state)


class Keeping(AdamW):
    """Counts, in ways that no state_dict() knows of."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.k, self.scale, self.odd, self.constant = 0, 1.0, False, 3
        self.table, self.mean, self.large = torch.zeros(2), torch.zeros(()), torch.zeros(10_000)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.k, self.scale, self.odd = self.k + 1, self.scale * 0.5, not self.odd
        self.table[0] += 1
        self.mean = self.mean * 0.5 + 1
        self.large += 1


class Speaking(Optimizer):
    """A wrapper that shows the inner one's state and groups, without super().__init__(), with a state_dict() of its own form."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["inner"])
        self.count = state["count"]


class Holding(Speaking):
    """The same; it has the inner one's state as its own."""

    state: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.state = optimizer.state


class Copied(Speaking):
    """The same; its list of the groups is another one."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.param_groups = list(optimizer.param_groups)


class Wrapper(Optimizer):
    """Accelerate's: everything is the inner one's, by property."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class EightBit(Optimizer):
    """bitsandbytes': the table that codes are looked up in is one tensor for all parameters."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.qmap = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "state1": torch.full(p.shape, 128, dtype=torch.uint8), "qmap1": self.qmap}
                state["step"] += 1
                moment = state["qmap1"][state["state1"].long()] * 0.9 + p.grad.clamp(-1, 1) * 0.1
                state["state1"].copy_(((moment + 1) * 127.5).round().to(torch.uint8))
                p.sub_(moment, alpha=group["lr"])


class Common(Optimizer):
    """Has one tensor under a name of its own, in each parameter's state, and in a list beside another."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        common = self.state["all"]  # type: ignore[index]
        if not common:
            norm = torch.zeros(3)
            common |= {"norm": norm, "both": [torch.ones(2), norm]}
            for p in params:
                self.state[p]["norm"] = norm
        for p in params:
            self.state[p]["norm"] += p.grad.abs().sum()
            p.sub_(p.grad / (1 + common["norm"][0] + common["both"][1][0]))


def sam(model: nn.Module) -> Optimizer:
    return Sam(model.parameters(), AdamW, lr=1e-2)


HOLDING: dict[str, Callable[[nn.Sequential], Optimizer]] = {
    "container": lambda model: Container([model[:1], model[1:]]),
    "sam": sam,
    "lookahead": lambda model: Lookahead(AdamW(model.parameters(), lr=1e-2)),
    "wrapper": lambda model: Wrapper(AdamW(model.parameters(), lr=1e-2)),
    "counting": lambda model: Counting(model.parameters(), lr=1e-2),
    "counting in a wrapper": lambda model: Lookahead(Counting(model.parameters(), lr=1e-2)),
    "speaking": lambda model: Speaking(AdamW(model.parameters(), lr=1e-2)),
    "holding": lambda model: Holding(AdamW(model.parameters(), lr=1e-2)),
    "copied": lambda model: Copied(SGD(model.parameters(), lr=1e-2, momentum=0.9)),
    "speaking of counting": lambda model: Speaking(Counting(model.parameters(), lr=1e-2)),
    "nested": lambda model: Lookahead(Lookahead(SGD(model.parameters(), lr=1e-2, momentum=0.9))),
}


def train(model: nn.Module, optimizers: list[Any], steps: int) -> list[float]:
    """The losses, of batches that are always the same."""
    losses = []
    for step in range(steps):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses
