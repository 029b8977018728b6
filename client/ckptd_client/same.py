"""Are two pieces of saved state the same? What ranks saved, what a group's parameters had, what a module took back (design D11)."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from ckptd_client import dtypes


def same(a: Any, b: Any) -> bool:
    """Tensors and arrays bit by bit; numbers by value, whatever their type, and a value that is no number is the
    same as itself. A list and a tuple of the same are the same, and so are mappings, whatever the order of their keys."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensor(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
        return a.device == b.device and same(a.get_state(), b.get_state())
    if isinstance(a, Number) and isinstance(b, Number):  # numpy's scalars, too
        return isinstance(a, bool) == isinstance(b, bool) and bool(a == b or (a != a and b != b))
    if hasattr(a, "tobytes") or hasattr(b, "tobytes"):  # an array, or a scalar that is no number
        return type(a) is type(b) and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return bool(a == b) or bool(a != a and b != b)


def differing(now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Names of what was saved that is not there now, or is another."""
    return [key for key, value in saved.items() if key not in now or not same(now[key], value)]


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    first, second = (dtypes.as_bits(value.detach().cpu().contiguous()) for value in (a, b))
    return torch.equal(first, second)
