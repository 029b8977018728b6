"""Collectives write past version counters: a backend fills the tensors that it is given below autograd. So one that is to write
what a capture still reads waits first, as an optimizer's step does (P1)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# Methods of torch.distributed.ProcessGroup whose first argument is written; which there are depends on the version of torch.
WRITING = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource", "gather", "scatter", "allgather",
    "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
)  # fmt: skip


def install(before: Callable[[list[Tensor]], None]) -> None:
    """``before``: called with what a collective is about to write, in the thread that starts it."""
    if torch.distributed.is_available():
        for name in WRITING:
            if hasattr(torch.distributed.ProcessGroup, name):
                _wrap(torch.distributed.ProcessGroup, name, before)


def _wrap(kind: Any, name: str, before: Callable[[list[Tensor]], None]) -> None:
    inner = getattr(kind, name)

    @functools.wraps(inner)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(list(_tensors(args[:1] or list(kwargs.values())[:1])))
        return inner(self, *args, **kwargs)

    setattr(kind, name, torch._disable_dynamo(wrapped))  # type: ignore[attr-defined]


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)


def storages(written: Sequence[Tensor | UntypedStorage]) -> set[int]:
    """Addresses of what they lie in; of one without memory of its own there is none."""
    found = set()
    for each in written:
        try:
            found.add((each.untyped_storage() if isinstance(each, Tensor) else each).data_ptr())
        except (RuntimeError, NotImplementedError):  # a wrapper: its parts are given by themselves
            continue
    return found - {0}
