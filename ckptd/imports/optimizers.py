"""An optimizer's ``state_dict()`` by the names of its parameters, as ckptd writes it (docs/FORMAT.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptd.choices import PrefixMap
from ckptd.core.errors import CkptdError
from ckptd.imports.param_order import ParamOrder
from ckptd.imports.stored import Stored
from ckptd.imports.values import plain, why_not
from ckptd.imports.wrappers import unwrapped

NOT_HYPER = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


WHOLE_NAMES = "--param-names FILE: a whole name (G.0.weight) per line, for each parameter of such an optimizer in the file's order"


class Ambiguous(CkptdError):
    """A parameter's name is that of several tensors."""


@dataclass
class Named:
    """A checkpoint to be: tensors with their roles, objects, tied names, what goes into its meta, and what there is to be told."""

    tensors: dict[str, tuple[Stored, str]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def add_optimizer(made: Named, owner: str, saved: Mapping[str, Any], prefixes: PrefixMap, order: ParamOrder) -> None:
    """Raises CkptdError: a parameter that nothing says the name of, state that cannot be written."""
    groups, states = saved["param_groups"], saved.get("state") or {}
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CkptdError("its param_groups are no list of dicts", where=owner)
    states = _by_member(groups, states)
    keys = _keys(made, owner, groups, states, prefixes, order)
    of: dict[str, int] = {}
    hyper = []
    for number, group in enumerate(groups):
        hyper.append({name: _value(f"{owner}, group {number}, {name}", group[name]) for name in group if name not in NOT_HYPER})
        of |= dict.fromkeys((keys[one] for one in group["params"]), number)
    made.objects[f"{owner}.groups"] = {"groups": hyper, "of": of}
    odd: dict[str, dict[str, Any]] = {}
    for one, state in states.items():
        if one not in keys:
            raise CkptdError(f"state of {one!r}, which is in none of its groups", where=owner)
        for name, value in state.items():
            if isinstance(value, Stored):
                made.tensors[f"{owner}.{keys[one]}.{name}"] = value, "optim"
            elif value is not None:
                odd.setdefault(keys[one], {})[name] = _value(f"{owner}.{keys[one]}.{name}", value)
    if odd:
        made.objects[f"{owner}.state"] = odd


def _value(where: str, value: Any) -> Any:
    why = why_not(value)
    if why:
        raise CkptdError(why, where=where, hint="it is needed to go on; save plain values and tensors")
    return plain(value)


def _by_member(groups: list[Any], states: Any) -> Mapping[Any, Any]:
    """By what the groups call each parameter: torch.distributed.checkpoint made text, or a list, of numbers."""
    of = {str(one): one for group in groups for one in group["params"]}
    pairs = enumerate(states) if isinstance(states, list) else states.items()
    return {of.get(str(one), one): state for one, state in pairs}


def _keys(
    made: Named, owner: str, groups: list[Any], states: Mapping[Any, Any], prefixes: PrefixMap, order: ParamOrder
) -> dict[Any, str]:
    """Of each parameter, by what the groups call it: its key."""
    members = [one for group in groups for one in group["params"]]
    if len(set(members)) < len(members):
        raise CkptdError("a parameter is in two of its groups", where=owner)
    if all(isinstance(one, str) for one in members):
        try:
            return {name: _known(made, owner, name, prefixes) for name in members}
        except Ambiguous:
            if not order.names:
                raise
            return order.keys(made, owner, members, states, lambda name: _known(made, owner, name, prefixes))
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        names = [name for name, _ in unwrapped((name, None) for group in groups for name in group["param_names"])]
        return {one: _known(made, owner, name, prefixes) for one, name in zip(members, names, strict=True)}
    return order.keys(made, owner, members, states, lambda name: _known(made, owner, name, prefixes))


def _known(made: Named, owner: str, name: str, prefixes: PrefixMap) -> str:
    """The key of the tensor that this parameter is."""
    for key in (prefixes.rename(f"model.{name}"), prefixes.rename(name), f"model.{name}", name):
        if key in made.tensors:
            return key
    ends = [key for key, (_, role) in made.tensors.items() if role != "optim" and key.endswith(f".{name}")]
    if len(ends) > 1:
        raise Ambiguous(f"{name} may be {ends[0]} or {ends[1]}", where=owner, hint=WHOLE_NAMES)
    if not ends:
        raise CkptdError(f"it has state of {name}, of which the file has no tensor", where=owner, hint="import the model with it")
    return ends[0]
