"""What ranks tell each other of what they registered, when they meet: two names, equal where the ranks are alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd_client.entries import State
from ckptd_client.registry import Registry
from ckptd_client.slices import is_declared


@dataclass(frozen=True)
class Likeness:
    """``declared``: what is a copy by the user's word alone. Where it is equal, every rank has what one of them has.
    ``registered``: everything by name."""

    declared: str = ""
    registered: str = ""


def likeness(registry: Registry, state: State) -> Likeness:
    """Optimizer state is left out: it is born later, and named by its parameters."""
    entries = [entry for entry in state.entries if entry.role != "optim"]
    declared = (f"{e.key} {e.tensor.dtype} {tuple(e.tensor.shape)}" for e in entries if is_declared(e))
    return Likeness(_name(declared), _name([*registry.owners, *(entry.key for entry in entries)]))


def _name(rows: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(rows)).encode(), digest_size=16).hexdigest()
