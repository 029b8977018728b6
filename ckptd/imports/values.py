"""Plain values among another program's state: what of them can be written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptd.imports.stored import Stored
from ckptd.imports.unpickle import DType, Record

TENSOR_BYTES_MAX = 1 << 20  # of a tensor among plain values
DEPTH_MAX = 100


def why_not(value: Any, depth: int = 0) -> str | None:
    """Why it cannot be written, with the name of the class; None: it can."""
    if depth > DEPTH_MAX:
        return f"nested deeper than {DEPTH_MAX}"
    if isinstance(value, Record):
        return f"it holds a {value.name}"
    if isinstance(value, dict):
        return next((why for pair in value.items() for item in pair if (why := why_not(item, depth + 1))), None)
    if isinstance(value, list | tuple | set | frozenset):
        return next((why for item in value if (why := why_not(item, depth + 1))), None)
    if isinstance(value, Stored):
        return None if value.nbytes <= TENSOR_BYTES_MAX else f"it holds a tensor of {value.nbytes} bytes"
    known = value is None or isinstance(value, bool | int | float | str | bytes | complex | DType)
    return None if known else f"it holds a {type(value).__name__}"


def plain(value: Any) -> Any:
    """After ``why_not``: with torch's tensors and dtypes."""
    import torch

    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(plain, value))
    if isinstance(value, DType):
        return getattr(torch, value.torch)
    if isinstance(value, Stored):
        from ckptd_client.tree import tensor_from_bytes

        return tensor_from_bytes(value.dtype, list(value.shape), np.ascontiguousarray(value.read()).tobytes())
    return value
