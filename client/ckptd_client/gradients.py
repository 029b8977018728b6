"""Gradients in the middle of an accumulation: captured with ``register(..., gradients=True)``, else told once (P15)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckptd_client import fence, watch
from ckptd_client.entries import Entry, Mode, State
from ckptd_client.naming import local_of
from ckptd_client.registry import Registry
from ckptd_client.statics import mark_of

log = logging.getLogger("ckptd")
WARNING = (
    "ckptd job %s: snapshot %d was taken amid an accumulation of gradients, which it does not hold: after a restore their "
    "micro-batches are lost. Take snapshots after the optimizer's step, or register(..., gradients=True)"
)


def key_of(parameter: Entry) -> str:
    return f"{parameter.key}.grad"


def parameters(state: State) -> Iterator[Entry]:
    """Those whose gradients are registered."""
    return (entry for entry in state.params.values() if entry.owner.gradients and entry.owner.takes(entry.key))


def entries(state: State) -> list[Entry]:
    """Of the gradients that are there. The next backward pass writes them, so nothing may fence them."""
    found = ((entry, entry.tensor.grad) for entry in parameters(state))
    return [
        Entry(key_of(entry), gradient, "extra", entry.owner, Mode.SYNC)
        for entry, gradient in found
        if gradient is not None
    ]


def marks(registry: Registry) -> list[Any]:
    """Of the gradients that are registered, there or not."""
    owners = (owner for owner in registry.of_kind("module") if owner.gradients)
    found = (parameter.grad for owner in owners for parameter in owner.value.parameters())
    return [None if gradient is None else _mark(gradient) for gradient in found]


class Accumulation:
    """Looks at the first and the last trained parameter: a backward pass writes the gradients of all, or of most. They are chosen
    before training begins, so that the first snapshot knows which gradients have been used."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._sample: list[Callable[[], Tensor | None]] = []  # where they hang
        self._chosen: list[int] = []  # their ids
        self._marks: dict[int, Any] = {}
        self._noted = False  # has the sample been used since it was chosen?
        self._told = False
        self._thread = 0  # that trains
        watch.tell_of_used_gradients(self)

    def sample(self, state: State) -> None:
        trained = [
            entry
            for entry in state.params.values()
            if entry.mode is Mode.FENCED and entry.tensor.requires_grad and not entry.owner.gradients
        ]
        sample = {id(entry.tensor): entry for entry in (*trained[:1], *trained[-1:])}
        self._noted = self._noted and list(sample) == self._chosen
        self._chosen = list(sample)
        self._sample = [_place_of(entry) for entry in sample.values()]
        self._thread = threading.get_ident()

    def used(self, by: Optimizer | None = None) -> None:
        """An optimizer has stepped, or dropped them; or a restore has made those that are there a thing of the past. What another
        thread trains says nothing of ours, whose gradients a backward pass may write at this moment: to read them would crash."""
        if threading.get_ident() != self._thread:
            if by is None or not self._trains(by):
                return
            self._thread = threading.get_ident()
        self._marks = {id(parameter): _mark(gradient) for parameter, gradient in self._now()}
        self._noted = bool(self._sample)

    def look(self, step: int) -> None:
        """At the snapshot of this step: warns once."""
        if self._told or not any(self._is_new(parameter, gradient) for parameter, gradient in self._now()):
            return
        self._told = True
        log.warning(WARNING, self._job, step)

    def _is_new(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Written since it was used. Before the first use that was seen there is nothing to compare with, nor behind a change of
        its dtype or device (``model.to(...)``), which gives it other memory."""
        mark, now = self._marks.get(id(parameter)), _mark(gradient)
        if mark is None:
            return self._noted or fence.steps() == 0
        if mark[:2] != now[:2]:
            self._marks[id(parameter)] = now
            return False
        return bool(mark != now)

    def _trains(self, optimizer: Optimizer) -> bool:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(find()) in held for find in self._sample)

    def _now(self) -> Iterator[tuple[Tensor, Tensor]]:
        for find in self._sample:
            parameter = find()
            if parameter is not None and parameter.grad is not None:
                yield parameter, parameter.grad


def _place_of(entry: Entry) -> Callable[[], Tensor | None]:
    """Finds the parameter again, or what took its place. Neither the tensor is held nor a weak reference to it, which would keep
    torch from swapping it (``model.cpu()`` under FSDP2)."""
    owner = entry.owner
    parts = owner.value.modules() if isinstance(owner.value, nn.Module) else ()
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is entry.tensor:
                return partial(_hanging_in, part, name)
    return lambda: owner.value if isinstance(owner.value, Tensor) else None


def _hanging_in(part: nn.Module, name: str) -> Tensor | None:
    """A scripted module's parameters have no get()."""
    return next((parameter for own, parameter in part._parameters.items() if own == name), None)


def _mark(gradient: Tensor) -> tuple[Any, ...]:
    """Another one for another gradient, and for one that was written. It begins with its dtype and device."""
    local = local_of(gradient)
    if local.is_sparse:
        local = local._values()
    mark = mark_of(gradient, local) if local.layout == torch.strided else (id(gradient), gradient._version)
    return gradient.dtype, gradient.device, *mark
