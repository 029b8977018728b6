"""Gradients in the middle of an accumulation: captured with ``register(..., gradients=True)``, else told once (P15)."""

from __future__ import annotations

import logging
import threading
import weakref
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
        Entry(key_of(entry), gradient, "extra", entry.owner, Mode.SYNC, placed=entry.placed_like(gradient))
        for entry, gradient in found
        if gradient is not None
    ]


def marks(registry: Registry) -> list[Any]:
    """Of the gradients that are registered, there or not."""
    owners = (owner for owner in registry.of_kind("module") if owner.gradients)
    found = (parameter.grad for owner in owners for parameter in owner.value.parameters())
    return [None if gradient is None else _mark(gradient) for gradient in found]


class _Thread:
    """Lives as long as its thread, whose number is the next one's at once."""


_local = threading.local()


def _this_thread() -> weakref.ref[_Thread]:
    if not hasattr(_local, "thread"):
        _local.thread = _Thread()
    return weakref.ref(_local.thread)


class Accumulation:
    """Looks at the first and the last trained parameter: a backward pass writes the gradients of all, or of most. They are chosen
    before training begins, so that the first snapshot knows which gradients have been used."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._sample: list[Callable[[], Tensor | None]] = []  # where they hang
        self._marks: dict[int, Any] = {}  # by id of the parameter, as the two below
        self._noted: set[int] = set()  # has been used since it was chosen
        self._told = False
        self._threads: dict[int, weakref.ref[_Thread]] = {}  # which one trains each
        watch.tell_of_used_gradients(self)

    def sample(self, state: State) -> None:
        trained = [
            entry
            for entry in state.params.values()
            if entry.mode is Mode.FENCED and entry.tensor.requires_grad and not entry.owner.gradients
        ]
        sample = {id(entry.tensor): entry for entry in (*trained[:1], *trained[-1:])}
        self._noted = set(self._noted).intersection(sample)
        self._sample = [_place_of(entry) for entry in sample.values()]
        self._marks = {each: mark for each, mark in list(self._marks.items()) if each in sample}
        self._threads = {each: self._threads.get(each, _this_thread()) for each in sample}

    def used(self, by: Optimizer | None = None) -> None:
        """An optimizer has stepped, or dropped them; or a restore has made those that are there a thing of the past. What one
        thread trains says nothing of what another does, whose gradients a backward pass may write at this moment: to read them
        would crash."""
        here = _this_thread()
        for parameter in self._there():
            name = id(parameter)
            if self._threads.get(name, here) != here:
                if not (self._may_read(name) if by is None else _trains(by, parameter)):
                    continue
                self._threads[name] = here
            gradient = parameter.grad
            self._marks[name] = None if gradient is None else _mark(gradient)
            self._noted.add(name)

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
            return id(parameter) in self._noted or fence.steps() == 0
        if mark[:2] != now[:2]:
            self._marks[id(parameter)] = now
            return False
        return bool(mark != now)

    def _there(self) -> Iterator[Tensor]:
        return (parameter for find in self._sample if (parameter := find()) is not None)

    def _now(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in self._there():
            gradient = parameter.grad if self._may_read(id(parameter)) else None
            if gradient is not None:
                yield parameter, gradient

    def _may_read(self, name: int) -> bool:
        """No other thread trains it that lives."""
        here = _this_thread()
        return self._threads.get(name, here)() in (here(), None)


def _trains(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(each is parameter for group in optimizer.param_groups for each in group["params"])


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
