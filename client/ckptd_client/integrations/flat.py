"""Optimizers over flat parameters, as engines have them: what a rank holds as ranges of the parameters, with state that is made to
be filled by a restore, and the settings of the optimizer's groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.core.errors import CkptdError
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client

PARAMS, STEP = "params", "step"


class Part(NamedTuple):
    """``tensor``, flat: elements from ``start`` on of the parameter ``name``. The optimizer has their state under ``under``, None:
    it has none; ``within``: where in that state's flat memory they lie, None: it is theirs alone."""

    name: str
    shape: Sequence[int]
    start: int
    tensor: Tensor
    under: Tensor | None = None
    within: slice | None = None


class Flat(ABC):
    """Names are those of ``register(model=, optimizer=)`` of the plain model. Of buffers rank 0's are saved, as the engines
    themselves do."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self._coming: dict[Tensor, dict[str, Any]] = {}  # states that a restore fills, and the optimizer has not

    def attach(self, client: Client, **objects: Any) -> None:
        client.register(groups=self, **objects)
        client.register_boxes("flat", self._provide, lambda blobs: self._restored())

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """What this rank has of all parameters."""

    @abstractmethod
    def stepped(self) -> list[Tensor]:
        """What the optimizer steps."""

    @abstractmethod
    def refresh(self) -> None:
        """All ranks: what the engine has made of these parts is of what they are now."""

    def step(self) -> None:
        """Of the optimizer alone, over all of them."""
        self.optimizer.step()

    def called(self, name: str) -> str:
        """What a parameter or buffer of the module is called in the plain model."""
        return name

    def state_dict(self) -> dict[str, Any]:
        """The settings of the groups, and what is no tensor in the parameters' states (a step that is an int): plain values.
        Raises CkptdError where that differs between parameters."""
        found = [_numbers(state) for state in self.optimizer.state.values() if state]
        if any(one != found[0] for one in found[1:]):
            raise CkptdError("numbers in an optimizer's state that differ between parameters are not supported", where="optimizer")
        return {"groups": _settings(self.optimizer), "numbers": found[0] if found else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CkptdError for another number of groups."""
        _set_again(self.optimizer, state["groups"])
        for of_one in (self._coming or self.optimizer.state).values():
            of_one.update(state["numbers"])

    def _provide(self, loading: bool) -> Iterator[Box | Blob]:
        self._coming = {}
        if loading and not any(self.optimizer.state.values()):
            self._coming = self._born()
        states = self._coming or self.optimizer.state
        for part in self.parts():
            if part.tensor.numel():
                yield from _boxes(part, {} if part.under is None else states.get(part.under, {}))
        if loading or dist.get_rank() == 0:
            yield from self._buffers()

    def _restored(self) -> None:
        self.optimizer.state.update(self._coming)
        self._coming = {}
        self.refresh()

    def _buffers(self) -> Iterator[Box]:
        for prefix, part in self.module.named_modules():
            for name, buffer in part.named_buffers(recurse=False):
                if name not in part._non_persistent_buffers_set:
                    key = self.called(f"{prefix}.{name}" if prefix else name)
                    yield Box(f"model.{key}", buffer, buffer.shape, (0,) * buffer.dim(), role="buffer")

    def _born(self) -> dict[Tensor, dict[str, Any]]:
        """State as a step of zeros at a rate of zero bears it, which torch.distributed.checkpoint makes, too. The optimizer is as
        it was: a start that finds nothing to restore trains as if nobody had asked."""
        optimizer, stepped, before = self.optimizer, self.stepped(), _settings(self.optimizer)
        gradients = [parameter.grad for parameter in stepped]
        try:
            for group in optimizer.param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for parameter in stepped:
                parameter.grad = torch.zeros_like(parameter)
            self.step()
        finally:
            for parameter, gradient in zip(stepped, gradients, strict=True):
                parameter.grad = gradient
            _set_again(optimizer, before)
            states = {parameter: optimizer.state.pop(parameter) for parameter in stepped if parameter in optimizer.state}
        for state in states.values():
            state |= {STEP: torch.zeros_like(state[STEP]) if isinstance(state[STEP], Tensor) else 0} if STEP in state else {}
        return states


def _boxes(part: Part, state: Mapping[str, Any]) -> Iterator[Box]:
    """Raises CkptdError for a state that is neither like the parameter nor one number."""
    key, shape, whole = f"model.{part.name}", part.shape, (0,) * len(part.shape)
    flat = (part.start, part.start + part.tensor.numel())
    yield Box(key, part.tensor, shape, whole, shape, flat)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if value.ndim == 0:
            yield Box("", value, (), (), of=(key, name))
            continue
        piece = value.flatten() if part.within is None else value[part.within]
        if piece.shape != part.tensor.shape:
            raise CkptdError(f"optimizer state {name!r} of shape {list(value.shape)} is not supported", where=key)
        yield Box("", piece, shape, whole, shape, flat, of=(key, name))


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group all but its parameters."""
    return [{name: value for name, value in group.items() if name != PARAMS} for group in optimizer.param_groups]


def _set_again(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        text = f"{len(saved)} groups of parameters were saved, and this optimizer has {len(groups)}"
        raise CkptdError(text, where="optimizer", hint="restore into the same groups")
    for group, values in zip(groups, saved, strict=True):
        for name in set(group) - set(values) - {PARAMS}:
            del group[name]
        group.update(values)
