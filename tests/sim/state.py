"""What lies in the simulated daemons' memory: slots of bytes, laid out as the core lays them out.

Sizes are a few bytes; layouts are the real ones, and differ between ranks (training.Model says what there is).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.messages import HoldingFact
from ckptd.core.state_map.agreement import TENSORS
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from tests.sim.training import COPIED, CUT, PLAIN, STAGE, Model, Origin, Tensor, objects

OBJECTS_BYTES = 64
DIGESTS_CACHED_MAX = 4096
LAYOUTS_LISTED_MAX = 512
_listed: dict[str, tuple[Fragment, ...]] = {}  # by layout id


def shard(size: int, rank: int, world: int) -> Box:
    """Uneven on purpose: chunks of the rounded-up size, the last ones shorter or empty."""
    chunk = -(-size // world)
    start = min(size, rank * chunk)
    return Box((start,), (min(size, start + chunk) - start,))


def cut(tensor: Tensor, rank: int, world: int) -> Box | None:
    """What a rank has of a tensor; None: nothing."""
    if tensor.kind == CUT:
        return shard(tensor.size, rank, world)
    if tensor.kind == STAGE and tensor.number % world != rank:
        return None
    return Box((0,), (tensor.size,))


@lru_cache(maxsize=512)
def layout_of(tensors: tuple[Tensor, ...], rank: int, domains: tuple[str, ...], replicas: int) -> Layout:
    """domains: of each rank. A replicated tensor is captured in as many domains as there are holders wanted, beginning with a rank
    of its own."""
    world = len(domains)
    holders = [_holders(first, domains, replicas) for first in range(world)]
    items: list[LayoutItem] = []
    for tensor in tensors:
        box, shape = cut(tensor, rank, world), (tensor.size,)
        if box is None:
            continue
        if tensor.kind == COPIED:
            who = holders[tensor.number % world]
            if rank in who:
                items.append(LayoutItem(tensor.key, "U8", shape, box, "param", REPLICA, replicas + 1 - len(who)))
        elif tensor.kind == PLAIN:
            items.append(LayoutItem(tensor.key, "U8", shape, box, "buffer", MAYBE, replicas))
        else:
            cuts = ((0, world, rank),) if tensor.kind == CUT and tensor.number % 2 else None  # of some it is not known
            items.append(LayoutItem(tensor.key, "U8", shape, box, "param", UNIQUE, replicas, False, cuts))
    return build_layout(rank, world, items, OBJECTS_BYTES, f"plan-{world}-{len(tensors)}", ())


def _holders(first: int, domains: tuple[str, ...], replicas: int) -> tuple[int, ...]:
    found: list[int] = []
    for at in range(len(domains)):
        other = (first + at) % len(domains)
        if domains[other] not in {domains[h] for h in found} and len(found) <= replicas:
            found.append(other)
    return tuple(found)


def fragments_of(layout: Layout) -> tuple[Fragment, ...]:
    """As rows, which here are asked for one by one; the core has columns, and makes each row anew."""
    found = _listed.get(layout.layout_id)
    if found is None:
        if len(_listed) >= LAYOUTS_LISTED_MAX:
            _listed.clear()
        found = _listed[layout.layout_id] = tuple(layout.fragments)
    return found


def captured(model: Model, origin: Origin, layout: Layout) -> bytes:
    """What a rank writes into its slot."""
    state, row = model.state(origin), bytearray(layout.payload_bytes)
    said = objects(origin, layout.rank)
    row[: len(said)] = said
    for fragment in fragments_of(layout):
        at = model.all[fragment.key].base + fragment.box.offsets[0]
        row[fragment.offset : fragment.offset + fragment.nbytes] = state[at : at + fragment.nbytes]
    return bytes(row)


def prefix(layout: Layout, tier: int, payload: bytes) -> bytes:
    """What a copy of this tier has of a slot. Nothing is frozen here, so it is one prefix."""
    return b"".join(payload[at : at + length] for at, length in layout.spans(tier))


@lru_cache(maxsize=DIGESTS_CACHED_MAX)
def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def digests_of(layout: Layout, payload: bytes) -> tuple[tuple[str, bytes], ...]:
    """As the arena makes them: of fragments that may be shared, and of objects."""
    shared = [_digest(piece(payload, f)) for f in fragments_of(layout) if f.sharing != UNIQUE]
    return (*([(TENSORS, b"".join(shared))] if shared else []), ("o:rng", _digest(payload[:OBJECTS_BYTES])))


def piece(payload: bytes, fragment: Fragment) -> bytes:
    return payload[fragment.offset : fragment.offset + fragment.nbytes]


@dataclass
class Mem:
    """A slot of a daemon's memory. It outlives the daemon's process, as sealed memfds do."""

    id: int
    rank: int
    own: bool
    state: str = "free"  # free | filling | sealed
    grant: int = 0
    line: int = 0  # the number of the connection that it was given by
    capacity: int = 0  # bytes, of an own one
    payload: bytes | None = None  # what lies there now
    sums: bytes = b""  # what the sums were made of: the payload at its seal
    fact: HoldingFact | None = None
    layout: Layout | None = None
    since: float = 0.0  # sealed at
    known: int | None = None  # when its daemon took in that it is sealed: the number of that turn
    layouts: tuple[Layout, ...] = ()  # of a parity set's members, whose parity this is
    seen: tuple[bytes, Origin, int] | None = None  # what the oracle found in these bytes (evidence.py)

    @property
    def intact(self) -> bool:
        return self.payload is not None and (self.payload is self.sums or self.payload == self.sums)

    @property
    def snapshot(self) -> SnapshotId | None:
        return self.fact.snapshot if self.fact is not None else None

    def lacks(self, index: int) -> bool:
        """Is this fragment of another tier than the copy?"""
        return self.fact is not None and self.layout is not None and fragments_of(self.layout)[index].tier < self.fact.tier

    def piece(self, index: int) -> bytes:
        """Of a fragment; -1: the objects."""
        assert self.payload is not None and self.layout is not None
        return self.payload[:OBJECTS_BYTES] if index < 0 else piece(self.payload, fragments_of(self.layout)[index])
