"""A segment: one sealed memfd of one tenant group, its header, and the slots that lie in it (design D1)."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import xxhash

from ckptd.arena import memory
from ckptd.arena.header import (
    EXTENTS_AT,
    FREE,
    HEADER_BYTES,
    MAPPERS_MAX,
    PAGE,
    SEALED,
    SLOTS_PER_SEGMENT_MAX,
    Header,
    HeaderCorrupt,
    SlotRow,
    encode_header,
    place_of,
    read_header,
)
from ckptd.arena.prefault import prefault
from ckptd.arena.record import decode_record
from ckptd.arena.slot import Slot, fits
from ckptd.arena.tenant import Tenant
from ckptd.core.failpoint import failpoint
from ckptd.process import Process


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE

RECORD_BYTES_MAX = 256 << 20  # of one slot


class Segment:
    """``name`` is unique and carries the group's tag; ``fd`` is ours; ``size`` in bytes. Its lock orders
    segment header writes."""

    def __init__(self, name: str, tenant: Tenant, fd: int, size: int, incarnation: str) -> None:
        self.name, self.tenant, self.fd, self.size = name, tenant, fd, size
        self.lock = threading.RLock()
        self.slots: dict[int, Slot] = {}
        self.mappers: list[Process] = []
        self.retired = False  # no slot is placed here any more
        self._incarnation, self._serial = incarnation, 0
        self._mapping = memory.map_segment(fd, size)
        self.view = memoryview(self._mapping)

    # --- coming and going -------------------------------------------------------------------------
    @classmethod
    def create(cls, name: str, tenant: Tenant, size: int, incarnation: str, *, touch: bool) -> Segment:
        """Blocks while the pages are made. Raises NoMemory, OSError; then nothing is left."""
        fd = memory.make_memfd(name, size)
        try:
            if touch:
                prefault(fd, size)
            segment = cls(name, tenant.group, fd, size, incarnation)
        except BaseException:
            os.close(fd)
            raise
        if touch and tenant.kind != "own":  # the daemon itself receives into it; a rank writes its own slots
            memory.populate(segment._mapping, size)
        segment.write_ledger()
        return segment

    @classmethod
    def adopt(cls, name: str, fd: int, incarnation: str, *, offered: bool = False) -> Segment:
        """Take back a segment by its header: same slots, same ids. What was being filled is FREE now; a
        record that does not match its sum is dropped. Writes nothing. Raises HeaderCorrupt; then ``fd``
        stays the caller's. ``offered``: by a process that may have written all of it, so it does not say who maps it."""
        if not memory.is_sealed_memfd(fd):
            raise HeaderCorrupt("not a sealed memfd of ours", name)
        size = os.fstat(fd).st_size
        first, second = os.pread(fd, HEADER_BYTES, 0), os.pread(fd, HEADER_BYTES, HEADER_BYTES)
        header = read_header(first, second, name, size)
        segment = cls(name, header.tenant, fd, size, incarnation)
        segment._serial = header.serial
        if not offered:
            segment.mappers = [p for pid, started in header.mappers if (p := Process.find(pid, started))]
        for row in header.slots:
            segment._take_back(row)
        return segment

    def _take_back(self, row: SlotRow) -> None:
        slot = self.slots[row.id] = Slot(self, row)
        if row.state != SEALED or row.meta_bytes > RECORD_BYTES_MAX:
            return
        at = row.offset + row.capacity
        meta = bytes(self.view[at : at + row.meta_bytes])
        if xxhash.xxh3_128_digest(meta) != row.meta_sum:
            slot.unread = "its record does not match its sum"
            return
        try:
            record = decode_record(meta, own=self.tenant.kind == "own")
        except ValueError as error:
            slot.unread = str(error)
            return
        ours = fits(record, row.capacity) and record.job == self.tenant.job
        if ours and (self.tenant.kind != "own" or record.rank == self.tenant.rank):
            slot.restore(row, record)
        else:
            slot.unread = "its record is of another slot"

    def destroy(self) -> None:
        """Free the pages now, whoever maps them. May take a second per 10 GiB."""
        try:
            memory.give_back_pages(self.fd, self.size)
        finally:
            for slot in self.slots.values():
                slot.gone()
            self.slots.clear()
            self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)
        self.mappers = []  # not closed: they are the sessions' too
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            return  # a thread still holds a slice; the mapping goes with it, the pages are gone

    def open_read(self) -> int:
        """A descriptor of this memory that can only be mapped for reading. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    # --- slots ------------------------------------------------------------------------------------
    def gap(self, need: int) -> int | None:
        """Offset of the first unused extent of ``need`` bytes."""
        if len(self.slots) >= SLOTS_PER_SEGMENT_MAX:
            return None
        at = EXTENTS_AT
        for slot in sorted(self.slots.values(), key=lambda s: s.offset):
            if slot.offset - at >= need:
                return at
            at = slot.row.end
        return at if self.size - at >= need else None

    def place(self, slot_id: int, offset: int, capacity: int, meta_capacity: int) -> Slot:
        with self.lock:
            slot = self.slots[slot_id] = Slot(self, SlotRow(slot_id, offset, capacity, meta_capacity, FREE))
            self.write_ledger()
            return slot

    def remove(self, slot: Slot) -> None:
        with self.lock:
            del self.slots[slot.id]
            slot.gone()
            self.write_ledger()

    def living_mappers(self) -> list[Process]:
        """Processes that may still write here. The dead are forgotten."""
        self.mappers = [process for process in self.mappers if process.alive]
        return self.mappers

    def lend(self, process: Process) -> bool:
        """Remember, before it is told of the segment, who will map it. False when too many do."""
        with self.lock:
            known = self.living_mappers()
            if not any(process.same(other) for other in known):
                if len(known) >= MAPPERS_MAX:
                    return False
                self.mappers.append(process)
                self.write_ledger()
            return True

    # --- the header -------------------------------------------------------------------------------
    def write_ledger(self) -> None:
        with self.lock:
            self._serial += 1
            data = encode_header(self._header())
            at, half = place_of(self._serial), len(data) // 2
            self.view[at : at + half] = data[:half]
            failpoint("arena.header.half")
            self.view[at + half : at + len(data)] = data[half:]

    def write_meta(self, row: SlotRow, meta: bytes) -> SlotRow:
        """Put a record behind its payload; it counts once the segment header says so."""
        at = row.offset + row.capacity
        self.view[at : at + len(meta)] = meta
        failpoint("arena.seal.meta")
        return replace(row, meta_bytes=len(meta), meta_sum=xxhash.xxh3_128_digest(meta))

    def _header(self) -> Header:
        rows = tuple(slot.row for slot in self.slots.values())
        mappers = tuple((process.pid, process.started) for process in self.mappers)
        return Header(self.name, self.size, self.tenant, self._incarnation, mappers, rows, self._serial)
