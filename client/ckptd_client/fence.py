"""The optimizer waits, not the loop (design D6): one global hook before every optimizer's step."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptd_client import _switches
from ckptd_client.rng import cuda_in_use

log = logging.getLogger("ckptd")


class Fenced(Protocol):
    def before_step(self, optimizer: Optimizer) -> None:
        """Wait, bounded, until nothing that the optimizer may write is still being read."""

    def not_fenced(self, optimizer: Optimizer) -> None:
        """This optimizer's steps escape the hook (a graph replays them)."""

    def fence(self) -> None: ...


class _Clients:
    def __init__(self) -> None:
        self.live: weakref.WeakSet[Fenced] = weakref.WeakSet()
        self.steps = 0  # optimizer steps of this process so far
        self.installed = False
        self.lock = threading.Lock()


_clients = _Clients()


def steps() -> int:
    """How many optimizer steps this process has begun."""
    return _clients.steps


def join(client: Fenced) -> None:
    """From now on optimizers wait for this client's captures."""
    with _clients.lock:
        _clients.live.add(client)
        if _clients.installed:
            return
        _clients.installed = True
        register_optimizer_step_pre_hook(_before_step)
        _wrap_averaged_model()


def leave(client: Fenced) -> None:
    with _clients.lock:
        _clients.live.discard(client)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _clients.steps += 1
    if not _switches.FENCE:
        return
    capturing = cuda_in_use() and torch.cuda.is_current_stream_capturing()
    for client in list(_clients.live):
        try:
            if capturing:
                client.not_fenced(optimizer)
            else:
                client.before_step(optimizer)
        except Exception:
            log.exception("ckptd client: fence")  # never the trainer's problem (P5)


def _wrap_averaged_model() -> None:
    """EMA weights are written outside of any optimizer: their own update fences, so they need not be copied at once."""
    model = torch.optim.swa_utils.AveragedModel
    update = model.update_parameters

    @functools.wraps(update)
    def fenced(self: Any, *args: Any, **kwargs: Any) -> None:
        if _switches.FENCE:
            for client in list(_clients.live):
                client.fence()
        update(self, *args, **kwargs)

    model.update_parameters = fenced  # type: ignore[method-assign]
