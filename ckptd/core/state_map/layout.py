"""What one rank's slot holds: fragments of logical tensors at byte offsets (design D6, D7, D8).

A payload is ``[objects region][fragments by descending tier]`` and then, where the rank has frozen parameters,
``[frozen fragments by descending tier]``. The objects region (non-tensor state, msgpack) lies at offset 0 with a fixed
capacity; its real length travels with each seal. Everything before ``frozen_at`` is the *live part* and lies in the slot
itself; the *frozen part* lies in a slot of its own, once for all snapshots that hold the same bytes, under the offsets that it
has here less ``frozen_at``. A *tier-t* replica is a prefix of each part: the objects plus every fragment whose ``tier`` is
>= t. ``tier`` of a fragment is how many copies in other failure domains the network must still make: ``replicas`` for what
this rank alone holds, less for what the balanced plan captures on other ranks as well (0: no network at all).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import msgpack
import numpy as np

from ckptd.core.state_map.columns import Ints, pack
from ckptd.core.state_map.fragments import Fragments, Shared, Table

ALIGN_BYTES = 64  # every fragment starts on this
BLOCK_BYTES = 1 << 20  # integrity block (D14); a fragment's blocks start at its own first byte
BIG_FRAGMENT_BYTES = 1 << 20  # from this size on a fragment starts on a page,
BIG_ALIGN_BYTES = 4096  # so that O_DIRECT writes it from where it lies, without a copy
VERSION = 5  # of what is written now; layout_check.py reads the others too
PLACED = -1  # in place of how many fragments are live: they do not follow each other, each one's offset is said
FOLLOWING_CACHED_MAX = 16  # where all shares are equal, those of all ranks are the same

UNIQUE = "unique"  # this box lives on this rank only (DTensor shards)
REPLICA = "replica"  # structural or declared copy: equal by contract, unequal sums void the snapshot
MAYBE = "maybe"  # plain value of equal name elsewhere: each snapshot decides by its sums


@dataclass(frozen=True)
class Layout:
    rank: int
    world: int
    fragments: Fragments  # ordered by offset, tiers descending
    objects_capacity: int  # bytes of the objects region at offset 0, multiple of ALIGN_BYTES
    payload_bytes: int  # objects region and all fragments, from the live part's first byte to the frozen part's last
    plan_id: str = ""  # the balanced plan all ranks must agree on
    aliases: tuple[tuple[str, str], ...] = field(default=())  # (alias key, canonical key)
    frozen_bytes: int = 0  # at the payload's end
    without: tuple[str, ...] = ()  # patterns of parameters whose optimizer state is meant to be absent, and is

    @cached_property
    def encoded(self) -> bytes:
        """Kept from the first call on: who merely knows a layout, as a steward does all ranks', never makes it."""
        return self._encode()

    @property
    def leaf(self) -> bytes:
        """The same for those who have its table; all of it where an older version wrote it, whose name no table brings back."""
        return self.encoded if self.is_old else self._encode(self.fragments.table.digest)

    def _encode(self, table: bytes | str = b"") -> bytes:
        fragments, own = self.fragments, self.fragments.own
        live = int((own["offset"] < self.frozen_at).sum())
        if np.array_equal(own["offset"], followed(*fragments.alike, self.objects_capacity, live).column):
            own["offset"] = own["offset"][:0]
        else:
            live = PLACED
        data, where = pack(own)
        head = [self.rank, self.world, self.objects_capacity, self.payload_bytes, self.plan_id, self.aliases, self.frozen_bytes]
        columns = [table or fragments.table.encoded, fragments.places, live, where, data]
        packed: bytes = msgpack.packb([VERSION, *head, self.without, *columns])
        return packed

    @cached_property
    def layout_id(self) -> str:
        """Of what the rank has for itself, its table's name among that."""
        return hashlib.blake2b(self.leaf, digest_size=16).hexdigest()

    @staticmethod
    def decode(data: bytes, find: Callable[[str], Table | None] | None = None) -> Layout:
        """Raises ValueError on anything that is not a well-formed layout (bounds and overlaps are checked). ``find``: it may be a
        leaf whose table this knows by its digest."""
        from ckptd.core.state_map.layout_check import decode_layout

        return decode_layout(data, find)

    @property
    def frozen_at(self) -> int:
        """Where the live part ends."""
        return self.payload_bytes - self.frozen_bytes

    @property
    def is_frozen(self) -> bool:
        """Is it the layout of a frozen part alone?"""
        return self.frozen_bytes == self.payload_bytes > 0

    @cached_property
    def frozen(self) -> Layout:
        """The frozen part as a layout of its own. The same for every snapshot that may share its bytes."""
        assert 0 < self.frozen_bytes < self.payload_bytes, "it has a live and a frozen part"
        found = (f for f in self.fragments if f.offset >= self.frozen_at)
        moved = Fragments(f._replace(offset=f.offset - self.frozen_at) for f in found)
        made = Layout(self.rank, self.world, moved, 0, self.frozen_bytes, frozen_bytes=self.frozen_bytes)
        if self.is_old:
            from ckptd.core.state_map.layout_rows import old_frozen

            made.was_written(old_frozen(made, self.__dict__["_version"]), self.__dict__["_version"])
        return made

    @property
    def is_old(self) -> bool:
        """Was it written by an older version?"""
        return bool(self.__dict__.get("_version"))

    def was_written(self, data: bytes, version: int) -> None:
        """By an older one. Its id is that of these bytes, wherever it is named."""
        self.__dict__.update(encoded=data, _version=version)

    def live_bytes(self, tier: int) -> int:
        """Length of the live part's prefix in a tier-``tier`` replica. Tier 0 has all of it."""
        return self._end(tier, False, self.objects_capacity) if tier > 0 else self.frozen_at

    def spans(self, tier: int) -> tuple[tuple[int, int], ...]:
        """(offset, length) of what a tier-``tier`` replica holds of the payload: one prefix per part, none of them empty."""
        frozen_end = self._end(tier, True, self.frozen_at) if tier > 0 else self.payload_bytes
        parts = (0, self.live_bytes(tier)), (self.frozen_at, frozen_end - self.frozen_at)
        return tuple((at, length) for at, length in parts if length)

    def _end(self, tier: int, frozen: bool, none: int) -> int:
        """Of the fragments of such tiers in one part; ``none``: where there are none."""
        offset = self.fragments.offset
        held = (self.fragments.tier >= tier) & ((offset >= self.frozen_at) == frozen)
        return int((offset + self.fragments.nbytes)[held].max(initial=none))

    def blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of every integrity block in order: the objects region's, then each fragment's.

        The sums of a slot are one xxh3_128 (16 bytes, big-endian digest) per entry. The objects region counts with its full
        capacity; bytes past the objects' real length are zero.
        """
        start = np.concatenate(([0], self.fragments.offset))
        length = np.concatenate(([self.objects_capacity], self.fragments.nbytes))
        count = -(-length // BLOCK_BYTES)
        before = BLOCK_BYTES * (np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count))
        sizes = np.minimum(BLOCK_BYTES, np.repeat(length, count) - before)
        return list(zip((np.repeat(start, count) + before).tolist(), sizes.tolist(), strict=True))


def following(nbytes: Ints, start: int, live: int) -> Ints:
    """Offsets of fragments of so many bytes that lie one after the other from ``start`` on, those from number ``live`` on in the
    frozen part."""
    found, at = [], start
    for number, size in enumerate(nbytes.tolist()):
        if number == live:
            at = (at // BIG_ALIGN_BYTES + 1) * BIG_ALIGN_BYTES  # a gap: no range of bytes lies in both parts
        if size >= BIG_FRAGMENT_BYTES:
            at = -(-at // BIG_ALIGN_BYTES) * BIG_ALIGN_BYTES
        found.append(at)
        at = align_up(at + size)
    made: Ints = np.array(found, np.int64)
    return made


def followed(table: Table, nbytes: Shared, start: int, live: int) -> Shared:
    """The same, once for all ranks of a table whose fragments are as large."""
    found = nbytes.follow.get((start, live))
    if found is None:
        found = nbytes.follow[start, live] = table.once(following(nbytes.column, start, live))
        while len(nbytes.follow) > FOLLOWING_CACHED_MAX:
            del nbytes.follow[next(iter(nbytes.follow))]
    return found


def align_up(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
