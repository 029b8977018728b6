"""Tensor subclasses as torchao writes them: quantised weights, 8-bit moments; and two that nobody can save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Wrapping(Tensor):
    """Computes with what it stands for; knows just the operators that a training needs."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, *_: Any, **__: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def form_of(self) -> Any:
        raise NotImplementedError

    def whole(self) -> Tensor:
        raise NotImplementedError

    def again(self, change: Any) -> Any:
        """The same of other inner tensors."""
        return type(self)(change(self.codes), change(self.scale), *self.form_of())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return args[0].again(lambda part: part.detach())
        if func is aten.clone.default:
            return args[0].again(lambda part: part.clone())
        if func is aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            return args[0].again(lambda part: part.view(part.shape))
        plain = tree_map(lambda value: value.whole() if isinstance(value, Wrapping) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Open(Wrapping):
    """Can be taken apart."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.form_of()

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["codes"], parts["scale"], *context)


class Shape(NamedTuple):
    rows: int
    block: int


class Quantised(Open):
    """A weight in blocks of codes with a scale each; how large blocks are is no tensor (NF4, Float8)."""

    def __init__(self, codes: Tensor, scale: Tensor, form: Shape, offset: float) -> None:
        self.codes, self.scale, self.form, self.offset = codes, scale, form, offset

    @staticmethod
    def of(weight: Tensor, block: int = 10, offset: float = 0.0) -> Quantised:
        blocks = weight.detach().reshape(-1, block) - offset
        scale = blocks.abs().amax(1) / 127
        codes = (blocks / scale[:, None]).round().to(torch.int8).view(weight.shape)
        return Quantised(codes, scale, Shape(weight.shape[0], block), offset)

    def whole(self) -> Tensor:
        blocks = self.codes.float().view(-1, self.form.block) * self.scale[:, None]
        return blocks.view(self.codes.shape) + self.offset

    def form_of(self) -> Any:
        return self.form, self.offset


class Moment(Open):
    """An optimizer's moment in 8 bits."""

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def whole(self) -> Tensor:
        return self.codes.float() * self.scale / (127 if self.signed else 255)

    def put(self, value: Tensor) -> None:
        if not value.numel():
            return
        self.scale.copy_(value.abs().max().clamp(min=1e-12))
        self.codes.copy_((value / self.scale * (127 if self.signed else 255)).round())

    def form_of(self) -> Any:
        return [self.signed]


class Opaque(Wrapping):
    """Says nothing of what it wraps."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def form_of(self) -> Any:
        return ()


class Unwritable(Quantised):
    """What it is besides its tensors cannot be written down."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"form": object()}


def local(tensor: Tensor) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Adam8(Optimizer):
    """torchao's AdamW8bit in small: its moments are subclasses that are born at the first step, and cut as the parameter is."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] |= {"exp_avg": self._born(p, torch.int8), "exp_avg_sq": self._born(p, torch.uint8)}
                mean, square = local(self.state[p]["exp_avg"]), local(self.state[p]["exp_avg_sq"])
                gradient = local(p.grad)
                mean.put(mean.whole() * 0.9 + gradient * 0.1)
                square.put(square.whole() * 0.99 + gradient**2 * 0.01)
                local(p).sub_(mean.whole() / (square.whole().sqrt() + 1e-4), alpha=group["lr"])

    def _born(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        moment = Moment(torch.zeros(local(p).shape, dtype=dtype), torch.ones(()), dtype is torch.int8)
        if not isinstance(p, DTensor):
            return moment
        return DTensor.from_local(moment, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def quantise(model: nn.Sequential, **how: Any) -> nn.Sequential:
    """The first layer's weight, as below an adapter."""
    weight = Quantised.of(model[0].weight, **how)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return model
