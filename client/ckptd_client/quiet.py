"""``state_dict()`` of user objects is called on this rank alone, so it must not wait for another one (P5, P15)."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.core.errors import CkptdError

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})  # namespaces of operators
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered a collective raises CkptdError naming ``what``, before any other rank is asked."""

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # DTensor asks for shapes only; a fake tensor reaches no other rank
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # the subclass takes the operator apart first, DTensor into collectives
        if func.namespace in _COLLECTIVES:
            raise CkptdError(
                f"its state_dict() runs a collective ({func.namespace}.{func.__name__})", where=self._what,
                hint="a snapshot is taken by each rank at its own time: save what this rank has, or leave it out with exclude=",
            )  # fmt: skip
        return func(*args, **(kwargs or {}))
