"""Which program's checkpoint: each kind is read by one module of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.imports import dcp, safetensors_files, torch_file, universal, zero
from ckptd.imports.unpickle import Record


class Kind(str, Enum):
    TORCH = "torch"
    HF = "hf"
    DCP = "dcp"
    UNIVERSAL = "universal"
    ZERO = "zero"


@dataclass
class Found:
    """A state by the names that its program gave it. step: as it says, else 0. foreign: classes in it that are not known. as_is:
    names need no owner."""

    tree: Mapping[Any, Any]
    step: int = 0
    foreign: set[str] = field(default_factory=set)
    as_is: bool = False


def load(path: str, kind: Kind) -> Found:
    """Raises CkptdError."""
    if not os.path.exists(path):
        raise CkptdError("no such file or directory", where=path, hint="name a checkpoint")
    foreign: set[str] = set()
    tree, step = _READERS[kind](path, foreign)
    if not isinstance(tree, Mapping):
        name = tree.name if isinstance(tree, Record) else type(tree).__name__
        raise CkptdError(f"it holds a {name}", where=path, hint="a dict of tensors, or of state_dict()s, is wanted")
    return Found(tree, step, foreign, kind is Kind.HF)


_READERS: dict[Kind, Callable[[str, set[str]], tuple[Any, int]]] = {
    Kind.TORCH: lambda path, foreign: (torch_file.load(path, foreign), 0),
    Kind.HF: lambda path, foreign: (safetensors_files.load(path), 0),
    Kind.DCP: lambda path, foreign: (dcp.load(path, foreign), 0),
    Kind.UNIVERSAL: universal.load,
    Kind.ZERO: zero.load,
}
