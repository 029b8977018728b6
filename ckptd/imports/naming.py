"""From the nesting of another program's state to the names that ``client.register(model=..., optimizer=...)`` asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptd.choices import PrefixMap
from ckptd.core.errors import CkptdError
from ckptd.imports.dcp import Plans
from ckptd.imports.flat_optimizers import is_optimizer, taken_out
from ckptd.imports.optimizers import Named, add_optimizer
from ckptd.imports.param_order import MODEL, ParamOrder
from ckptd.imports.stored import Stored
from ckptd.imports.unpickle import Record
from ckptd.imports.values import plain, why_not
from ckptd.imports.wrappers import unwrapped

OWNERS = {  # what programs call them at the top of a file
    "model_state_dict": "model", "state_dict": "model", "model_state": "model", "module": "model", "net": "model",
    "optimizer_state_dict": "optimizer", "optim_state_dict": "optimizer", "optimizer_state": "optimizer", "optim": "optimizer",
}  # fmt: skip
OPTIMIZER = "optimizer"
FSDP1 = "_flat_param"
EXTRA = "_extra_state"
SCHEDULER = "sched"  # in a name
BESIDE = "extra"  # what `ckptd export --to torch` calls all that is neither model nor optimizer


def as_planned(plans: Plans) -> Named:
    """As CkptdStorageReader and Megatron's adapter find it. Raises CkptdError for metadata that cannot be kept."""
    from ckptd_client import tree
    from ckptd_client.integrations.dcp_names import PLANNER_DATA

    made = Named({key: (stored, "extra") for key, stored in plans.tensors.items()}, dict(plans.objects))
    for key in (*made.tensors, *made.objects):
        if key.startswith("$"):
            raise CkptdError("a name that ckptd takes for its own", where=key, hint="save it under another one")
    why = why_not(plans.paths)
    if why:
        raise CkptdError(f"its planner_data cannot be kept: {why}", where=".metadata")
    made.objects[PLANNER_DATA] = tree.encode(plain(plans.paths), PLANNER_DATA)
    return made


def named(tree: Mapping[Any, Any], prefixes: PrefixMap, order: ParamOrder, *, as_is: bool = False) -> Named:
    """as_is: the top of the tree has tensors by the names that they are to have. Raises CkptdError."""
    made, bare, optimizers = Named(), dict[str, Stored](), dict[str, Any]()
    for name, value in taken_out({OPTIMIZER: tree} if is_optimizer(tree) else tree, optimizers).items():
        owner = OWNERS.get(str(name), str(name))
        if name == BESIDE and isinstance(value, Mapping):
            value = _without_values(made, prefixes, value)
            if not value:
                continue
        if isinstance(value, Stored):
            bare[str(name)] = value
        elif isinstance(value, Mapping) and not _is_modules(owner, value) and _is_value(value):
            _add_value(made, prefixes, str(name), value)  # a learning rate may be a tensor; a loader's state may have one
        elif isinstance(value, Mapping) and any(isinstance(leaf, Stored) for _, leaf in _leaves(value, "")):
            for path, leaf in unwrapped(_leaves(value, "")):
                _add(made, prefixes.rename(f"{owner}.{path}"), leaf)
        elif str(name).rpartition(".")[2] == EXTRA:
            _add(made, prefixes.rename(f"model.{name}"), value)
        else:
            _add_value(made, prefixes, str(name), value)
    beside = any(key.startswith("model.") for key in made.tensors)  # then they are none of the model's
    for path, leaf in bare.items() if as_is or beside else unwrapped(bare.items()):
        _add(made, prefixes.rename(path if as_is or beside else f"model.{path}"), leaf, "extra" if beside else "param")
    for path, value in optimizers.items():
        owner = _owner(made, path or OPTIMIZER, prefixes)
        if owner:
            add_optimizer(made, owner, value, prefixes, order)
        else:
            made.notes.append(f"{path}: left out, as --prefix-map says")
    prefixes.check()
    order.check()
    _alias(made)
    return made


