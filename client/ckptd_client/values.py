"""Registered plain values: what of them a restore can give back, so that everybody who holds them sees it (design D11)."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ckptd_client.entries import Owner
from ckptd_client.same import same
from ckptd_client.tree import ForeignType

INSIDE = (list, dict, set, torch.Generator)  # and arrays: what can be written into


def check(owner: Owner) -> None:
    """Raises TypeError for a value that nothing could be written into: it is saved as it is now for ever, and given back to
    nobody. None is nothing to give back."""
    value = owner.value
    if value is None or owner.replaceable or isinstance(value, INSIDE) or _is_array(value):
        return
    kind, name = type(value).__name__, owner.name
    raise ForeignType(
        f"{name}: no restore could give this {kind} back: it cannot be written into, and nothing that is registered holds it;"
        f' register the dict, list or object with state_dict() that does, as in register(progress={{"{name}": ...}})'
    )


def fits(owner: Owner, saved: Any) -> bool:
    """Can it be given back?"""
    return owner.replaceable or _fillable(owner.value, saved) or same(owner.value, saved)


def give_back(owner: Owner, saved: Any) -> None:
    """After ``fits``."""
    if not _fill(owner.value, saved, set()):
        owner.replace(saved)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _fillable(target: Any, saved: Any) -> bool:
    if _is_array(target):
        alike = _is_array(saved) and (target.dtype, target.shape) == (saved.dtype, saved.shape)
        return bool(alike and target.flags.writeable)
    return any(isinstance(target, kind) and isinstance(saved, kind) for kind in INSIDE)


def _fill(target: Any, saved: Any, filled: set[int]) -> bool:
    """What lies in a dict under a name is filled, too: the program may have it in a variable (a list of losses), and append there.
    ``filled``: ids of what is already; where it lies under two names it cannot hold both values."""
    if id(target) in filled or not _fillable(target, saved):
        return False
    filled.add(id(target))
    if isinstance(target, torch.Generator):
        target.set_state(saved.get_state())
    elif isinstance(target, dict):
        held = dict(target)
        target.clear()
        for key, value in saved.items():
            old = held.get(key)
            target[key] = old if type(old) is type(value) and _fill(old, value, filled) else value
    elif isinstance(target, set):
        target.clear()
        target.update(saved)
    else:
        target[... if _is_array(target) else slice(None)] = saved
    return True
