"""What memories really hold, from their bytes alone: how many failure domains may be lost, by trying what is left.

A slot counts for the bytes of the state that it holds rightly, found by comparing; parity for the rows that can be made of it,
found by making them. Both are looked at again only when the bytes in question are others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from tests.sim import field
from tests.sim.training import Model, Origin, objects

if TYPE_CHECKING:
    from ckptd.core.redundancy.parity_sets import ParitySet
    from ckptd.core.state_map.layout import Layout
    from tests.sim.state import Mem

MADE_MAX = 4096  # results of decoding that are kept
LOST_MAX = 8  # domains; what survives more is not asked about
OBJECTS_BYTES = 64

Atoms = int  # a bit for each byte of the state's row, and beyond them one for each rank's objects
Piece = tuple[str, "Mem", bytes]  # failure domain, slot, the bytes that count


class Evidence:
    def __init__(self, model: Model) -> None:
        self.model = model
        self._places: dict[str, tuple[tuple[int, int, int], ...]] = {}  # by layout
        self._masks: dict[tuple[str, int], Atoms] = {}  # (layout, length of the prefix) -> what lies in it
        self._needed: dict[tuple[int, int], Atoms] = {}  # (step, ranks)
        self.made: dict[tuple[object, ...], Atoms] = {}  # of the columns of a parity set

    def needed(self, origin: Origin) -> Atoms:
        """Every byte of every logical tensor, and the objects of every rank."""
        key = origin.step, origin.trail.world
        if key not in self._needed:
            total = ((1 << origin.trail.world) - 1) << self.model.nbytes
            for tensor in self.model.tensors(origin.step):
                total |= ((1 << tensor.size) - 1) << tensor.base
            self._needed[key] = total
        return self._needed[key]

    # --- one row of bytes -----------------------------------------------------------------------------------------
    def right(self, payload: bytes, layout: Layout, origin: Origin) -> Atoms:
        """What a slot's bytes, or a prefix of them, hold rightly of this state."""
        state, rank = self.model.state(origin), layout.rank
        whole, said, found = True, objects(origin, rank), 0
        if payload[:OBJECTS_BYTES] == said.ljust(OBJECTS_BYTES, b"\0"):
            found |= 1 << (self.model.nbytes + rank)
        else:
            whole = False
        for offset, length, base in self._places_of(layout):
            if payload[offset : offset + length] == state[base : base + length]:
                continue
            if offset + length <= len(payload):
                whole = False
        if whole:
            return self._mask(layout, len(payload))
        for offset, length, base in self._places_of(layout):
            if payload[offset : offset + length] == state[base : base + length]:
                found |= ((1 << length) - 1) << base
        return found

    def _places_of(self, layout: Layout) -> tuple[tuple[int, int, int], ...]:
        """(offset in the slot, bytes, place in the state's row) of each fragment."""
        found = self._places.get(layout.layout_id)
        if found is None:
            found = self._places[layout.layout_id] = tuple(
                (f.offset, f.nbytes, self.model.all[f.key].base + f.box.offsets[0])
                for f in layout.fragments
                if f.nbytes
            )
        return found

    def _mask(self, layout: Layout, length: int) -> Atoms:
        key = layout.layout_id, length
        if key not in self._masks:
            total = 1 << (self.model.nbytes + layout.rank)
            for offset, nbytes, base in self._places_of(layout):
                if offset + nbytes <= length:
                    total |= ((1 << nbytes) - 1) << base
            self._masks[key] = total
        return self._masks[key]

    def of_slot(self, mem: Mem, payload: bytes, origin: Origin) -> Atoms:
        known = mem.seen
        if known is not None and known[0] is payload and known[1] == origin:
            return known[2]
        assert mem.layout is not None
        found = self.right(payload, mem.layout, origin)
        mem.seen = payload, origin, found
        return found

    # --- all of them ------------------------------------------------------------------------------------------------
    def level(self, pieces: Sequence[Piece], origin: Origin) -> int:
        """The most domains of which any may be lost, and everything can still be put together; -1: it cannot be now."""
        needed = self.needed(origin)
        by_domain: dict[str, Atoms] = {}
        parity_sets: dict[ParitySet, Columns] = {}
        for domain, mem, payload in pieces:
            assert mem.fact is not None
            if mem.fact.shard is None:
                by_domain[domain] = by_domain.get(domain, 0) | self.of_slot(mem, payload, origin)
            else:
                parity_set = mem.fact.shard.parity_set
                parity_sets.setdefault(parity_set, Columns(self, parity_set, origin)).add_part(domain, mem, payload)
        for domain, mem, payload in pieces if parity_sets else ():
            for columns in parity_sets.values():
                columns.add_data(domain, mem, payload)
        counted = _counted(by_domain.values())
        for lost in range(LOST_MAX):
            thin = needed & ~(counted[lost] if lost < len(counted) else 0)
            if thin and not all(
                _brought(atoms, where, parity_sets.values(), lost) for atoms, where in _alike(thin, by_domain)
            ):
                return lost - 1
        return LOST_MAX


