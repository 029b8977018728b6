"""What ranks train, symbolically: every slice of the state at one step of one run is one token, so that any mixture shows.

The model has a tensor sharded over all ranks (unevenly), one replicated by contract that only f+1 ranks capture, one plain
value on every rank, and an object per rank. Sizes are a few bytes; layouts are the real ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from ckptd.core.box import Box
from ckptd.core.ids import SnapshotId
from ckptd.core.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.layout_build import build_layout
from ckptd.core.messages import HoldingFact

SHARDED = 24  # elements of the sharded tensor
Token = tuple[str, int]  # (attempt of the run, step); a slice's whole content
DAMAGE: Token = ("damage", -1)


@lru_cache(maxsize=4096)
def _digest(token: Token) -> bytes:
    return hashlib.blake2b(repr(token).encode(), digest_size=16).digest()


def shard(rank: int, world: int) -> Box:
    """Uneven on purpose: chunks of the rounded-up size, the last ones shorter or empty."""
    size = -(-SHARDED // world)
    start = min(SHARDED, rank * size)
    return Box((start,), (min(size, SHARDED - start),))


@lru_cache(maxsize=512)
def layout_of(rank: int, domains: tuple[str, ...], replicas: int) -> Layout:
    """domains: of each rank. The replicated tensor is captured in as many domains as there are holders wanted."""
    world = len(domains)
    holders: list[int] = []
    for other in range(world):
        if domains[other] not in {domains[h] for h in holders} and len(holders) <= replicas:
            holders.append(other)
    items = [("w", "U8", (SHARDED,), shard(rank, world), "param", UNIQUE, replicas)]
    if rank in holders:
        items.append(("norm", "U8", (4,), Box((0,), (4,)), "param", REPLICA, replicas + 1 - len(holders)))
    items.append(("b", "U8", (2,), Box((0,), (2,)), "buffer", MAYBE, replicas))
    return build_layout(rank, world, items, 64, f"plan-{world}", ())


def digests_of(layout: Layout, content: tuple[Token, ...]) -> tuple[tuple[str, bytes], ...]:
    """As the arena makes them: of fragments that may be shared, and of objects. content: per fragment, objects last."""
    named = [
        (f"t:{fragment.key}|{','.join(map(str, fragment.box.offsets))}", _digest(token))
        for fragment, token in zip(layout.fragments, content, strict=False)
        if fragment.sharing != UNIQUE and fragment.nbytes
    ]
    return (*named, ("o:rng", _digest((content[-1][0] + str(layout.rank), content[-1][1]))))


@dataclass
class Mem:
    """A slot of a daemon's memory. It outlives the daemon's process, as sealed memfds do."""

    id: int
    rank: int
    own: bool
    state: str = "free"  # free | filling | sealed
    grant: int = 0
    content: list[Token] | None = None  # per fragment, objects last
    sums: tuple[Token, ...] = ()  # what the sums were made of
    fact: HoldingFact | None = None
    layout: Layout | None = None
    since: float = 0.0  # sealed at
    layouts: tuple[Layout, ...] = ()  # of a lane's members, whose parity this is
    lengths: tuple[int, ...] = ()  # tokens of each of them

    @property
    def intact(self) -> bool:
        return self.content is not None and tuple(self.content) == self.sums

    @property
    def snapshot(self) -> SnapshotId | None:
        return self.fact.snapshot if self.fact is not None else None
