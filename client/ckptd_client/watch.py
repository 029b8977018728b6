"""Which optimizers step, registered or not (P15): a hook after every optimizer's step tells."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_serials = itertools.count(1)  # of steps and of registrations, in the order in which they happened
_first: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_installed = False


def install() -> None:
    """Once per process."""
    global _installed
    with _lock:
        if not _installed:
            _installed = True
            register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    serial = next(_serials)
    _first.setdefault(optimizer, serial)
    _last[optimizer] = serial


def now() -> int:
    """A serial of its own for what happens now."""
    return next(_serials)


def stepped() -> Iterator[Optimizer]:
    """All that have stepped and are still there."""
    return iter(list(_last))


def has_stepped(optimizer: Optimizer) -> bool:
    return optimizer in _first


def took_over(optimizer: Optimizer, other: Optimizer, since: int) -> bool:
    """Has ``optimizer``, registered at ``since``, stepped only after the last step of ``other``? Then that one's state is of
    a phase of training that is over."""
    return _first.get(optimizer, since) > _last.get(other, 0)
