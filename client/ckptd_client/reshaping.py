"""Modules whose own loading gives their tensors the shape of what they load (P15): quantisers and observers, whose buffers grow
in the first batch. And what others make of what they have loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from ckptd.core.errors import CkptdError
from ckptd_client import modules, naming
from ckptd_client.quiet import NoCollectives
from ckptd_client.same import same


class Reshaped(NamedTuple):
    """``value``: what the snapshot holds of this module's tensor ``name``, once it is there."""

    key: str
    module: nn.Module
    name: str
    value: Tensor


def place(root: nn.Module, tensor: Tensor, saved: Tensor) -> tuple[nn.Module, str] | None:
    """The module that would give this tensor the shape of ``saved``, and its name there. It is tried on a twin, as nothing may be
    written before every rank can load."""
    if naming.is_dtensor(tensor):
        return None
    for module in filter(modules.loads_itself, root.modules()):
        for name, held in chain(module._parameters.items(), module._buffers.items()):
            if held is tensor and _would_take(module, name, saved):
                return module, name
    return None


def give_back(reshaped: Iterable[Reshaped]) -> None:
    """After all other tensors are written. Raises CkptdError naming what a module did not take."""
    found: dict[int, list[Reshaped]] = {}
    for one in reshaped:
        found.setdefault(id(one.module), []).append(one)
    for of_one in found.values():
        module = of_one[0].module
        _load(module, {one.name: one.value for one in of_one})
        for one in of_one:
            if not same(_held(module, one.name).detach().cpu(), one.value):
                raise CkptdError(f"{type(module).__name__} does not take back what it saved: {one.name}", where=one.key)


def make_anew(root: nn.Module) -> None:
    """What modules make of what they load, in a loading or a hook of their own: a table that was computed from weights. After all
    that hangs in them is written; those below first, as ``load_state_dict()`` goes."""
    for module in reversed(list(root.modules())):
        if modules.loads_itself(module) and not modules.torchs(type(module)._load_from_state_dict):
            _load(module, {})
        for hook in module._load_state_dict_post_hooks.values():
            if not modules.torchs(hook):
                hook(module, _IncompatibleKeys([], []))


def _would_take(module: nn.Module, name: str, saved: Tensor) -> bool:
    """A parameter must stay the one that its optimizer has. What else hangs below the module is no business of its twin's."""
    twin = object.__new__(type(module))
    apart: dict[str, Any] = {"_modules": {}, "_load_state_dict_pre_hooks": OrderedDict()}
    for kind in ("_parameters", "_buffers"):
        held: dict[str, Tensor | None] = getattr(module, kind)
        apart[kind] = {key: None if value is None else _twin(value) for key, value in held.items()}
    twin.__dict__.update(module.__dict__, **apart)
    before = _held(twin, name)
    try:
        _load(twin, {name: torch.empty_like(saved)})
        after = _held(twin, name)
    except Exception:  # whatever it was, it is a mismatch as any other
        return False
    stays = after is before or name not in module._parameters
    return stays and (after.dtype, after.shape) == (saved.dtype, saved.shape)


def _twin(tensor: Tensor) -> Tensor:
    copied = torch.empty_like(tensor.detach())
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _held(module: nn.Module, name: str) -> Tensor:
    tensor = (module._parameters | module._buffers)[name]
    assert tensor is not None, "it was there"
    return tensor


def _load(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """These, and whatever else it has as it is: copies, for loading may begin by giving its tensors other memory."""
    state: Any = OrderedDict()
    version = {"version": getattr(module, "_version", None)}
    with NoCollectives(type(module).__name__), torch.no_grad():
        module._save_to_state_dict(state, "", False)
        state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
        state.update({name: value.to(_held(module, name).device) for name, value in values.items()})
        module._load_from_state_dict(state, "", version, True, [], [], [])
