"""Elements of every dtype as numbers to compare with, and how far two are apart."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ckptd.core.state_map.dtypes import TORCH_NAMES

Numbers = np.ndarray[Any, np.dtype[Any]]

_PLAIN = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8",
}  # fmt: skip
_EIGHT = {name: torch for name, torch in TORCH_NAMES.items() if name.startswith("F8_")}  # numpy has none of these


def numbers(data: memoryview, dtype: str) -> Numbers:
    """ValueError: not a dtype of safetensors that is known."""
    if dtype in _PLAIN:
        return np.frombuffer(data, f"<{_PLAIN[dtype]}")
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in _EIGHT:
        return _table(dtype)[np.frombuffer(data, np.uint8)]
    raise ValueError(f"no numbers of dtype {dtype}")


@lru_cache(maxsize=len(_EIGHT))
def _table(dtype: str) -> Numbers:
    """All 256 values of an 8-bit float, as torch has them."""
    import torch

    made: Numbers = torch.arange(256, dtype=torch.uint8).view(getattr(torch, _EIGHT[dtype])).double().numpy()
    return made


def distance(a: Numbers, b: Numbers) -> int | float:
    """The largest absolute difference of elements at the same place; of whole numbers of one kind exactly. Two that are both no
    number are 0 apart, one that is none and a number infinitely far."""
    if not len(a):
        return 0
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        wide = np.dtype(f"u{a.dtype.itemsize}")
        return int((np.maximum(a, b).view(wide) - np.minimum(a, b).view(wide)).max())  # it wraps where it must
    kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        x, y = a.astype(kind), b.astype(kind)
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())
