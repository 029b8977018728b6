"""Which optimizers step, registered or not, and when gradients have been used (P15): a hook after every step tells."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ckptd_client.interrupts import by_a_signal
from ckptd_client.naming import local_of

log = logging.getLogger("ckptd")
_serials = itertools.count(1)  # of steps and of registrations, in the order in which they happened
_first: MutableMapping[Optimizer, int] = WeakIdKeyDictionary()  # a class may have no hash
_last: MutableMapping[Optimizer, int] = WeakIdKeyDictionary()
_accumulating: weakref.WeakSet[Accumulating] = weakref.WeakSet()
_lock = threading.Lock()
_installed = False


def install() -> None:
    """Once per process."""
    global _installed
    with _lock:
        if not _installed:
            _installed = True
            register_optimizer_step_post_hook(torch._disable_dynamo(_after_step))  # type: ignore[attr-defined]
            _wrap(Optimizer, "zero_grad")
            _wrap(torch.amp.GradScaler, "update")  # it may have left a step out


def begins(optimizer: Optimizer) -> None:
    """A step begins: a hook of the user's may take a snapshot before ours has heard that it is over."""
    _gradients_used(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    serial = next(_serials)
    _first.setdefault(optimizer, serial)
    _last[optimizer] = serial
    _gradients_used(optimizer)


class Accumulating(Protocol):
    def used(self, by: Optimizer | None = None) -> None:
        """What gradients were there has been used, or is dropped."""


def tell_of_used_gradients(whom: Accumulating) -> None:
    _accumulating.add(whom)


def _gradients_used(by: Optimizer | None) -> None:
    for each in list(_accumulating):
        try:
            each.used(by)
        except Exception as error:
            if by_a_signal(error):
                raise
            log.exception("ckptd client: gradients")  # never the trainer's problem (P5)


def _wrap(kind: Any, name: str) -> None:
    inner = getattr(kind, name)

    @functools.wraps(inner)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = inner(self, *args, **kwargs)
        _gradients_used(self if isinstance(self, Optimizer) else None)
        return value

    setattr(kind, name, torch._disable_dynamo(wrapped))  # type: ignore[attr-defined]


def now() -> int:
    """A serial of its own for what happens now."""
    return next(_serials)


def stepped() -> Iterator[Optimizer]:
    """All that have stepped and are still there."""
    return iter(list(_last))


def last(optimizer: Optimizer) -> int:
    """The serial of its newest step; 0: none was seen."""
    return _last.get(optimizer, 0)


def first(optimizer: Optimizer) -> int:
    """The serial of its first step, which is nobody else's; 0: none was seen."""
    return _first.get(optimizer, 0)


def took_over(optimizer: Optimizer, other: Optimizer, since: int) -> bool:
    """Has ``optimizer``, registered at ``since``, stepped only after the last step of ``other``? Then that one's state is of
    a phase of training that is over."""
    return _first.get(optimizer, since) > _last.get(other, 0)


def storages() -> set[int]:
    """Addresses of the memory of all parameters and states of optimizers that have stepped: nobody else should write there."""
    found: set[int] = set()
    for optimizer in stepped():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held += [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        found.update(local_of(value).untyped_storage().data_ptr() for value in held if isinstance(value, torch.Tensor))
    return found
