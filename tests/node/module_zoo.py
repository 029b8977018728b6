"""Modules that save more than their parameters and buffers, as the libraries that publish them write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Linear8(nn.Linear):
    """bitsandbytes' Linear8bitLt: the rows' scales hang on the weight, and it takes back what it has not asked for."""

    def quantise(self) -> Linear8:
        scale = self.weight.detach().abs().amax(1)
        self.weight = nn.Parameter((self.weight / scale[:, None] * 127).round().to(torch.int8), requires_grad=False)
        self.weight.SCB = scale  # type: ignore[attr-defined]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() / 127 * self.weight.SCB[:, None], self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "SCB"] = self.weight.SCB if keep_vars else self.weight.SCB.detach()
        destination[prefix + "weight_format"] = torch.tensor(0, dtype=torch.uint8)

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
        for key in list(unexpected):
            if key == prefix + "SCB":
                self.weight.SCB.copy_(state[key])
                unexpected.remove(key)


class Linear4(Linear8):
    """Its Linear4bit: hands out the tensors of its quantisation state, and takes none back itself."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.weight.SCB if keep_vars else self.weight.SCB.detach()
        destination[prefix + "weight.quant_state.bitsandbytes__nf4"] = torch.tensor([1, 2, 3], dtype=torch.uint8)

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Linear._load_from_state_dict(self, *args)


class Observer(nn.Module):
    """torch's observers: what they have seen is an attribute, set anew at a load."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.tensor(0.0)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.largest, self.seen = torch.maximum(self.largest, x.detach().abs().max()), self.seen + 1
        return x / (1 + self.largest)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "largest"], destination[prefix + "seen"] = self.largest, self.seen

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.largest, self.seen = state[prefix + "largest"], state[prefix + "seen"]
        super()._load_from_state_dict(state, prefix, *rest)


class Metric(nn.Module):
    """torchmetrics': state_dict() itself is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 20)
        self.total = torch.zeros(9000)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + 1
        return self.inner(x) * self.total.mean()

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **how: Any) -> Any:
        found = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **how)
        found[prefix + "total"] = self.total
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.total = state.pop(prefix + "total", self.total)
        super()._load_from_state_dict(state, prefix, *rest)


def hooked() -> nn.Module:
    """A hook adds to what is saved, another one takes it out again."""
    module = nn.Linear(20, 20)
    module.scale = 1.0  # type: ignore[assignment]

    def add(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "scale"] = module.scale

    def take(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        module.scale = state.pop(prefix + "scale", module.scale)

    module.register_state_dict_post_hook(add)
    module.register_load_state_dict_pre_hook(take)
    module.register_forward_hook(lambda module, args, out: out * module.scale)
    return module


class Growing(nn.Module):
    """As wide as its first batch; ``stays``: its loading has a word of its own, but takes one shape only."""

    def __init__(self, *, stays: bool = False, replaces: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(0))
        self.stays, self.replaces = stays, replaces

    def forward(self, x: Tensor) -> Tensor:
        if not self.mean.numel():
            self.scale.data, self.mean = torch.full((x.shape[1],), 3.0), x.detach().mean(0)
        return (x - self.mean) * self.scale

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if not self.stays:
            self.mean = torch.empty_like(state[prefix + "mean"])
            scale = torch.empty_like(state[prefix + "scale"])
            if self.replaces:
                self.scale = nn.Parameter(scale)
            else:
                self.scale.data = scale
        super()._load_from_state_dict(state, prefix, *rest)


class Forgetful(Observer):
    """Saves, and does not load."""

    def _load_from_state_dict(self, *args: Any) -> None:
        return


class Unsaveable(nn.Module):
    """bitsandbytes' Embedding4bit."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise NotImplementedError("Saving is not implemented")


class Counted(nn.Linear):
    """Counts its batches on the host, and computes a table of its weights: hooks of saving and loading keep both."""

    def __init__(self) -> None:
        super().__init__(20, 20)
        self.register_buffer("count", torch.zeros(()))
        self.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.count.fill_(module.batches))
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())
        self.derive()

    def derive(self) -> None:
        self.batches, self.table = int(self.count), self.weight.detach().t().clone()

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        return x @ self.table


class Derived(nn.Linear):
    """The same table, made by its own loading."""

    def __init__(self) -> None:
        super().__init__(20, 20)
        self.table = self.weight.detach().t().clone()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.table = self.weight.detach().t().clone()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table
