"""What an optimizer's own ``state_dict()`` has beside state and groups (P15): the counter of a Lookahead, a scale.

Only asked where a class overrides it or a hook adds to it, and not before a first step: some are made to take one (torchtitan's
container). What they keep in attributes only: ``attributes.py``.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckptd.core.errors import CkptdError
from ckptd_client import nested, optim, watch
from ckptd_client.quiet import NoCollectives
from ckptd_client.registry import Registry
from ckptd_client.same import differing

log = logging.getLogger("ckptd")
Tree = dict[str, dict[str, Any]]  # name of the optimizer -> {key: value}
_USUAL = ("state", "param_groups")


def collect(name: str, value: Any) -> Tree:
    """``value``: the registered optimizer or list. Raises CkptdError when one runs a collective."""
    inside = nested.optimizers(value)
    if not any(map(overrides, inside)) or not any(o.state or watch.first(o) for o in inside):
        return {}
    known = {id(leaf) for optimizer in inside for state in optimizer.state.values() for leaf in _tensors(state)}
    known |= {id(parameter) for _, group in nested.groups(value) for parameter in group["params"]}
    found = {label: _beside(name, optimizer, known) for label, optimizer in nested.named(inside)}
    return {label: extra for label, extra in found.items() if extra}


def of_all(registry: Registry) -> dict[str, Tree]:
    """By the name under which it is registered, of those that have something."""
    found = ((owner.name, collect(owner.name, owner.value)) for owner in registry.of_kind("optimizer"))
    return {name: tree for name, tree in found if tree}


def overrides(optimizer: Optimizer) -> bool:
    """Has it a word in what is saved of it?"""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)  # none where Optimizer.__init__ was not called
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(hooks)


def usual(key: Any) -> bool:
    """Is it state or groups, which are saved by parameter? torchtitan writes "state.layer.weight.exp_avg"."""
    return str(key).split(".")[0] in _USUAL


def _beside(name: str, optimizer: Optimizer, known: set[int]) -> dict[str, Any]:
    if not overrides(optimizer):
        return {}
    try:
        with NoCollectives(name), torch.no_grad():
            saved = optimizer.state_dict()
    except CkptdError as error:
        if len(nested.optimizers(optimizer)) == 1:
            raise
        _warn_once(name, type(optimizer).__name__, error.what)
        return {}
    return {
        key: value
        for key, value in saved.items()
        if not usual(key) and not any(id(leaf) in known for leaf in _tensors(value))
    }


@lru_cache(maxsize=1024)
def _warn_once(name: str, kind: str, why: str) -> None:
    """The optimizers that it holds are looked into without it."""
    log.warning("ckptd: what %s (%s) may have beside the optimizers that it holds is not saved: %s", kind, name, why)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in optim.tensor_leaves("", value)]


def give_back(name: str, value: Any, saved: Tree) -> None:
    """Before state and groups are set, which the optimizer's ``load_state_dict`` may replace. Raises CkptdError naming what it
    did not take."""
    if not saved:
        return
    share_again = nested.shared(value)
    for label, optimizer in nested.named(nested.optimizers(value)):
        extra = saved.get(label, {})
        if extra and _differing(name, optimizer, extra):
            with NoCollectives(name):
                optimizer.load_state_dict({**optimizer.state_dict(), **extra})
            share_again()
        lost = _differing(name, optimizer, extra)
        if lost:
            text = f"{type(optimizer).__name__} does not take back what it saved: {', '.join(lost)}"
            raise CkptdError(text, where=name)


def _differing(name: str, optimizer: Optimizer, extra: dict[str, Any]) -> list[str]:
    return differing(_beside(name, optimizer, set()), extra) if extra else []