def _owner(made: Named, path: str, prefixes: PrefixMap) -> str:
    """The name that the optimizer is to have; "": none, it is left out. Raises CkptdError: nothing would find it where it lies."""
    told = prefixes.said(path, by_name=True)
    if told is None:
        told = prefixes.said(OWNERS.get(path, path), by_name=True)
    if told is None and "." in path:
        within = path.rpartition(".")[0]
        beside = sorted({key[len(within) + 1 :].partition(".")[0] for key in made.tensors if key.startswith(f"{within}.")})
        models = [f"--prefix-map {within}.{name}=model " for name in beside if OWNERS.get(name, name) == "model"]
        hint = f"{''.join(models)}--prefix-map {path}={OPTIMIZER}, as they are registered; {path}= leaves it out"
        raise CkptdError("an optimizer lies here, where nothing would find it", where=path, hint=hint)
    return OWNERS.get(path, path) if told is None else OWNERS.get(told, told)


def _add(made: Named, key: str, leaf: Any, role: str = "param") -> None:
    if FSDP1 in key:
        hint = "save it with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT, or with FSDP2"
        raise CkptdError("FSDP1's LOCAL_STATE_DICT does not say where parameters lie in it", where=key, hint=hint)
    if key in made.tensors or key in made.objects:
        raise CkptdError("two tensors get this name", where=key, hint="tell them apart with --prefix-map")
    if isinstance(leaf, Stored):
        made.tensors[key] = leaf, role
    elif key.rpartition(".")[2] == EXTRA and why_not(leaf) is None:
        made.objects[key] = plain(leaf)
    elif isinstance(leaf, Record):
        hint = "save plain tensors: DTensor's with torch.distributed.checkpoint, other subclasses' unwrapped"
        raise CkptdError(f"it is a {leaf.name}, of which nothing is known", where=key, hint=hint)
    elif leaf is not None:
        made.notes.append(f"{key}: left out, it is no tensor")


def _add_value(made: Named, prefixes: PrefixMap, name: str, value: Any) -> None:
    """What is neither a module's nor an optimizer's: told by ``client.last_restore["meta"]``, or restored into what is registered
    under the name that --prefix-map gives it."""
    why = why_not(value)
    if name in prefixes:
        if why:
            raise CkptdError(why, where=name, hint="leave it out of --prefix-map, or save plain values")
        made.objects[prefixes.rename(name)] = plain(value)
    elif why:
        made.notes.append(f"{name}: left out, {why}")
    else:
        made.meta[name] = plain(value)


def _without_values(made: Named, prefixes: PrefixMap, extra: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """What is left when a scheduler's state, as an example, went where plain values go, which one tensor among its numbers, or
    beside it, would have made the state of a module."""
    values = {key: value for key, value in extra.items() if _is_value(value)}
    if values or not extra:
        _add_value(made, prefixes, BESIDE, values)
    return {key: value for key, value in extra.items() if key not in values}


def _is_modules(owner: str, value: Mapping[Any, Any]) -> bool:
    """Whatever else is among its tensors."""
    if SCHEDULER in owner.lower():
        return False
    return owner == MODEL or any(path.rpartition(".")[2] == EXTRA for path, _ in _leaves(value, ""))


def _is_value(value: Any) -> bool:
    return not all(isinstance(leaf, Stored) for _, leaf in _leaves(value, "")) and why_not(value) is None


def _leaves(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and path.rpartition(".")[2] != EXTRA:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, Stored | dict | list) for item in value):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{path}.{at}")
    else:
        yield path, value


def _alias(made: Named) -> None:
    """Names of one tensor of the file: tied."""
    first: dict[Any, str] = {}
    for key, (stored, role) in list(made.tensors.items()):
        if stored.same is None or role == "optim":
            continue
        canonical = first.setdefault((stored.same, stored.dtype), key)
        if canonical != key:
            del made.tensors[key]
            made.aliases[key] = canonical
