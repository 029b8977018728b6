"""What each rank asks of a snapshot, in few bytes: the ranks tell each other when they meet (design D10).

A rank that does not know a name in the snapshot leaves it to a rank that registered something else of that family: weights
averaged on rank 0 alone, another pipeline stage. What no such rank registered is missed by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ckptd_client import resolve, tree
from ckptd_client.entries import State
from ckptd_client.registry import Registry

DIGEST_BYTES = 8


def family_of(name: str) -> str:
    """The first part of a key or of an object's name, up to its dot."""
    return name.partition(".")[0].partition(tree.REF_MARK)[0]


def claims_of(registry: Registry, state: State) -> dict[str, str]:
    """Family -> digest of the names in it that this rank registered. Optimizer state, which is born later, counts as the
    parameters that it is of."""
    families: dict[str, list[str]] = {}
    for name in _names(registry, state):
        families.setdefault(family_of(name), []).append(name)
    return {family: _digest(names) for family, names in families.items()}


def _names(registry: Registry, state: State) -> Iterator[str]:
    yield from (entry.key for entry in state.entries if entry.is_born)
    yield from (alias for alias, _ in state.aliases)
    for optimizer, of in state.groups.items():
        yield from (f"{optimizer}.{key}" for key in of)
    for owner in registry.owners.values():
        yield from resolve.object_names(owner, state)


def _digest(names: list[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(names)).encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
