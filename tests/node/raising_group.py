"""A process group of one rank, in which every collective raises while it is armed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

_armed = False
_NONE = ("__", "size", "name", "group_name", "pg_name", "getBackendName", "rank", "_start", "_end", "reset", "exception")


def _guarded(name: str, run: Any) -> Any:
    def guarded(self: Any, *args: Any, **how: Any) -> Any:
        assert not _armed, f"collective {name} during snapshot()"
        return run(self, *args, **how)

    return guarded


_methods = {name: method for name, method in vars(ProcessLocalGroup).items() if callable(method)}
RaisingGroup: Any = type(
    "RaisingGroup",
    (ProcessLocalGroup,),
    {name: _guarded(name, method) for name, method in _methods.items() if not name.startswith(_NONE)},
)


@contextmanager
def raising_group() -> Iterator[None]:
    """As the default group of this process."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return RaisingGroup(rank, size)

    if "raising" not in dist.Backend.backend_list:
        dist.Backend.register_backend("raising", make, devices=["cpu"])
    dist.init_process_group("raising", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def armed() -> Iterator[None]:
    global _armed
    _armed = True
    try:
        yield
    finally:
        _armed = False
