"""Is everything there that training needs to go on? What is not, is told by name before the snapshot counts (P15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.machine.waiting import shown
from ckptd_client import hyper, nested, optim, resolve, watch
from ckptd_client.entries import Entry, Owner, State, matches
from ckptd_client.registry import Registry
from ckptd_client.same import same


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
    keys = shown(dict.fromkeys(entry.key for entry, _ in lacking))
    names = sorted({name for _, names in hyper.changed(optimizer) for name in names})
    changed = f", and its {', '.join(names)} {'have' if names[1:] else 'has'} changed since its first step" if names else ""
    return CkptdError(
        f"incomplete: {keys}: stepped by an optimizer ({type(optimizer).__name__}) that nobody registered{changed}",
        where=first.key,
        hint="register the optimizer, or, if its state is meant to be absent, say so: "
        f'register(..., without=["{first.key}"])',
    )


def _strangers(registry: Registry) -> Iterator[Optimizer]:
    known = registered(registry)
    return (optimizer for optimizer in watch.stepped() if id(optimizer) not in known)


def registered(registry: Registry) -> set[int]:
    """ids of the optimizers whose state is saved, as far as names tell; others may be (``_Kept``)."""
    return {id(optimizer) for owner in registry.owners.values() for optimizer in _speaks_for(owner)}


def _speaks_for(owner: Owner) -> list[Optimizer]:
    if owner.kind == "optimizer":
        return nested.optimizers(owner.value)
    inside = nested.inside(owner.value) if owner.kind == "stateful" else []
    saved = list(_optimizer_states(resolve.saved(owner))) if inside else []
    return [optimizer for optimizer in inside if any(len(state) == len(optimizer.state) for state in saved)]


def _optimizer_states(saved: Any) -> Iterator[Mapping[Any, Any]]:
    """Whatever in it looks like an optimizer's own ``state_dict()``: its tensors may be copies."""
    if isinstance(saved, Mapping):
        if isinstance(saved.get("state"), Mapping) and "param_groups" in saved:
            yield saved["state"]
        saved = list(saved.values())
    for value in saved if isinstance(saved, list | tuple) else ():
        yield from _optimizer_states(value)


def _unsaved(optimizer: Optimizer, registry: Registry, state: State) -> Iterator[Entry]:
    """Registered parameters that it has state for, or values in a group that it had not at its first step, and that no other
    optimizer steps since."""
    heirs = _heirs(registry)
    kept: _Kept | None = None
    for parameter, values in [*optimizer.state.items(), *_in_groups(optimizer, registry)]:
        entry = state.params.get(id(parameter))
        if entry is None or not values or not entry.owner.takes(entry.key):
            continue
        if any(watch.took_over(heir, optimizer, since) for heir, since in heirs.get(id(parameter), ())):
            continue
        kept = _Kept(registry) if kept is None else kept
        if not kept.has(values):
            yield entry


def _in_groups(optimizer: Optimizer, registry: Registry) -> list[tuple[Tensor, dict[str, Any]]]:
    """What changed in the groups of each parameter; not in those that it shares with a registered one."""
    changed = hyper.changed(optimizer)
    owners = registry.of_kind("optimizer") if changed else ()
    saved = {id(group) for owner in owners for _, group in nested.groups(owner.value)}
    lacking = [(group, {name: group.get(name) for name in names}) for group, names in changed if id(group) not in saved]
    return [(parameter, values) for group, values in lacking for parameter in group["params"]]


def _heirs(registry: Registry) -> dict[int, list[tuple[Optimizer, int]]]:
    found: dict[int, list[tuple[Optimizer, int]]] = {}
    for owner in registry.of_kind("optimizer"):
        for key, holders in nested.holders(owner.value).items():
            found.setdefault(key, []).extend((holder.optimizer, owner.since) for holder in holders)
    return found


class _Kept:
    """What other registered objects save themselves: an application's own state_dict() may hold an optimizer's."""

    def __init__(self, registry: Registry) -> None:
        self._tensors: set[int] = set()  # ids
        self._named: dict[str, list[Any]] = {}  # by the last part of a key, since some write "param_groups.weight.lr"
        for owner in registry.of_kind("stateful", "value"):
            saved = owner.value.state_dict() if owner.kind == "stateful" else owner.value
            self._tensors.update(id(leaf) for _, leaf in optim.tensor_leaves("", saved))
            self._collect(saved)

    def _collect(self, saved: Any) -> None:
        if isinstance(saved, Mapping):
            for key, value in saved.items():
                self._named.setdefault(str(key).rpartition(".")[2], []).append(value)
        for value in saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, list | tuple) else ():
            self._collect(value)

    def has(self, values: dict[str, Any]) -> bool:
        leaves = [leaf for name, value in values.items() for _, leaf in optim.tensor_leaves(name, value)]
        if leaves:
            return all(isinstance(leaf, Tensor) and id(leaf) in self._tensors for leaf in leaves)
        return all(any(same(value, other) for other in self._named.get(name, ())) for name, value in values.items())
