"""Who takes part in the job, fixed at restore() or the first snapshot (design D10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class World:
    """``nodes``: NodeInfo dicts without repeats, in rank order; ``ranks[i]``: node id of rank i."""

    rank: int = 0
    size: int = 1
    ranks: tuple[str, ...] = ("",)
    nodes: tuple[Mapping[str, Any], ...] = field(default=())
    attempt: str = ""
    claims: tuple[Mapping[str, str], ...] = ()  # of each rank (claims.py)
    alike: tuple[int, ...] = ()  # ranks that declared the same keys as copies when they met; nobody: all did
    placed: str = ""  # a name of the boxes that this rank had then (slices.placed_name)
    together: tuple[int, ...] = ()  # ranks that had the very same ones

    @cached_property
    def domains(self) -> dict[int, str]:
        """Failure domain of each rank; a node that names none is one of its own."""
        of_node = {str(node["node"]): str(node.get("domain") or node["node"]) for node in self.nodes}
        return {rank: of_node.get(node, node) for rank, node in enumerate(self.ranks)}

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def declaring(self) -> tuple[int, ...]:
        """Who holds what this rank holds by declaration."""
        return self.alike or self.everyone

    def of_others(self, family: str) -> bool:
        """Did another rank register other names of this family than this one?"""
        mine = self.claims[self.rank].get(family) if self.claims else None
        return any(family in claims and claims[family] != mine for claims in self.claims)

    @property
    def domain_count(self) -> int:
        return len(set(self.domains.values()))
