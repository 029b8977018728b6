"""From a rule and a tensor to where that lies (design D18): what ``over`` means, and what torch has cut further."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd_client import naming
from ckptd_client.entries import Copies, Owner, Placed, check_fits, matches
from ckptd_client.rules import Axis, Own, laid, rule_of
from ckptd_client.runs import Run, boxes_of, cut, dim_cuts


@dataclass(eq=False)
class Axes:
    """What ``over`` means: a dimension of ``mesh`` by name, a mesh of one dimension, a process group."""

    mesh: Any = None
    _known: dict[Any, Axis] = field(default_factory=dict)

    def of(self, key: str, over: Any) -> Axis:
        """Raises CkptdError: nothing is meant by it."""
        if over not in self._known:
            self._known[over] = self._find(key, over)
        return self._known[over]

    def _find(self, key: str, over: Any) -> Axis:
        if isinstance(over, str):
            names = (self.mesh.mesh_dim_names if self.mesh is not None else None) or ()
            if over not in names:
                known = f"the mesh has {', '.join(names)}" if names else "no mesh with names was registered"
                raise CkptdError(f"over={over!r}: {known}", where=key, hint="register(..., mesh=init_device_mesh(...)), or a group")
            over = self.mesh[over]
        if hasattr(over, "get_local_rank"):  # a mesh
            if over.ndim != 1:
                raise CkptdError(f"over= a mesh of {over.ndim} dimensions", where=key, hint="one of them: mesh[name]")
            return Axis(tuple(map(int, over.mesh.tolist())), over.get_local_rank())
        if isinstance(over, dist.ProcessGroup):
            ranks = tuple(dist.get_process_group_ranks(over))
            return Axis(ranks, ranks.index(dist.get_rank()))
        raise CkptdError(f"over= a {type(over).__name__}", where=key, hint="a name, a mesh of one dimension or a process group")


def of(key: str, owner: Owner, tensor: Tensor, copies: Copies | None) -> Placed | None:
    """None: no rule fits it. Raises CkptdError naming the key and what does not fit."""
    rule = rule_of(key, owner.rules, matches)
    if rule is None or isinstance(rule, Own):
        return None
    found = laid(key, rule, tuple(tensor.shape), partial(owner.axes.of, key))
    shared = found.copies * (len(copies.ranks) if copies is not None and not copies.first_only else 1)
    runs, parts = _within_mesh(key, tensor, found.runs, len(found.shape))
    if naming.is_dtensor(tensor):
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        shared *= mesh.size() // parts
    padding = tuple(
        (dim, at, length) for dim, size in enumerate(found.shape) for at, length in _behind(runs[dim], size)
    )
    boxes = tuple(boxes_of(runs, found.shape))
    return Placed(found.shape, boxes, ranks=found.cut * parts * shared, alone=shared == 1, padding=padding)


def _within_mesh(key: str, tensor: Any, outer: Sequence[list[Run]], dims: int) -> tuple[list[list[Run]], int]:
    """What of the rule's runs this rank has, where torch has cut them further; and in how many parts it did."""
    if not naming.is_dtensor(tensor):
        return list(outer), 1
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placements):
        raise CkptdError(f"a rule for a DTensor with placements {placements}", where=key, hint="a rank needs a whole value of it")
    shape = tuple(mesh.mesh.shape)
    cuts = [dim_cuts(dim, shape, coordinate, placements, key) for dim in range(dims)]
    parts = math.prod(size for size, placement in zip(shape, placements, strict=True) if not placement.is_replicate())
    return [cut(list(runs), of) for runs, of in zip(outer, cuts, strict=True)], parts


def _behind(runs: Sequence[Run], size: int) -> list[Run]:
    """Where in this rank's dimension lies what is no part of the logical one."""
    found, at = [], 0
    for start, length in runs:
        past = min(length, max(0, start + length - size))
        if past:
            found.append((at + length - past, past))
        at += length
    return found


def check(owners: Sequence[Owner]) -> None:
    """At registration. Raises CkptdError for a rule that fits nothing, or not what it fits."""
    rules = next((owner.rules for owner in owners if owner.rules), {})
    if not rules:
        return
    keys: set[str] = set()
    whole: dict[str, bool] = {}  # of patterns that say own()
    for owner in owners:
        spots = naming.walk(owner.value)[0] if owner.kind == "module" else []
        found = [(owner.rename(f"{owner.name}.{spot.name}"), spot.tensor, spot.copies) for spot in spots]
        if owner.kind == "tensor":
            found = [(owner.rename(owner.name), owner.value, None)]
        for key, tensor, copies in found:
            keys.add(key)
            of(key, owner, tensor, copies)
            for pattern, rule in rules.items():
                if isinstance(rule, Own) and matches(key, [pattern]):
                    whole[pattern] = whole.get(pattern, False) or not naming.is_dtensor(tensor) or is_whole(tensor)
    check_fits("rules", list(rules), keys)
    for pattern in (pattern for pattern, found in whole.items() if not found):
        raise CkptdError("own() is for what a rank has whole, and all that this fits is cut by torch", where=pattern)


def is_whole(tensor: Any) -> bool:
    """A DTensor of which each rank has all."""
    return all(placement.is_replicate() for placement in tensor.placements)
