"""What one rank's slot holds: fragments of logical tensors at byte offsets (design D7, D8).

A slot's payload is ``[objects region][fragments by descending tier]``. The objects region (non-tensor state, msgpack)
lies at offset 0 with a fixed capacity; its real length travels with each seal. A *tier-t* replica of a slot is the prefix
``[0, tier_bytes(t))``: objects plus every fragment whose ``tier`` is >= t. ``tier`` of a fragment is how many
copies in other failure domains the network must still make: ``replicas`` for what this rank alone holds, less for
what the balanced plan captures on other ranks as well (0: no network at all).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import msgpack

from ckptd.core.box import Box

ALIGN_BYTES = 64  # every fragment starts on this
BLOCK_BYTES = 1 << 20  # integrity block (D14); a fragment's blocks start at its own first byte
LAYOUT_VERSION = 1

UNIQUE = "unique"  # this box lives on this rank only (DTensor shards)
REPLICA = "replica"  # structural or declared copy: equal by contract, unequal sums void the snapshot
MAYBE = "maybe"  # plain value of equal name elsewhere: each snapshot decides by its sums


@dataclass(frozen=True, slots=True)
class Fragment:
    """One box of one logical tensor, stored contiguous (C order) in the slot at ``offset``."""

    key: str
    dtype: str  # safetensors name: F32, BF16, F8_E4M3, I64, BOOL, ...
    shape: tuple[int, ...]  # global
    box: Box
    offset: int  # bytes from the payload's start, multiple of ALIGN_BYTES
    nbytes: int
    role: str  # param | buffer | optim | extra | rng
    sharing: str = UNIQUE
    tier: int = 1


@dataclass(frozen=True)
class Layout:
    rank: int
    world: int
    fragments: tuple[Fragment, ...]  # ordered by offset, tiers descending
    objects_capacity: int  # bytes of the objects region at offset 0, multiple of ALIGN_BYTES
    payload_bytes: int  # objects region and all fragments
    plan_id: str = ""  # the balanced plan all ranks must agree on
    aliases: tuple[tuple[str, str], ...] = field(default=())  # (alias key, canonical key)

    @cached_property
    def encoded(self) -> bytes:
        rows = [
            [f.key, f.dtype, f.shape, f.box.offsets, f.box.sizes, f.offset, f.nbytes, f.role, f.sharing, f.tier]
            for f in self.fragments
        ]
        head = [LAYOUT_VERSION, self.rank, self.world, self.objects_capacity, self.payload_bytes, self.plan_id]
        packed: bytes = msgpack.packb([*head, self.aliases, rows])
        return packed

    @cached_property
    def layout_id(self) -> str:
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest()

    @staticmethod
    def decode(data: bytes) -> Layout:
        """Raises ValueError on anything that is not a well-formed layout (bounds and overlaps are checked)."""
        from ckptd.core.layout_check import decode_layout

        return decode_layout(data)

    def tier_bytes(self, tier: int) -> int:
        """Length of the prefix a tier-``tier`` replica holds. Tier 0 is the whole payload."""
        if tier <= 0:
            return self.payload_bytes
        end = self.objects_capacity
        for fragment in self.fragments:
            if fragment.tier >= tier:
                end = max(end, fragment.offset + fragment.nbytes)
        return end

    def blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of every integrity block in order: the objects region's, then each fragment's.

        The sums of a slot are one xxh3_128 (16 bytes, big-endian digest) per entry. The objects region counts with its full
        capacity; bytes past the objects' real length are zero.
        """
        spans = [(0, self.objects_capacity)] + [(f.offset, f.nbytes) for f in self.fragments]
        return [
            (at, min(BLOCK_BYTES, start + length - at))
            for start, length in spans
            for at in range(start, start + length, BLOCK_BYTES)
        ]
