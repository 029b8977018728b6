"""torch dtypes by their safetensors names, the vocabulary of layouts and files."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.dtypes import TORCH_NAMES

TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, at) for name, at in TORCH_NAMES.items() if hasattr(torch, at)
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
