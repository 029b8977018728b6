"""How a snapshot is made to outlive nodes: whole copies on other nodes, or parity over a group of nodes (D8).

The names are those of the setting ``redundancy``: ``replicas=2``, ``xor(4)`` (REFT, arXiv 2310.12670: one parity over a
group of 4 nodes), ``rs(4,2)`` (Reed-Solomon: groups of 6, any 4 of them rebuild the others), ``auto``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

AUTO = "auto"
REPLICAS_MAX = 16  # copies
GROUP_MAX = 255  # members: the nonzero elements of GF(2^8), over which Reed-Solomon is computed
FORMS = "replicas=K, xor(N), rs(K,M) or auto"

_INTEGER = re.compile(r"(?:replicas\s*=\s*)?(\d+)")
_XOR = re.compile(r"xor\s*\(\s*(\d+)\s*\)")
_RS = re.compile(r"rs\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)")


@dataclass(frozen=True, slots=True)
class Replicas:
    """``copies`` whole copies in other failure domains; 0: this node's memory only. Raises ValueError."""

    copies: int

    def __post_init__(self) -> None:
        if not 0 <= self.copies <= REPLICAS_MAX:
            raise ValueError(f"{self.copies} copies: there are 0 to {REPLICAS_MAX}")

    @property
    def tolerates(self) -> int:
        """Failure domains that may be lost at once."""
        return self.copies

    @property
    def text(self) -> str:
        return f"replicas={self.copies}"


@dataclass(frozen=True, slots=True)
class Parity:
    """Groups of ``data`` + ``parity`` nodes: any ``data`` of them rebuild the rest. Raises ValueError."""

    data: int
    parity: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.parity < 1:
            raise ValueError(f"{self.data} data and {self.parity} parity: at least one of each")
        if self.group > GROUP_MAX:
            raise ValueError(f"a group of {self.group}: at most {GROUP_MAX}")

    @property
    def group(self) -> int:
        """Nodes in a full group."""
        return self.data + self.parity

    @property
    def tolerates(self) -> int:
        """Failure domains that may be lost at once."""
        return self.parity

    @property
    def text(self) -> str:
        return f"xor({self.group})" if self.parity == 1 else f"rs({self.data},{self.parity})"


Redundancy = Replicas | Parity


def attainable(tolerates: int, domains: Iterable[str]) -> int:
    """What of it nodes in these failure domains can give: copies beyond the number of other domains do not exist."""
    return max(0, min(tolerates, len(set(domains)) - 1))


def parse(text: str) -> Redundancy | None:
    """``replicas=2`` or ``2``, ``xor(4)``, ``rs(4,2)``; None: ``auto``. Raises ValueError that names the forms."""
    plain = text.strip().lower()
    if plain == AUTO:
        return None
    try:
        return _parsed(plain)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a redundancy: {error}") from None


def _parsed(plain: str) -> Redundancy:
    if match := _INTEGER.fullmatch(plain):
        return Replicas(int(match[1]))
    if match := _XOR.fullmatch(plain):
        if int(match[1]) < 2:
            raise ValueError("xor needs a group of at least 2 nodes")
        return Parity(int(match[1]) - 1, 1)
    if match := _RS.fullmatch(plain):
        return Parity(int(match[1]), int(match[2]))
    raise ValueError(f"write {FORMS}")
