"""Optimizers by parameter name: state and hyperparameters per key, never by an index (design D7, D11)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.machine.waiting import shown
from ckptd_client import apart, nested
from ckptd_client.entries import Copies, Entry, Mode, Owner
from ckptd_client.naming import PLAIN, is_dtensor
from ckptd_client.same import same
from ckptd_client.tree import DEPTH_MAX

log = logging.getLogger("ckptd")
# How this program runs its optimizer, not what the optimizer has learned: a restore leaves these alone.
IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
TENSOR_AT = "$tensor"
TIED = ":="  # in what is no tensor: {label: [[path in what it has for no parameter, key of the same tensor of a parameter]]}
COUNTERS = frozenset({"step", "mu_product"})  # 0-d state which torch's optimizers read on the host
NameOf = Mapping[int, Entry]  # id(parameter) -> its entry
KeysOfGroup = tuple[Optimizer, dict[str, Any], list[str]]


def parameters(owner: Owner) -> Iterator[Tensor]:
    for _, group in nested.groups(owner.value):
        yield from group["params"]


def key_of(owner: Owner, parameter: Tensor, known: NameOf) -> str:
    """Raises CkptdError for a parameter that belongs to nothing registered."""
    entry = known.get(id(parameter))
    if entry is None:
        shape, holder = list(parameter.shape), _holder(owner, parameter)
        raise CkptdError(
            f"{holder} holds a parameter of shape {shape} that belongs to no registered module", where=owner.name,
            hint="register the module (or tensor) that owns it, and the optimizer made from its present parameters",
        )  # fmt: skip
    return entry.key


def _holder(owner: Owner, parameter: Tensor) -> str:
    """In words."""
    for optimizer in nested.optimizers(owner.value):
        for index, group in enumerate(optimizer.param_groups):
            if any(one is parameter for one in group["params"]):
                return f"{owner.name} ({type(optimizer).__name__}, group {index})"
    return owner.name


def state_entries(owner: Owner, known: NameOf) -> tuple[list[Entry], dict[str, Any]]:
    """Tensors of the optimizer's state as entries, and what is not a tensor: {key: {path: value}}. What it has for a parameter that
    left its groups is told and left out: no step reads it, and no restore would find where to put it."""
    entries: list[Entry] = []
    odd: dict[str, Any] = {}
    idle: list[str] = []
    held = nested.holders(owner.value)
    for name_here, optimizer in nested.names(owner.value):
        for parameter, state in list(optimizer.state.items()):
            if not isinstance(parameter, Tensor):
                odd.setdefault(name_here and f":{name_here}", {})[parameter] = state
                continue
            label = nested.label_of(optimizer, parameter, held)
            key = key_of(owner, parameter, known)
            if id(parameter) not in held:
                idle.append(key)
                continue
            copies = _copies_like(known[id(parameter)])
            for name, value in state.items():
                for path, leaf in tensor_leaves(str(name), value):
                    full = f"{owner.name}.{key}.{_labelled(label, path)}"
                    if owner.takes(full):
                        mode = Mode.SYNC if owner.escapes(full) else Mode.FENCED
                        entries.append(Entry(full, leaf, "optim", owner, mode, copies, known[id(parameter)].placed_like(leaf)))
                if not (isinstance(name, str) and isinstance(value, Tensor)) or apart.is_apart(value):
                    above = f"{owner.name}.{key}.{_labelled(label, '')}"
                    odd.setdefault(odd_key(label, key), {})[name] = skeleton(str(name), value, above)
    if idle:
        _warn_once(owner.name, shown(idle))
    if any(map(of_no_parameter, odd)) and (ties := _ties(owner, {id(entry.tensor): entry.key for entry in entries})):
        odd[TIED] = ties
    return entries, odd


def of_no_parameter(key: str) -> bool:
    """Is it what an optimizer keeps under a name of its own?"""
    return not key or key.startswith(":")


def _ties(owner: Owner, keys: Mapping[int, str]) -> dict[str, Any]:
    """``keys``: by id, of the tensors of the parameters' states."""
    found: dict[str, list[Any]] = {}
    for label, optimizer in nested.names(owner.value):
        for name, state in optimizer.state.items():
            if not isinstance(name, Tensor):
                ties = [[path, keys[id(leaf)]] for path, leaf in _places([name], state) if id(leaf) in keys]
                found[label] = found.get(label, []) + ties
    return {label: ties for label, ties in found.items() if ties}


