"""An optimizer's state as the state_dict()s of torch have it: by a parameter's position, by its name, or flat."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from ckptd_client.same import same

from ckptd.export.contents import Contents, PerRank

TIED = ":="  # which of those tensors a parameter's state has, too
TENSOR_AT = "$tensor"  # in an optimizer's state that is no plain tensor: where one was (docs/FORMAT.md section 6)
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # how a program runs it: a checkpoint has none of it


@dataclass
class OptimizerState:
    """``state``: key of a parameter -> name -> value. ``groups``: (settings, keys of its parameters); of none nobody knows which
    parameter is in which. ``names``: key of a parameter -> its name in the module."""

    owner: str
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def by_position(self) -> dict[str, Any]:
        """As torch.optim's own has it; by name where no order of the parameters is known."""
        keys = [key for _, members in self.groups for key in members]
        if not keys or not self.state.keys() <= {*keys}:
            return self.by_name()
        at = {key: index for index, key in enumerate(keys)}
        state = {at[key]: self.state[key] for key in keys if key in self.state}
        groups = [{**group, "params": [at[key] for key in members]} for group, members in self.groups]
        return {"state": state, "param_groups": groups}

    def by_name(self) -> dict[str, Any]:
        """As torch.distributed.checkpoint's get_optimizer_state_dict has it."""
        state = {self.names[key]: values for key, values in self.state.items()}
        groups = [{**group, "params": [self.names[key] for key in members]} for group, members in self.groups]
        return {"state": state, "param_groups": groups}

    def flat(self) -> dict[str, Any]:
        """The same with flatten_optimizer_state_dict=True."""
        found = {f"state.{self.names[key]}.{name}": value for key, values in self.state.items() for name, value in values.items()}
        for group, members in self.groups:
            found |= {f"param_groups.{self.names[key]}.{name}": value for key in members for name, value in group.items()}
        return found


def state_of(contents: Contents, owner: str) -> OptimizerState:
    found = OptimizerState(owner)
    for tree in _each(contents, f"{owner}.groups"):
        _add_groups(found, tree)
    members = [key for _, keys in found.groups for key in keys]
    known = {*members, *contents.params}
    for key, stored in contents.tensors.items():
        if contents.roles[key] == "optim" and key.startswith(f"{owner}."):
            parameter, path = _split(key[len(owner) + 1 :], known)
            found.state.setdefault(parameter, {})[path] = stored
    for tree in _each(contents, f"{owner}.state"):
        _add_odd(found, tree, contents)
    owners = {contents.owner_of(key) for key in (*members, *found.state)}
    for key in (*members, *found.state):
        found.names[key] = contents.selection.prefixes.rename(contents.name_of(key)[1]) if len(owners) == 1 else key
    if not found.groups:  # an engine's, which has settings by groups of its own, and of all parameters the same numbers
        engine = next(iter(_each(contents, "groups")), None)
        for values in found.state.values():
            values |= engine.get("numbers", {}) if isinstance(engine, dict) else {}
        contents.notes.append(f"{owner}: by name and without settings, as nothing saved says which group a parameter is in")
    return found


def _each(contents: Contents, name: str) -> list[Any]:
    """Of all ranks that had one of their own (the stages of a pipeline), each once."""
    value = contents.object(name) if name in contents.objects else None
    return [] if value is None else list(value.values()) if isinstance(value, PerRank) else [value]


def _add_groups(found: OptimizerState, tree: Mapping[str, Any]) -> None:
    """Groups of one number and the same settings are one, whatever stages its parameters are on."""
    seen = {key for _, members in found.groups for key in members}
    for number, settings in enumerate(tree["groups"]):
        mine = [key for key, at in tree["of"].items() if at == number and key not in seen and ":" not in key]
        group = {**_implementation(_kind_of(tree, number)), **settings}
        if number < len(found.groups) and same(found.groups[number][0], group):
            found.groups[number][1].extend(mine)
        elif mine or number >= len(found.groups):
            found.groups.append((group, mine))


def _kind_of(tree: Mapping[str, Any], number: int) -> list[str]:
    """Names of the classes of the optimizer whose group this is."""
    kind = tree.get("kind", [])
    return list(tree["kinds"][kind[number]]) if number < len(kind) and kind[number] >= 0 else []


def _implementation(kinds: Iterable[str]) -> dict[str, Any]:
    """What torch's class of that name has by default: a reader that asks for its own group's entries finds each."""
    for kind in kinds:
        made = getattr(torch.optim, kind.rpartition(".")[2], None) if kind.startswith("torch.optim.") else None
        if isinstance(made, type):
            parameters = inspect.signature(made).parameters
            return {name: parameters[name].default for name in IMPLEMENTATION if name in parameters}
    return {}


def _split(rest: str, known: set[str]) -> tuple[str, str]:
    """(a parameter's key, what of its state) from both with a dot between: the longest key that is one."""
    at = len(rest)
    while (at := rest.rfind(".", 0, at)) > 0:
        if rest[:at] in known:
            return rest[:at], rest[at + 1 :]
    parameter, _, path = rest.rpartition(".")
    return parameter, path


def _add_odd(found: OptimizerState, tree: Mapping[str, Any], contents: Contents) -> None:
    """What is no plain tensor: numbers, lists of tensors, subclasses, which stay the tensors that they wrap."""
    for place, values in tree.items():
        label, _, parameter = place.rpartition(":")
        if place == TIED:
            continue
        if not place or place.startswith(":"):
            contents.notes.append(f"{found.owner}: what its state has for no parameter is left out: {', '.join(map(str, values))}")
            continue
        state = found.state.setdefault(parameter, {})
        prefix = f"{label}." if label else ""
        for name, bones in values.items():
            state[f"{prefix}{name}"] = _fleshed(bones, state, prefix)


def _fleshed(bones: Any, state: dict[str, Any], prefix: str) -> Any:
    """Takes out of ``state`` what it uses."""
    if isinstance(bones, dict) and TENSOR_AT in bones:
        path = prefix + bones[TENSOR_AT]
        if "form" not in bones:
            return state.pop(path)
        return {name[len(path) + 1 :]: state.pop(name) for name in sorted(state) if name.startswith(f"{path}.")}
    if isinstance(bones, dict):
        return {name: _fleshed(item, state, prefix) for name, item in bones.items()}
    if isinstance(bones, list | tuple):
        return type(bones)(_fleshed(item, state, prefix) for item in bones)
    return bones
