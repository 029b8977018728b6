"""Version counters, by which a write that passed no fence is known (design D6).

A counter that moved proves a write. One that stands still proves nothing: fused optimizers, BatchNorm, foreach over DTensors
and writes through ``.data`` move none. Those are for the audit to find.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from ckptd_client import nested
from ckptd_client.entries import Owner
from ckptd_client.registry import Registry

_version = attrgetter("_version")  # of 20,000 held tensors in 1.5 ms; looked up one by one they take three times as long
_content = attrgetter("_cdata")  # where torch keeps what the tensor is: a swap changes that, and leaves its identity


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
        self.watched = [*watched, *sharded]
        self.tensors: list[Tensor] = [tensors[one.entry] for one in watched]
        self.tensors += [tensors[one.entry]._local_tensor for one in sharded]  # type: ignore[attr-defined]
        self._noted = counters(self.tensors)

    def moved(self) -> list[Watched]:
        """What was written since."""
        now = counters(self.tensors)
        if now == self._noted:
            return []
        changed = (one for one, then, at in zip(self.watched, self._noted, now, strict=True) if then != at)
        return list(dict.fromkeys(changed))


class Seen:
    """What a snapshot saw, for a look at the next call: which tensors there were, and what their counters were. It holds none of
    them, not even weakly: torch swaps no tensor that somebody refers to so, and a replaced one is memory that the user wants."""

    def __init__(
        self, keys: Sequence[str], tensors: Sequence[Tensor], sharded: Collection[int], placed: Sequence[int]
    ) -> None:
        """``sharded``: the indices of DTensors, whose local parts count for themselves. ``placed``: those of which it is
        noted which tensors they are; an optimizer's are told by their counters alone."""
        self._keys = keys
        self._counters = counters(tensors)
        self._places = dict(zip(placed, map(_content, (tensors[at] for at in placed)), strict=True))
        locals_ = counters([tensors[at]._local_tensor for at in sharded])  # type: ignore[attr-defined]
        self._locals = dict(zip(sharded, locals_, strict=True))

    @classmethod
    def of(cls, watched: Sequence[Watched], tensors: Sequence[Tensor]) -> Seen:
        """``tensors``: of the plan's entries."""
        sharded = [at for at, one in enumerate(watched) if one.sharded]
        return cls([one.key for one in watched], [tensors[one.entry] for one in watched], sharded, range(len(watched)))

    def other_in(self, now: Seen) -> list[str]:
        """Keys of what is another one ``now``, was written, or was not there."""
        mine, its = self._marks(), now._marks()
        return [key for key, mark in its.items() if mine.get(key) != mark]

    def _marks(self) -> dict[str, tuple[int, int, int]]:
        found = enumerate(zip(self._keys, self._counters, strict=True))
        return {key: (counter, self._places.get(at, 0), self._locals.get(at, 0)) for at, (key, counter) in found}


def of_what_is_fenced(registry: Registry) -> list[tuple[int, int]]:
    """(which, counter) of parameters, registered tensors and optimizer state: what captures in the background may read."""
    tensors = [parameter for owner in registry.of_kind("module") for parameter in owner.value.parameters()]
    tensors += [owner.value for owner in registry.of_kind("tensor")]
    inner = (optimizer for owner in registry.of_kind("optimizer") for optimizer in nested.optimizers(owner.value))
    states = (state for optimizer in inner for state in optimizer.state.values() if isinstance(state, dict))
    tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return list(zip(map(id, tensors), counters(tensors), strict=True))


def counters(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # inference tensors have none
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
