"""What a module's own saving has beyond parameters, buffers and extra state (P15): quantisation state, an observer's range.

Modules that override ``_save_to_state_dict`` or ``state_dict``, or have hooks on it, are asked through it; what comes back is
loaded through their own ``load_state_dict``, and looked at again afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ckptd.core.errors import CkptdError
from ckptd_client.quiet import NoCollectives
from ckptd_client.same import differing

SAVED = "_saved_state"  # object "<module>._saved_state"
EXTRA = "_extra_state"  # torch's own name for what get_extra_state() gives


class ExtraState:
    """What a module's ``get_extra_state`` gives."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self._module = name, module

    def get(self) -> Any:
        with NoCollectives(self.name):
            return self._module.get_extra_state()

    def set(self, value: Any) -> None:
        self._module.set_extra_state(value)


class SavedState:
    """What its own saving adds. ``whole``: it is asked with all that hangs below it. ``known``: tensors that the walk found
    there, and their names."""

    def __init__(self, name: str, module: nn.Module, *, whole: bool, known: Iterable[tuple[str, Tensor]]) -> None:
        self.name, self._module, self._whole = name, module, whole
        known = list(known)
        self._names, self._tensors = {key for key, _ in known}, {id(tensor) for _, tensor in known}

    def get(self) -> dict[str, Any]:
        """Raises CkptdError when the module cannot save itself."""
        return {key: value for key, value in self._state().items() if not self._is_known(key, value)}

    def _is_known(self, key: str, value: Any) -> bool:
        return key in self._names or id(value) in self._tensors or key.rpartition(".")[2] == EXTRA

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = OrderedDict()
        try:
            with NoCollectives(self.name), torch.no_grad():
                if self._whole:
                    return dict(self._module.state_dict(keep_vars=True))
                self._module._save_to_state_dict(found, "", True)
        except CkptdError:
            raise
        except Exception as error:
            raise CkptdError(
                f"{type(self._module).__name__} cannot save itself: {type(error).__name__}: {error}", where=self.name,
                hint="leave it out with exclude=",
            ) from error  # fmt: skip
        return found

    def set(self, saved: dict[str, Any]) -> None:
        """Raises CkptdError naming what the module did not take back."""
        with torch.no_grad():
            if self._differing(saved):
                self._load(saved)
            for key in self._differing(saved):
                _write(self._state().get(key), saved[key])
            lost = self._differing(saved)
        if lost:
            kind = type(self._module).__name__
            raise CkptdError(f"{kind} does not take back what it saved: {', '.join(lost)}", where=self.name)

    def _load(self, saved: dict[str, Any]) -> None:
        here = self._state()
        device = next((value.device for value in here.values() if isinstance(value, Tensor)), None)
        state: Any = OrderedDict(here)
        for key, value in saved.items():
            like = here.get(key)
            place = like.device if isinstance(like, Tensor) else device
            state[key] = value.to(place) if isinstance(value, Tensor) and place is not None else value
        with NoCollectives(self.name):
            if self._whole:
                self._module.load_state_dict(state, strict=False)
            else:
                version = {"version": getattr(self._module, "_version", None)}
                self._module._load_from_state_dict(state, "", version, True, [], [], [])

    def _differing(self, saved: dict[str, Any]) -> list[str]:
        return differing(self.get(), saved)


def _write(target: Any, value: Any) -> None:
    """Where the module hands out the very tensor that it uses."""
    if isinstance(target, Tensor) and isinstance(value, Tensor) and target.shape == value.shape:
        target.copy_(value)


def prepare(parts: Iterable[nn.Module]) -> None:
    """What users' hooks do before a module is saved, as ``state_dict()`` calls them: write a counter into a buffer. Torch's own
    bring shards back, which ``naming.reshard`` asks for where it must. Raises CkptdError for one that runs a collective."""
    for part in parts:
        for hook in part._state_dict_pre_hooks.values():
            if not torchs(hook):
                with NoCollectives(type(part).__name__):
                    hook(part, "", True)


def torchs(function: Any) -> bool:
    """Is it of torch itself?"""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


@lru_cache(maxsize=4096)
def _overrides(kind: Any, name: str) -> bool:
    return getattr(kind, name) is not getattr(nn.Module, name)


def saves_the_whole(module: nn.Module) -> bool:
    """Has it a word in how everything below it is saved?"""
    return _overrides(cast(Any, type(module)), "state_dict") or bool(module._state_dict_hooks)


def saves_itself(module: nn.Module) -> bool:
    return _overrides(cast(Any, type(module)), "_save_to_state_dict")


def loads_itself(module: nn.Module) -> bool:
    return _overrides(cast(Any, type(module)), "_load_from_state_dict")


def has_extra_state(module: nn.Module) -> bool:
    return _overrides(cast(Any, type(module)), "get_extra_state")
