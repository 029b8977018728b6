"""What steers a registered optimizer and is registered nowhere: learning rate schedulers and gradient scalers (P15).

A restored job would begin them anew, beside an optimizer that goes on. No snapshot is failed for that: a program may set them again
by itself. torch's schedulers mark the optimizer that they are made for (``ReduceLROnPlateau`` does not), scalers call its step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptd_client import nested, resolve
from ckptd_client.entries import matches
from ckptd_client.registry import Registry
from ckptd_client.scaler import ScalerState
from ckptd_client.troubles import Troubles

log = logging.getLogger("ckptd")
SCHEDULER, SCALER = "scheduler", "scaler"  # kinds of trouble
_OWN_KEYS = {SCHEDULER: "_last_lr", SCALER: "_growth_tracker"}  # in their state_dict(), and nobody else's
_scaled: weakref.WeakKeyDictionary[torch.amp.GradScaler, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()


@functools.cache
def _install() -> None:
    """Once per process."""
    inner: Any = torch.amp.GradScaler.step

    @functools.wraps(inner)
    def wrapped(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):  # of what allows no weak reference
            _scaled[self] = weakref.ref(optimizer)
        return inner(self, optimizer, *args, **kwargs)

    torch.amp.GradScaler.step = torch._disable_dynamo(wrapped)  # type: ignore[attr-defined,method-assign]


class Steering:
    """The training thread's."""

    def __init__(self, registry: Registry, troubles: Troubles) -> None:
        self._registry, self._troubles = registry, troubles
        self._seen: Any = None  # at the newest look
        _install()

    def look(self) -> None:
        """At a snapshot. Never the snapshot's problem (P5)."""
        try:
            mine = [each for owner in self._registry.of_kind("optimizer") for each in nested.optimizers(owner.value)]
            found = {SCHEDULER: self._scheduled(mine), SCALER: self._scaled(mine)}
            now = (self._registry.version, {kind: list(map(id, optimizers)) for kind, optimizers in found.items()})
            if now != self._seen:
                self._seen = now
                for kind, optimizers in found.items():
                    self._tell(kind, optimizers)
        except Exception:
            log.debug("ckptd client: schedulers and scalers", exc_info=True)

    def _tell(self, kind: str, optimizers: list[Optimizer]) -> None:
        if not optimizers or matches(kind, self._registry.without) or self._saves(_OWN_KEYS[kind]):
            self._troubles.clear(kind)
            return
        names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        self._troubles.report(
            kind,
            f"nobody registered the {kind} of a registered optimizer ({names}): after a restore it begins anew. "
            f"client.register({kind}=...), where a first restore() of a snapshot without it wants strict=False; or, if the "
            f"program sets it again by itself, register(..., without=[{kind!r}])",
        )

    def _scheduled(self, mine: list[Optimizer]) -> list[Optimizer]:
        """Those with a scheduler, none of which is registered."""
        owners = self._registry.of_kind("stateful")
        known = {id(owner.value.optimizer) for owner in owners if isinstance(owner.value, LRScheduler)}
        return [each for each in mine if hasattr(each.step, "_wrapped_by_lr_sched") and id(each) not in known]

    def _scaled(self, mine: list[Optimizer]) -> list[Optimizer]:
        """Those that a scaler stepped last, which is not registered."""
        owners = self._registry.of_kind("stateful")
        known = {id(owner.value.scaler) for owner in owners if isinstance(owner.value, ScalerState)}
        stepped = {id(which()) for scaler, which in list(_scaled.items()) if scaler.is_enabled() and id(scaler) not in known}
        return [each for each in mine if id(each) in stepped]

    def _saves(self, key: str) -> bool:
        """Does another registered object save one?"""
        owners = self._registry.of_kind("stateful", "value")
        others = (owner for owner in owners if not isinstance(owner.value, LRScheduler | ScalerState))
        return any(_has(owner.value if owner.kind == "value" else resolve.saved(owner), key) for owner in others)


def _has(saved: Any, key: str) -> bool:
    if isinstance(saved, Mapping):
        return key in saved or any(_has(value, key) for value in saved.values())
    return isinstance(saved, list | tuple) and any(_has(value, key) for value in saved)
