"""What compile, DDP, FSDP and activation checkpoints put into the names of a module's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def unwrapped(leaves: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Without it; DDP's stands before all of them."""
    found = [(".".join(part for part in path.split(".") if part not in _WRAPPERS), leaf) for path, leaf in leaves]
    if found and all(path.startswith("module.") for path, _ in found):
        return [(path.removeprefix("module."), leaf) for path, leaf in found]
    return found