def _counted(masks: Iterable[Atoms]) -> list[Atoms]:
    """[k]: what is in more than k of the masks."""
    found: list[Atoms] = []
    for mask in masks:
        for at, before in enumerate(found):
            found[at], mask = before | mask, before & mask
            if not mask:
                break
        if mask:
            found.append(mask)
    return found


def _alike(atoms: Atoms, by_domain: dict[str, Atoms]) -> list[tuple[Atoms, frozenset[str]]]:
    """Parted by the domains that hold them."""
    found = [(atoms, frozenset[str]())]
    for domain, mask in by_domain.items():
        parted = [(some & mask, where | {domain}) for some, where in found if some & mask]
        found = [(some & ~mask, where) for some, where in found if some & ~mask] + parted
    return found


def _brought(atoms: Atoms, where: frozenset[str], parity_sets: Iterable[Columns], lost: int) -> bool:
    """These lie in ``where`` only. Do the parity sets bring them whatever ``lost`` domains go? Only those count that hold
    something of the atoms themselves or of a parity set that could bring them."""
    helpful = [columns for columns in parity_sets if columns.covers() & atoms]
    others = sorted(set().union(*(columns.domains() for columns in helpful)) - where)
    for more in combinations(others, min(lost - len(where), len(others))):
        gone, left = where | set(more), atoms
        for columns in helpful:
            left &= ~columns.brings(gone)
        if left:
            return False
    return True


class Columns:
    """What is there of one parity set: rows of data and of parity, by position."""

    def __init__(self, evidence: Evidence, parity_set: ParitySet, origin: Origin) -> None:
        self._evidence, self._parity_set, self._origin = evidence, parity_set, origin
        self._at = {member.rank: at for at, member in enumerate(parity_set.members) if member.rank >= 0}
        self._data: dict[int, list[tuple[str, bytes]]] = {}
        self._parts: dict[int, list[tuple[str, bytes]]] = {}
        self._layouts: dict[int, Layout] = {}  # by position
        self._covers = -1

    def add_part(self, domain: str, mem: Mem, payload: bytes) -> None:
        assert mem.fact is not None and mem.fact.shard is not None
        self._parts.setdefault(mem.fact.shard.position, []).append((domain, payload))
        self._layouts.update((self._at[layout.rank], layout) for layout in mem.layouts)

    def add_data(self, domain: str, mem: Mem, payload: bytes) -> None:
        at = self._at.get(mem.rank)
        if at is None or mem.fact is None or mem.fact.shard is not None or mem.layout is None:
            return
        member = self._parity_set.members[at]
        if mem.layout.layout_id == member.layout_id and len(payload) >= member.nbytes:
            self._data.setdefault(at, []).append((domain, payload))

    def domains(self) -> set[str]:
        return {domain for held in (self._data, self._parts) for found in held.values() for domain, _ in found}

    def covers(self) -> Atoms:
        """All that the rows of the members have in them."""
        if self._covers < 0:
            self._covers = 0
            for at, layout in self._layouts.items():
                self._covers |= self._evidence._mask(layout, self._parity_set.members[at].nbytes)
        return self._covers

    def brings(self, lost: set[str] | frozenset[str]) -> Atoms:
        """What can be made of the columns outside these domains. Copies of a column are one and the same, as they are right."""
        data, shards = _outside(self._data, lost), _outside(self._parts, lost)
        key = self._parity_set, self._origin, frozenset(data.items()), frozenset(shards.items())
        made = self._evidence.made
        if key not in made:
            if len(made) > MADE_MAX:
                made.clear()
            made[key] = self._made(data, shards)
        return made[key]

    def _made(self, data: dict[int, bytes], shards: dict[int, bytes]) -> Atoms:
        members, found = self._parity_set.members, 0
        lengths = {at: members[at].nbytes for at in self._at.values()}
        rows = {at: payload[: lengths[at]] for at, payload in data.items()}
        parity = {at: payload[OBJECTS_BYTES:] for at, payload in shards.items()}
        decoded = field.decode(len(members), self._parity_set.parity, lengths, rows, parity)
        for at, row in (decoded or rows).items():
            if at in self._layouts:
                found |= self._evidence.right(row, self._layouts[at], self._origin)
        return found


def _outside(held: dict[int, list[tuple[str, bytes]]], lost: set[str] | frozenset[str]) -> dict[int, bytes]:
    pairs: Iterator[tuple[int, list[bytes]]] = (
        (at, [row for domain, row in found if domain not in lost]) for at, found in held.items()
    )
    return {at: rows[0] for at, rows in pairs if rows}
