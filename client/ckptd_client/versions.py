"""Version counters, by which a write that passed no fence is known (design D6).

A counter that moved proves a write. One that stands still proves nothing: fused optimizers, BatchNorm, foreach over DTensors
and writes through ``.data`` move none. Those are for the audit to find.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from ckptd_client.entries import Owner

_version = attrgetter("_version")  # of 20,000 held tensors in 1.5 ms; looked up one by one they take three times as long


class Watched(NamedTuple):
    """A parameter, a tensor registered as one, or optimizer state: entry number ``entry`` of the plan. ``behind``: this rank
    copies it in the background; ``fenced``: some rank does."""

    entry: int
    key: str
    owner: Owner
    sharded: bool  # a DTensor
    fenced: bool
    behind: bool


class Versions:
    """What the counters were when it was made. They are asked when the first fence begins, before any optimizer writes: what
    moved those of its state until then was somebody else."""

    def __init__(self, watched: Sequence[Watched], tensors: Sequence[Tensor]) -> None:
        """``tensors``: of the plan's entries. A write to a DTensor does not count as one to its local part, nor the other way
        round, so both are watched."""
        sharded = [one for one in watched if one.sharded]
        self._watched = [*watched, *sharded]
        self._tensors: list[Tensor] = [tensors[one.entry] for one in watched]
        self._tensors += [tensors[one.entry]._local_tensor for one in sharded]  # type: ignore[attr-defined]
        self._noted = list(map(_version, self._tensors))
        self._weak: list[weakref.ref[Tensor]] | None = None

    def moved(self) -> list[Watched]:
        """What was written since; once let go of, also what is there no more."""
        held = self._tensors  # before the look at ``_weak``, which another thread may set
        try:
            now = list(map(_version, held if self._weak is None else [_alive(weak) for weak in self._weak]))
        except (ReferenceError, RuntimeError):
            return list(self._watched)  # one is there no more, or has become an inference tensor: nothing is known
        if now == self._noted:
            return []
        changed = (one for one, then, at in zip(self._watched, self._noted, now, strict=True) if then != at)
        return list(dict.fromkeys(changed))

    def let_go(self) -> None:
        """The capture is over: nothing of the trainer's is kept alive for a later look."""
        if self._weak is None:
            self._weak = [weakref.ref(tensor) for tensor in self._tensors]
            self._tensors = []


def _alive(weak: weakref.ref[Tensor]) -> Tensor:
    tensor = weak()
    if tensor is None:
        raise ReferenceError
    return tensor
