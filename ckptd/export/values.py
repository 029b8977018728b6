"""What is no tensor, as plain values that every reader knows: no class of the program that saved it is needed, or looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ckptd_client import tree

from ckptd.core.errors import CkptdError
from ckptd.export.stored import Stored

Find = Callable[[str], Stored]  # a tensor that is stored as such, by its key


def plain(blob: bytes, name: str, find: Find) -> Any:
    """Enum members are their values, paths and dates text, arrays tensors, generators their states. Raises CkptdError for what does
    not parse."""
    try:
        return tree.decode(blob, find, _PLAIN)
    except ValueError as error:
        raise CkptdError(str(error), where=name, hint="leave it out with --only") from error


def _array(value: Any) -> Any:
    dtype, shape, data = value
    if not tree.NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError("no numpy dtype that is saved")
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    try:
        return torch.from_numpy(array)
    except TypeError:  # texts, dates
        return array.astype(str).tolist()


def _number(value: Any) -> Any:
    found = _array(value)
    return found.item() if isinstance(found, torch.Tensor) else found


_PLAIN: dict[int, Callable[[Any], Any]] = {
    tree.ENUM: lambda value: value[2],
    tree.PATH: str,
    tree.DATETIME: str,
    tree.FROZENSET: set,
    tree.COUNTER: dict,
    tree.NDARRAY: _array,
    tree.NPSCALAR: _number,
    tree.GENERATOR: lambda value: {"device": value[0], "state": tree.tensor_from_bytes("U8", [len(value[1])], value[1])},
}