def _places(path: list[Any], value: Any) -> Iterator[tuple[list[Any], Tensor]]:
    """Where a tensor can be put in the place of another one."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list) and len(path) <= DEPTH_MAX:  # what contains itself is refused by name when it is encoded
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places([*path, name], item)


def tie(owner: Owner, known: NameOf, odd: Mapping[str, Any]) -> None:
    """What the optimizer had for no parameter, and for a parameter, too, is one tensor again."""
    if TIED not in odd:
        return
    found = {entry.key: entry.tensor for entry in state_entries(owner, known)[0]}
    for label, optimizer in nested.names(owner.value):
        for (*above, name), key in odd[TIED].get(label, []):
            place: Any = optimizer.state
            for step in above:
                place = _at(place, step)
            value = _at(place, name)
            if isinstance(value, Tensor) and key in found and found[key].shape == value.shape:
                place[name] = found[key]


def _at(place: Any, step: Any) -> Any:
    """None: it has nothing there. A defaultdict gets nothing."""
    if isinstance(place, dict):
        return place.get(step)
    return place[step] if isinstance(place, list) and type(step) is int and step < len(place) else None


@lru_cache(maxsize=1024)
def _warn_once(name: str, keys: str) -> None:
    log.warning("ckptd: what %s has for %s is not saved: these parameters are in none of its groups any more", name, keys)


def state_keys(owner: Owner, known: NameOf) -> list[str]:
    """Of each parameter with state its key, in the order of the optimizers and their states; "": it is in no group."""
    held = nested.holders(owner.value)
    return [
        odd_key(nested.label_of(optimizer, parameter, held), key_of(owner, parameter, known)) if id(parameter) in held else ""
        for _, optimizer in nested.names(owner.value)
        for parameter in optimizer.state
    ]


def numbers(owner: Owner, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What of this state is no tensor, {key: {name: value}}. ``keys``: as ``state_keys`` gave them."""
    states = (state for _, optimizer in nested.names(owner.value) for state in optimizer.state.values())
    found = {
        key: {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        for key, state in zip(keys, states, strict=True)
    }
    return {key: values for key, values in found.items() if key and values}


def _labelled(label: str, path: str) -> str:
    return f"{label}.{path}" if label else path


def odd_key(label: str, key: str) -> str:
    return f"{label}:{key}" if label else key


def of_label(saved: Mapping[str, str], label: str, labels: Sequence[str]) -> Mapping[str, str]:
    """What of a parameter's saved state, {path: key}, is the holder's with this label; the innermost one takes what carries
    the label of no other."""
    if not any(labels):
        return saved
    prefixes = tuple(f"{other}." for other in labels if other)
    if label:
        return {path[len(label) + 1 :]: key for path, key in saved.items() if path.startswith(f"{label}.")}
    return {path: key for path, key in saved.items() if not path.startswith(prefixes)}


def _copies_like(parameter: Entry) -> Copies | None:
    return None if is_dtensor(parameter.tensor) else parameter.copies


def tensor_leaves(path: str, value: Any) -> Iterable[tuple[str, Tensor]]:
    """The tensors in a piece of state, nested ones (Shampoo's lists of factors) by dotted path."""
    return ((path, value),) if type(value) in PLAIN else _leaves(path, value)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if apart.is_apart(value):
        for name, part in apart.inner(value):
            yield f"{path}.{name}", part
    elif isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensor_leaves(f"{path}.{name}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensor_leaves(f"{path}.{index}", item)


def skeleton(path: str, value: Any, above: str) -> Any:
    """The same without tensors: each is replaced by {TENSOR_AT: its path}, a subclass by its form. ``above``: before the path in
    its key. Raises CkptdError for what ``flesh`` could not make again. What is made from such a container (a NamedTuple, a
    defaultdict) stays whole: it is refused by name when it is encoded."""
    if apart.is_apart(value):
        form = apart.form_of(value, above + path)
        apart.check_buildable(form, above + path)
        return {TENSOR_AT: path, "form": form}
    if isinstance(value, Tensor):
        return {TENSOR_AT: path}
    if type(value) in (dict, OrderedDict):
        return type(value)((name, skeleton(f"{path}.{name}", item, above)) for name, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(skeleton(f"{path}.{index}", item, above) for index, item in enumerate(value))
    return value


def flesh(bones: Any, tensors: dict[str, Tensor], like: Tensor) -> Any:
    """The inverse; takes the tensors it uses out of ``tensors``. ``like``: the parameter."""
    if type(bones) in (dict, OrderedDict):
        if set(bones) == {TENSOR_AT}:
            return tensors.pop(bones[TENSOR_AT])
        if set(bones) == {TENSOR_AT, "form"}:
            return apart.build(bones["form"], tensors.pop, bones[TENSOR_AT], like)
        return type(bones)((name, flesh(item, tensors, like)) for name, item in bones.items())
    if type(bones) in (list, tuple):
        return type(bones)(flesh(item, tensors, like) for item in bones)
    return bones


def group_of_each(owner: Owner, known: NameOf) -> dict[str, int]:
    """parameter key -> index of its group. Raises CkptdError for a parameter of nothing registered."""
    held = nested.holders(owner.value)
    return {
        odd_key(nested.label_of(optimizer, parameter, held), key_of(owner, parameter, known)): index
        for index, (optimizer, group) in enumerate(nested.groups(owner.value))
        for parameter in group["params"]
    }


def groups_tree(owner: Owner, of: Mapping[str, int]) -> dict[str, Any]:
    """{"groups": [hyperparameters], "of": {parameter key: index into groups}}: per key, said once per group. {"kinds": [names of
    an optimizer's classes], "kind": [index into kinds, of each group]}."""
    found = nested.groups(owner.value)
    names = [_kind(optimizer) for optimizer, _ in found]
    kinds = list(dict.fromkeys(names))
    at = {kind: index for index, kind in enumerate(kinds)}
    groups = [hyperparameters(group) for _, group in found]
    return {"groups": groups, "of": of, "kinds": [list(kind) for kind in kinds], "kind": [at[kind] for kind in names]}


def _kind(optimizer: Optimizer) -> tuple[str, ...]:
    """Its class and those that this is made from, torch's Optimizer left out."""
    of: Any = type(optimizer)
    return _kind_named(of)


@lru_cache(maxsize=1024)
def _kind_named(of: Any) -> tuple[str, ...]:
    above = (kind for kind in of.__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer)
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in above)


def kinds_of(tree: Mapping[str, Any], key: str) -> list[str]:
    """The classes of the optimizer that this parameter's state and group were saved from, its own first; none where the snapshot
    does not name them."""
    if key not in tree["of"] or "kind" not in tree:
        return []
    at = tree["kind"][tree["of"][key]]
    return list(tree["kinds"][at]) if at >= 0 else []


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in IMPLEMENTATION}


def merge_groups(trees: Iterable[Mapping[str, Any]], *, own_first: bool = False) -> dict[str, Any]:
    """One tree of several ranks' (pipeline stages): their keys together. Raises CkptdError where two ranks disagree, unless the
    first is this rank's own, which counts then."""
    groups: list[Any] = []
    of: dict[str, int] = {}
    kinds: list[Any] = []
    kind: list[int] = []
    for tree in trees:
        first = len(groups)
        groups += tree["groups"]
        kind += [at + len(kinds) for at in tree["kind"]] if "kind" in tree else [-1] * len(tree["groups"])
        kinds += tree.get("kinds", [])
        for key, index in tree["of"].items():
            if not own_first and key in of and not same(groups[of[key]], groups[first + index]):
                raise CkptdError(
                    "ranks saved different hyperparameters", where=key, hint="restore in the same world"
                )
            of.setdefault(key, first + index)
    return {"groups": groups, "of": of, "kinds": kinds, "kind": kind}


def merge_odd(trees: Iterable[Mapping[str, Any]], *, own_first: bool = False) -> dict[str, Any]:
    """The same for state that is not a tensor."""
    merged: dict[str, Any] = {}
    tied: dict[str, list[Any]] = {}
    for tree in trees:
        for label, ties in tree.get(TIED, {}).items():
            if not own_first or (label and f":{label}") not in merged:
                tied[label] = tied.get(label, []) + ties
        for key, state in tree.items():
            if key != TIED and not own_first and key in merged and not same(merged[key], state):
                raise CkptdError(
                    "ranks saved different optimizer state", where=key, hint="restore in the same world"
                )
            merged.setdefault(key, state)
    return merged | ({TIED: tied} if tied else {})


# --- writing back -------------------------------------------------------------------------------------------
def apply_groups(
    owner: Owner, known: NameOf, tree: Mapping[str, Any], write: Callable[[Tensor, Tensor], None]
) -> None:
    """Set each group's hyperparameters to what was saved for its parameters; tensors are written in place.

    Those that ``check_groups`` names keep what they have. ``write``: (target, source) copies.
    """
    for group, values in _wanted_groups(owner, known, tree):
        for name, value in values.items():
            old = group.get(name)
            if isinstance(old, Tensor):
                write(old, value if isinstance(value, Tensor) else torch.tensor(value, dtype=old.dtype))
            elif isinstance(value, Tensor):
                group[name] = (
                    value.item() if isinstance(old, int | float) and not isinstance(old, bool) else value
                )
            else:
                group[name] = value


def check_groups(owner: Owner, found: Sequence[KeysOfGroup], tree: Mapping[str, Any]) -> list[str]:
    """Mismatches: parameters that nothing was saved for, groups whose parameters had different hyperparameters."""
    problems = []
    for index, (_, group, keys) in enumerate(found):
        missing = [key for key in keys if key not in tree["of"] and hyperparameters(group)]
        problems += [f"{owner.name}: no hyperparameters for {key}" for key in missing]
        if how := _mixed(keys, tree):
            problems.append(f"{owner.name}: group {index} {how}")
    return problems


def other_kinds(owner: Owner, groups: Sequence[KeysOfGroup], tree: Mapping[str, Any]) -> list[str]:
    """What was saved from an optimizer of another class than is registered for the same parameter. Classes of one name, or of which
    one is made from the other, keep the same state (torch's AdamW is an Adam)."""
    of_key: dict[str, tuple[tuple[str, ...], ...]] = {}  # a wrapper may have a group of its own for what it lets another step
    for optimizer, _, keys in groups:
        kind = _kind(optimizer)
        of_key |= {key: (*of_key.get(key, ()), kind) for key in keys}
    pairs = dict.fromkeys((kinds, tuple(kinds_of(tree, key))) for key, kinds in of_key.items())
    texts = (
        f"{owner.name}: saved by {saved[0]}, {kinds[0][0]} is registered, which may keep other state under other names"
        for kinds, saved in pairs
        if saved and all(kinds) and not any(_related(here, saved) for here in kinds)
    )
    return list(dict.fromkeys(texts))


def _related(here: Sequence[str], saved: Sequence[str]) -> bool:
    mine, its = ([name.rpartition(".")[2] for name in names] for names in (here, saved))
    return mine[0] in its or its[0] in mine


def _mixed(keys: list[str], tree: Mapping[str, Any]) -> str:
    """Says so when parameters of one group were saved with different hyperparameters; "": they were not."""
    some: dict[int, str] = {}  # of each group that they were saved in
    for key in keys:
        if key in tree["of"]:
            some.setdefault(tree["of"][key], key)
    (first, one), *others = some.items() or ((-1, ""),)
    for number, key in others:
        mine, its = tree["groups"][first], tree["groups"][number]
        names = sorted(name for name in {*mine, *its} if not same(mine.get(name), its.get(name)))
        if names:
            return f"mixes parameters saved with different hyperparameters ({', '.join(names)}): {one} and {key}"
    return ""


def _wanted_groups(
    owner: Owner, known: NameOf, tree: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for _, group, keys in keys_of_groups(owner, known):
        index = next((tree["of"][key] for key in keys if key in tree["of"]), None)
        if index is not None and not _mixed(keys, tree):
            yield group, tree["groups"][index]


def keys_of_groups(owner: Owner, known: NameOf) -> list[KeysOfGroup]:
    """With the keys of each group's parameters."""
    held = nested.holders(owner.value)
    return [
        (optimizer, group, [odd_key(nested.label_of(optimizer, one, held), key_of(owner, one, known)) for one in group["params"]])
        for optimizer, group in nested.groups(owner.value)
    ]


def empty_state(
    path: str, parameter: Tensor, group: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A tensor for state that is not born yet, at ``path`` of the parameter's: the parameter's placements and strides where the
    shapes agree, on the parameter's device. What torch's optimizers count lives on the CPU unless fused or capturable says
    otherwise."""
    parameter = parameter.detach()
    if path.rpartition(".")[2] in COUNTERS and not shape:
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if tuple(shape) == tuple(parameter.shape):
        return apart.plain_like(parameter, dtype, parameter.device)
    plain = torch.empty(shape, dtype=dtype, device=parameter.device)
    if not shape or not is_dtensor(parameter):
        return plain
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = getattr(parameter, "device_mesh")  # noqa: B009
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)


# --- how large it will be -----------------------------------------------------------------------------------
def lazy_tensors(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """How many tensors of the parameter's size the state will have once it is born (section 5); 2 for unknown classes."""
    kinds: dict[str, int] = {
        "SGD": 1 if group.get("momentum") else 0,
        "Adagrad": 1,
        "RMSprop": 1 + bool(group.get("momentum")) + bool(group.get("centered")),
        "Adafactor": 1,
        "Muon": 1,
        "Lion": 1,
        "ASGD": 1,
        "LBFGS": 0,
    }
    for kind in type(optimizer).__mro__:
        if kind.__name__ in kinds:
            return kinds[kind.__name__]
    return 2 + bool(group.get("amsgrad"))
