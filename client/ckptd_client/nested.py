"""Optimizers inside of a registered one: lists, containers, wrappers such as SAM, Lookahead or Accelerate's (design D7, P15).

The innermost optimizer that holds a parameter names its state by the parameter alone; a wrapper's own state for the same
parameter carries the wrapper's class name. No position in any list is part of a name, so another split of the parameters
over optimizers finds the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

_MAY_HOLD = (Optimizer, list, tuple, dict)
_OF_THE_CLASS = frozenset({"param_groups", "state", "defaults"})  # attributes of an optimizer that hold none


class Holder(NamedTuple):
    """An optimizer that may have state for a parameter. ``label``: "" for the innermost one."""

    optimizer: Optimizer
    group: dict[str, Any]
    label: str


def optimizers(value: Any) -> list[Optimizer]:
    """``value``: an optimizer, or a list or dict of such. All of them and what they hold, the innermost first, each once."""
    found: dict[int, Optimizer] = {}
    _collect(value, found, set())
    return list(found.values())


def _collect(value: Any, found: dict[int, Optimizer], above: set[int]) -> None:
    if isinstance(value, Optimizer):
        if id(value) in above or id(value) in found:
            return
        above.add(id(value))
        for name, inner in vars(value).items():
            if isinstance(inner, _MAY_HOLD) and inner and name not in _OF_THE_CLASS:
                _collect(inner, found, above)
        found[id(value)] = value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Optimizer):
                _collect(item, found, above)


def inside(value: Any) -> list[Optimizer]:
    """The optimizers in something that steps as an optimizer does without being one (Megatron's, Apex's): its own
    ``state_dict()`` may speak for them. A scheduler holds an optimizer too, but has no ``zero_grad``."""
    found: dict[int, Optimizer] = {}
    _below(value, found, set())
    return list(found.values())


def _below(value: Any, found: dict[int, Optimizer], above: set[int]) -> None:
    if id(value) in above or not callable(getattr(value, "zero_grad", None)):
        return
    above.add(id(value))
    _collect(value, found, set())
    for part in list(getattr(value, "__dict__", {}).values()):
        for item in part if isinstance(part, list | tuple) else [part]:
            _below(item, found, above)


def with_state(value: Any) -> Iterator[Optimizer]:
    """Those of ``optimizers`` whose state is their own: Accelerate's wrapper shows the inner one's."""
    seen: set[int] = set()
    for optimizer in optimizers(value):
        if id(optimizer.state) not in seen:
            seen.add(id(optimizer.state))
            yield optimizer


def groups(value: Any) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Each parameter group once, wherever it is shared; innermost first."""
    seen: set[int] = set()
    found = []
    for optimizer in optimizers(value):
        for group in optimizer.param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                found.append((optimizer, group))
    return found


def shared(value: Any) -> Callable[[], None]:
    """What is called when a ``load_state_dict()`` has put another state, or other groups, in the place of an optimizer's: whoever
    had the same object has the same one again."""
    inner: dict[int, tuple[Optimizer, str, int]] = {}  # by the object: whose it is, as what, at which place of its groups
    found: list[tuple[Optimizer, str, int, Optimizer, str, int]] = []
    for optimizer in optimizers(value):
        held = [(optimizer.state, "state", -1), (optimizer.param_groups, "param_groups", -1)]
        held += [(group, "param_groups", at) for at, group in enumerate(optimizer.param_groups)]
        for item, name, at in held:
            first = inner.setdefault(id(item), (optimizer, name, at))
            computed = hasattr(getattr(type(optimizer), name, None), "__set__")
            if first[0] is not optimizer and name in vars(optimizer) and not computed:
                found.append((optimizer, name, at, *first))

    def again() -> None:
        for optimizer, name, at, other, its, place in found:
            if at < 0:
                setattr(optimizer, name, getattr(other, its))
            elif isinstance(mine := optimizer.param_groups, list) and at < len(mine) and place < len(other.param_groups):
                mine[at] = other.param_groups[place]

    return again


def holders(value: Any) -> dict[int, tuple[Holder, ...]]:
    """id(parameter) -> the optimizers that hold it. Nearly all have one, which is the same for all of a group."""
    found: dict[int, tuple[Holder, ...]] = {}
    for optimizer in with_state(value):
        for group in optimizer.param_groups:
            alone = (Holder(optimizer, group, ""),)
            for number in map(id, group["params"]):
                others = found.get(number)
                found[number] = (*others, Holder(optimizer, group, _label(optimizer, others))) if others else alone
    return found


def _label(optimizer: Optimizer, others: Sequence[Holder]) -> str:
    if not others:
        return ""
    name, taken = type(optimizer).__name__, {other.label for other in others}
    return next(label for n in range(len(others) + 1) if (label := f"{name}{n or ''}") not in taken)


def label_of(optimizer: Optimizer, parameter: Tensor, held: Mapping[int, Sequence[Holder]]) -> str:
    for holder in held.get(id(parameter), ()):
        if holder.optimizer is optimizer:
            return holder.label
    return ""


def names(value: Any) -> list[tuple[str, Optimizer]]:
    """A name for each of ``with_state``, for what it keeps of no parameter."""
    return named(with_state(value))


def named(found: Iterable[Optimizer]) -> list[tuple[str, Optimizer]]:
    """"" for the first."""
    holders: list[Holder] = []
    for optimizer in found:
        holders.append(Holder(optimizer, {}, _label(optimizer, holders)))
    return [(holder.label, holder.optimizer) for holder in holders]
