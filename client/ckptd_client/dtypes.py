"""torch dtypes by their safetensors names, the vocabulary of layouts and files."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, at) for name, at in _NAMES.items() if hasattr(torch, at)
}
NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype, key: str) -> str:
    """Raises CkptdError naming ``key`` for a dtype that safetensors has no name for (complex128, quantized)."""
    name = NAME.get(dtype)
    if name is None:
        raise CkptdError(
            f"dtype {dtype} cannot be saved", where=key, hint="leave it out with exclude=, or convert it"
        )
    return name


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size: copies of it are exact whatever the values (NaN payloads, fp8)."""
    return tensor.view(_SAME_SIZE[tensor.element_size()])
