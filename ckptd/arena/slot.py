"""A slot: an extent that holds one rank's snapshot, FREE, FILLING or SEALED (design D9, P6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckptd.arena.frozen import frozen_record, leans, own_bytes
from ckptd.arena.header import FILLING, FREE, SEALED, SlotRow
from ckptd.arena.payload import Joined, Payload
from ckptd.arena.record import SlotRecord, check_record, encode_record
from ckptd.arena.tenant import Tenant
from ckptd.core.errors import CkptdError
from ckptd.core.state_map.columns import Flags, Ints
from ckptd.core.state_map.layout import Layout

if TYPE_CHECKING:
    from ckptd.arena.segment import Segment

GONE = "gone"  # released or retired: this object is of no more use


def fits(record: SlotRecord, capacity: int) -> bool:
    """Does what the record says lie in a slot of so many bytes? Its frozen part lies elsewhere."""
    return own_bytes(record.layout, record.tier) <= capacity


def frozen_first(slots: Iterable[Slot]) -> list[Slot]:
    """The order in which slots can be taken back: what others lean on comes before them."""
    return sorted(slots, key=lambda slot: slot.record is None or not slot.record.layout.is_frozen)


class SlotMisuse(CkptdError):
    """A transition that the slot's state does not allow, or a record that does not belong in it."""


class MetaTooLarge(SlotMisuse):
    """The record needs ``needed`` bytes and the slot was allocated with less: allocate anew with more."""

    def __init__(self, needed: int, capacity: int, where: str) -> None:
        super().__init__(
            f"slot record of {needed} bytes, room for {capacity}",
            where=where,
            hint="allocate with meta_bytes",
        )
        self.needed, self.capacity = needed, capacity


class Slot:
    """``extent``: its own memory, writable, ``capacity`` bytes. ``record`` is set while SEALED; ``unread``: why it is not, of a
    slot that came back sealed. ``frozen``: the slot that holds the frozen part of what is captured here; ``leaning``: how many
    slots this one is that to. Its id stays the same over re-adoption."""

    def __init__(self, segment: Segment, row: SlotRow) -> None:
        self.segment, self.row = segment, replace(row, state=FREE, meta_bytes=0, meta_sum=b"")
        self.extent = segment.view[row.offset : row.offset + row.capacity]
        self.record: SlotRecord | None = None
        self.unread = ""
        self.frozen: Slot | None = None
        self.leaning = 0
        self.grant = 0  # of the capture under way
        self.tenant: Tenant = segment.tenant

    @property
    def id(self) -> int:
        return self.row.id

    @property
    def offset(self) -> int:
        return self.row.offset

    @property
    def capacity(self) -> int:
        return self.row.capacity

    @property
    def size(self) -> int:
        """Bytes of its extent and its record."""
        return self.row.capacity + self.row.meta_capacity

    @property
    def state(self) -> str:
        return self.row.state

    @property
    def payload(self) -> Payload:
        """What the record's layout has offsets into."""
        record = self.record
        return self.extent if record is None else self.reads(record.layout)

    def reads(self, layout: Layout) -> Payload:
        """The payload, if this is the layout of what lies here."""
        frozen = self.frozen
        return self.extent if frozen is None else Joined(self.extent, layout.frozen_at, frozen.extent)

    def places(self, at: Ints) -> list[tuple[Segment, Flags, int]]:
        """Where these bytes of the payload lie: in a segment some of them, and each so much further there."""
        record, frozen = self.record, self.frozen
        if record is None or frozen is None:
            return [(self.segment, np.ones(len(at), bool), self.offset)]
        frozen_at = record.layout.frozen_at
        return [(self.segment, at < frozen_at, self.offset), (frozen.segment, at >= frozen_at, frozen.offset - frozen_at)]

    def __repr__(self) -> str:
        return f"<Slot {self.id} {self.state} {self.capacity} bytes in {self.segment.name}>"

    def fill(self, grant: int = 0) -> None:
        """FREE -> FILLING. A daemon that dies now finds it FREE again (P6)."""
        with self.segment.lock:
            self._require(FREE)
            self.grant = grant
            self._stand_alone()  # of a seal that failed
            self._become(replace(self.row, state=FILLING))

    def seal(self, record: SlotRecord) -> None:
        """-> SEALED: from the last byte of the segment header's write on, the record survives the daemon. A snapshot with a frozen
        part leans on the slot that holds it (``lean``) before. Raises SlotMisuse, MetaTooLarge, ValueError (the record
        contradicts its layout)."""
        check_record(record)
        self._check_place(record)
        meta = encode_record(record)
        with self.segment.lock:
            self._require(FREE, FILLING)
            if len(meta) > self.row.meta_capacity:
                raise MetaTooLarge(len(meta), self.row.meta_capacity, repr(self))
            row = self.segment.write_meta(self.row, meta)
            self.record = record
            self._become(replace(row, state=SEALED))

    def free(self) -> None:
        """-> FREE; the extent stays allocated, its content means nothing any more."""
        with self.segment.lock:
            self._require(FREE, FILLING, SEALED)
            self.record, self.grant = None, 0
            self._stand_alone()
            self._become(replace(self.row, state=FREE, meta_bytes=0, meta_sum=b""))

    def lean(self, frozen: Slot) -> None:
        """``frozen`` holds the frozen part of what is, or will be, sealed here: it stays until this slot is free."""
        self._stand_alone()
        with frozen.segment.lock:
            frozen.leaning += 1
        self.frozen = frozen

    def _stand_alone(self) -> None:
        frozen, self.frozen = self.frozen, None
        if frozen is not None:
            with frozen.segment.lock:
                frozen.leaning -= 1
                assert frozen.leaning >= 0, "each slot leans once"

    def restore(self, row: SlotRow, record: SlotRecord) -> None:
        """A sealed slot found in a re-adopted segment. It does not lean on anything yet."""
        self.row, self.record = row, record

    def gone(self) -> None:
        self.record = None
        self._stand_alone()
        self.extent = memoryview(b"")
        self.row = replace(self.row, state=GONE)

    def _become(self, row: SlotRow) -> None:
        self.row = row
        self.segment.write_ledger()

    def _check_place(self, record: SlotRecord) -> None:
        tenant = self.tenant
        if record.job != tenant.job or (tenant.kind == "own" and record.rank != tenant.rank):
            raise SlotMisuse(f"record of {record.job} rank {record.rank} in another's slot", where=repr(self))
        if not fits(record, self.capacity):
            raise SlotMisuse("record whose layout is larger than its slot", where=repr(self))
        if leans(record) != (self.frozen is not None):
            raise SlotMisuse("a frozen part and the slot that holds it come together", where=repr(self))
        if self.frozen is not None and self.frozen.record != frozen_record(record):
            raise SlotMisuse("the frozen part is not what the record says", where=repr(self))

    def _require(self, *states: str) -> None:
        if self.row.state not in states:
            raise SlotMisuse(f"the slot is {self.row.state}, not {' or '.join(states)}", where=repr(self))
