"""The head of a safetensors file whose tensors are whole: what its readers need and nothing of ours."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.dtypes import ITEMSIZE

HEADER_BYTES_MAX = 100_000_000  # what readers of the format accept


def header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """(name, dtype, shape) of each, in the order of their bytes, which follow without gaps. Raises CkptdError: too many."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEMSIZE[dtype]
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise CkptdError(f"{len(tensors)} tensors in one file are more than readers take", hint="smaller files")
    return struct.pack("<Q", len(text)) + text
