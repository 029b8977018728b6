"""The header at the start of every segment: who owns it and which slots it has (design D1, P6, P7).

Two headers alternate. Each is ``magic, body length, serial, xxh3_128 of serial and body, body`` with a
msgpack body. A write replaces the older one, so that whatever instruction the daemon dies at, the other one
still stands. What a slot holds (its record) lies behind its payload; the header carries its length and sum.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from ckptd.arena.tenant import KINDS, Tenant
from ckptd.core.errors import CkptdError

PAGE = 4096
HEADER_VERSION = 1
HEADER_BYTES = 16 * 1024  # each of the two
EXTENTS_AT = 2 * HEADER_BYTES  # the first byte of a segment that may belong to a slot
SLOTS_PER_SEGMENT_MAX = 96
MAPPERS_MAX = 64  # processes that may still map one segment
SERIAL_MAX = 1 << 62
PID_MAX = 1 << 22  # the kernel gives no higher one
NUMBER_MAX = (1 << 52) - 1  # of a segment (13 digits of its name) or a slot

FREE, FILLING, SEALED = "free", "filling", "sealed"

_MAGIC = b"ckptdseg"
_PREFIX = struct.Struct("<8sIQ16s")
_NAME = re.compile(r"(own|peer|scratch)-[0-9a-f]{1,13}-([0-9a-f]{16})")
_HINT = "this memory is given up; peers and durable storage still hold their copies"


class HeaderCorrupt(CkptdError):
    """Neither header is valid, or the valid one contradicts itself or its name. It is refused, never
    trusted."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where=where, hint=_HINT)


@dataclass(frozen=True, slots=True)
class SlotRow:
    id: int
    offset: int
    capacity: int  # payload bytes; the record lies behind them
    meta_capacity: int
    state: str
    meta_bytes: int = 0
    meta_sum: bytes = b""

    @property
    def end(self) -> int:
        return self.offset + self.capacity + self.meta_capacity


@dataclass(frozen=True, slots=True)
class Header:
    name: str
    size: int
    tenant: Tenant  # the group
    incarnation: str  # of the daemon that wrote it
    mappers: tuple[tuple[int, int], ...]  # (pid, start ticks) of processes that may map it writable
    slots: tuple[SlotRow, ...]
    serial: int = 0


def is_segment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def encode_header(header: Header) -> bytes:
    t = header.tenant
    rows = [
        [row.id, row.offset, row.capacity, row.meta_capacity, row.state, row.meta_bytes, row.meta_sum]
        for row in header.slots
    ]
    who = [t.job, t.uid, t.kind, t.rank]
    body = msgpack.packb(
        [HEADER_VERSION, header.name, header.size, who, header.incarnation, header.mappers, rows]
    )
    assert len(body) + _PREFIX.size <= HEADER_BYTES, (
        "the caps on slots and mappers keep a header in its place"
    )
    return _PREFIX.pack(_MAGIC, len(body), header.serial, _sum(header.serial, body)) + bytes(body)


def place_of(serial: int) -> int:
    """Where in the segment the header of this serial goes."""
    return (serial % 2) * HEADER_BYTES


def read_header(first: bytes, second: bytes, name: str, size: int) -> Header:
    """The newest valid header of the two, checked against the segment's own name and size. Raises
    HeaderCorrupt."""
    serials = {body[0]: body[1] for body in (_open(first), _open(second)) if body is not None}
    if not serials:
        raise HeaderCorrupt("no valid header", name)
    serial = max(serials)
    try:
        header = _parse(serial, serials[serial])
        _check(header, name, size)
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise HeaderCorrupt(f"header contradicts itself: {error}", name) from error
    return header


def _sum(serial: int, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(serial.to_bytes(8, "little") + body)


def _open(data: bytes) -> tuple[int, bytes] | None:
    if len(data) < _PREFIX.size:
        return None
    magic, length, serial, digest = _PREFIX.unpack_from(data)
    body = bytes(data[_PREFIX.size : _PREFIX.size + length])
    if magic != _MAGIC or len(body) != length or serial >= SERIAL_MAX or _sum(serial, body) != digest:
        return None
    return serial, body


def _parse(serial: int, body: bytes) -> Header:
    version, name, size, (job, uid, kind, rank), incarnation, mappers, rows = msgpack.unpackb(body)
    if _whole(version) != HEADER_VERSION:
        raise ValueError(f"version {version}, ours is {HEADER_VERSION}")
    if kind not in KINDS or not type(job) is type(incarnation) is type(name) is str:
        raise ValueError("tenant of an unknown kind")
    return Header(
        name=name,
        size=_whole(size),
        tenant=Tenant(job, _whole(uid), kind, _whole(rank)),
        incarnation=incarnation,
        mappers=tuple((_whole(pid), _whole(started)) for pid, started in mappers),
        slots=tuple(_row(row) for row in rows),
        serial=serial,
    )


def _row(row: Any) -> SlotRow:
    *numbers, state, meta_bytes, meta_sum = row
    slot_id, offset, capacity, meta_capacity = map(_whole, numbers)
    if state not in (FREE, FILLING, SEALED) or type(meta_sum) is not bytes:
        raise ValueError(f"slot {slot_id} in an unknown state")
    return SlotRow(slot_id, offset, capacity, meta_capacity, state, _whole(meta_bytes), meta_sum)


def _check(header: Header, name: str, size: int) -> None:
    match = _NAME.fullmatch(name)
    if header.name != name or match is None:
        raise ValueError(f"it names itself {header.name!r}")
    if (match[1], match[2]) != (
        header.tenant.kind,
        header.tenant.tag,
    ) or header.tenant.group != header.tenant:
        raise ValueError("its tenant is not the one of its name")
    if header.size != size or size % PAGE or len(header.mappers) > MAPPERS_MAX:
        raise ValueError(f"it says {header.size} bytes, the memory has {size}")
    if not all(0 < pid <= PID_MAX for pid, _ in header.mappers):
        raise ValueError("lent to what no process is")
    _check_slots(header.slots, size)


def _check_slots(rows: tuple[SlotRow, ...], size: int) -> None:
    if len(rows) > SLOTS_PER_SEGMENT_MAX or len({row.id for row in rows}) != len(rows):
        raise ValueError("too many slots, or one twice")
    end = EXTENTS_AT
    for row in sorted(rows, key=lambda row: row.offset):
        if row.offset < end or row.end > size or (row.offset | row.capacity | row.meta_capacity) % PAGE:
            raise ValueError(f"slot {row.id} lies outside, over another, or not on pages")
        if row.meta_bytes > row.meta_capacity or not 0 < row.id <= NUMBER_MAX:
            raise ValueError(f"slot {row.id} has a record larger than its place")
        end = row.end


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"a {type(value).__name__} is not a whole number")
    return value
