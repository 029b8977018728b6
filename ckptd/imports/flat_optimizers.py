"""Optimizers in another program's state, wherever they lie in it: taken out of it, and no longer flat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptd.imports.values import plain

OWNERS = frozenset({"optim", "optimizer"})  # of these a state alone is taken for an optimizer's
_FLAT = re.compile(r"(?:(.+?)\.)??(state|param_groups)\.(.+)\.([^.]+)", re.DOTALL)
_By = dict[str, dict[str, dict[str, Any]]]  # owner -> parameter -> name -> value


def is_optimizer(value: Any) -> bool:
    """One without state may have lost the empty dict of it."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    return groups is not None and ("state" in value or all(isinstance(one, Mapping) and "params" in one for one in groups))


def taken_out(tree: Mapping[Any, Any], found: dict[str, Any], path: str = "") -> dict[Any, Any]:
    """The tree without its optimizers; those by the path where they lie."""
    rest: dict[Any, Any] = {}
    for name, value in _without_flat(tree, found, path).items():
        at = _joined(path, str(name))
        left = value
        if is_optimizer(value):
            found[at] = value
            continue
        if isinstance(value, Mapping):
            left = taken_out(value, found, at)
        elif isinstance(value, list):
            found |= {f"{at}.{number}": item for number, item in enumerate(value) if is_optimizer(item)}
            left = [item for item in value if not is_optimizer(item)]
        if left or not value:
            rest[name] = left
    return rest


def _without_flat(tree: Mapping[Any, Any], found: dict[str, Any], path: str) -> dict[Any, Any]:
    """``state.FQN.exp_avg`` and ``param_groups.FQN.lr`` (flatten_optimizer_state_dict), the owner's name before it or above it, as
    a state by names."""
    from ckptd_client.same import same

    matches = {name: match for name in tree if isinstance(name, str) and (match := _FLAT.fullmatch(name))}
    of: dict[str, _By] = {"state": {}, "param_groups": {}}
    for name, match in matches.items():
        of[match[2]].setdefault(_joined(path, match[1] or ""), {}).setdefault(match[3], {})[match[4]] = tree[name]
    owners = {at for at in of["state"] if at.rpartition(".")[2] in OWNERS} | of["param_groups"].keys()
    for at in owners:
        groups, seen = list[dict[str, Any]](), list[Any]()
        for fqn, values in of["param_groups"].get(at, {}).items():
            settings = plain(values)
            number = next((number for number, one in enumerate(seen) if same(one, settings)), len(seen))
            if number == len(seen):
                seen.append(settings)
                groups.append({**values, "params": []})
            groups[number]["params"].append(fqn)
        found[at] = {"state": of["state"].get(at, {}), "param_groups": groups}
    taken = {name for name, match in matches.items() if _joined(path, match[1] or "") in owners}
    return {name: value for name, value in tree.items() if name not in taken}


def _joined(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
