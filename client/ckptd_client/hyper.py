"""What an optimizer's parameter groups hold beside the parameters: were they changed since its first step, as a scheduler does?

What a program sets before that step it sets again after a restore; what was changed later is lost unless it is saved (P15).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ckptd_client.same import differing
from ckptd_client.statics import mark_of

SMALL_MAX = 1024  # elements of a tensor that may be a counter or a table; larger ones are more likely scratch memory
_first: MutableMapping[Optimizer, list[dict[str, Any]]] = WeakIdKeyDictionary()  # each group's marks


def begins(optimizer: Optimizer) -> None:
    """Called by the hook when its step begins."""
    noted = _first.setdefault(optimizer, [])
    noted.extend(map(marks, optimizer.param_groups[len(noted) :]))


def changed(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
    """(group, names of its values that are others than before the first step that the hook has seen, or new)."""
    found = []
    for group, before in zip(optimizer.param_groups, _first.get(optimizer, ()), strict=False):
        now = marks(group)
        names = sorted({*differing(now, before), *(now.keys() - before.keys())})
        if names:
            found.append((group, names))
    return found


def marks(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of numbers, tuples of numbers and small tensors: what tells that they are others (``same``). No device is waited for."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Number) or (isinstance(value, tuple) and all(isinstance(each, Number) for each in value)):
            found[key] = value
        elif type(value) is Tensor and value.layout == torch.strided and not value.is_inference() and value.numel() <= SMALL_MAX:
            found[key] = mark_of(value, value)
    return found
