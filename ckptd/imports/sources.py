"""Which program's checkpoint: each kind is read by one module of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.imports import dcp, megatron, safetensors_files, torch_file, universal, zero
from ckptd.imports.dcp import Plans
from ckptd.imports.unpickle import Record


class Kind(str, Enum):
    TORCH = "torch"
    HF = "hf"
    DCP = "dcp"
    UNIVERSAL = "universal"
    ZERO = "zero"
    TORCH_DIST = "torch_dist"


@dataclass
class Found:
    """A state by the names that its program gave it. step: as it says, else 0. foreign: classes in it that are not known. as_is:
    names need no owner. plans: all of it, in place of a tree, as the plans named it that saved it."""

    tree: Mapping[Any, Any]
    step: int = 0
    foreign: set[str] = field(default_factory=set)
    as_is: bool = False
    plans: Plans | None = None


def load(path: str, kind: Kind, *, as_is: bool = False) -> Found:
    """as_is: what torch.distributed.checkpoint wrote stays as it is. Raises CkptdError."""
    if not os.path.exists(path):
        raise CkptdError("no such file or directory", where=path, hint="name a checkpoint")
    if as_is and kind not in _BY_PLANS:
        raise CkptdError(f"--from {kind.value} has no --as-is", where="--as-is", hint="it is for --from dcp")
    foreign: set[str] = set()
    if kind is Kind.TORCH_DIST or as_is:
        plans, step = _BY_PLANS[kind](path, foreign)
        return Found({}, step, foreign, plans=plans)
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
_BY_PLANS: dict[Kind, Callable[[str, set[str]], tuple[Plans, int]]] = {
    Kind.DCP: lambda path, foreign: (dcp.load_plans(path, foreign), 0),
    Kind.TORCH_DIST: megatron.load,
}
