"""Is everything there that training needs to go on? What is not, is told by name before the snapshot counts (P15)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ckptd.core.errors import CkptdError
from ckptd.core.machine.waiting import shown
from ckptd_client import nested, optim, watch
from ckptd_client.entries import Entry, Owner, State, matches
from ckptd_client.registry import Registry


def check(registry: Registry, state: State) -> None:
    """Notes what ``without=`` leaves out in ``state``. Raises CkptdError naming the first parameter whose optimizer nobody
    registered."""
    lacking: list[tuple[Entry, Optimizer]] = []
    meant: set[str] = set()
    for optimizer in _strangers(registry):
        for entry in _unsaved(optimizer, registry, state):
            patterns = [pattern for pattern in registry.without if matches(entry.key, [pattern])]
            meant.update(patterns[:1])
            if not patterns:
                lacking.append((entry, optimizer))
    if lacking:
        raise _incomplete(lacking)
    state.without = tuple(sorted(meant))


def _incomplete(lacking: list[tuple[Entry, Optimizer]]) -> CkptdError:
    first, optimizer = lacking[0]
    keys = shown(entry.key for entry, _ in lacking)
    return CkptdError(
        f"incomplete: {keys}: stepped by an optimizer ({type(optimizer).__name__}) that nobody registered",
        where=first.key,
        hint="register the optimizer, or, if its state is meant to be absent, say so: "
        f'register(..., without=["{first.key}"])',
    )


def _strangers(registry: Registry) -> Iterator[Optimizer]:
    known = {id(optimizer) for owner in registry.owners.values() for optimizer in _speaks_for(owner)}
    return (optimizer for optimizer in watch.stepped() if id(optimizer) not in known)


def _speaks_for(owner: Owner) -> list[Optimizer]:
    if owner.kind == "optimizer":
        return nested.optimizers(owner.value)
    return nested.inside(owner.value) if owner.kind == "stateful" else []


def _unsaved(optimizer: Optimizer, registry: Registry, state: State) -> Iterator[Entry]:
    """Registered parameters that it has state for, and no other optimizer steps since."""
    heirs = _heirs(registry)
    kept: set[int] | None = None
    for parameter, values in list(optimizer.state.items()):
        entry = state.params.get(id(parameter))
        if entry is None or not values or not entry.owner.takes(entry.key):
            continue
        if any(watch.took_over(heir, optimizer, since) for heir, since in heirs.get(id(parameter), ())):
            continue
        kept = _in_other_objects(registry) if kept is None else kept
        if not _all_in(values, kept):
            yield entry


def _heirs(registry: Registry) -> dict[int, list[tuple[Optimizer, int]]]:
    found: dict[int, list[tuple[Optimizer, int]]] = {}
    for owner in registry.of_kind("optimizer"):
        for key, holders in nested.holders(owner.value).items():
            found.setdefault(key, []).extend((holder.optimizer, owner.since) for holder in holders)
    return found


def _in_other_objects(registry: Registry) -> set[int]:
    """ids of the tensors in what other registered objects save themselves: an application's own state_dict() may hold an
    optimizer's."""
    found: set[int] = set()
    for owner in registry.of_kind("stateful", "value"):
        saved = owner.value.state_dict() if owner.kind == "stateful" else owner.value
        found.update(id(leaf) for _, leaf in optim.tensor_leaves("", saved))
    return found


def _all_in(values: dict[str, Any], kept: set[int]) -> bool:
    leaves = [leaf for name, value in values.items() for _, leaf in optim.tensor_leaves(name, value)]
    return bool(leaves) and all(isinstance(leaf, Tensor) and id(leaf) in kept for leaf in leaves)
