"""The side file of a writer: the block sums of its data files and the non-tensor values (docs/FORMAT.md)."""

from __future__ import annotations

import struct

import xxhash

from ckptd.persist.storage.base import FileReader, FileWriter
from ckptd.persist.sums import SUM_BYTES, FileDamage

SIDE_VERSION = 1
_HEAD = struct.Struct("<8sII")
MAGIC = b"CKPTSIDE"
_READ_BYTES = 8 << 20


class SideWriter:
    """Appends blobs, then its own checksum."""

    def __init__(self, out: FileWriter) -> None:
        self._out = out
        self._sum = xxhash.xxh3_128()
        self.append(_HEAD.pack(MAGIC, SIDE_VERSION, 0))

    def append(self, data: bytes) -> int:
        """Where it lies."""
        at = self._out.position
        self._sum.update(data)
        self._out.write(data)
        return at

    def finish(self) -> tuple[int, bytes]:
        """(size, checksum). Raises SyncFailed."""
        found = self._sum.digest()
        self._out.write(found)
        return self._out.finish(), found


def check_side(reader: FileReader, expected: bytes, where: str) -> None:
    """Raises FileDamage unless the whole file matches its checksum."""
    running = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_READ_BYTES, max(reader.size, 1))))
    end = reader.size - SUM_BYTES
    for at in range(0, end, len(buffer)):
        part = buffer[: min(len(buffer), end - at)]
        reader.read_into(at, part)
        running.update(part)
    tail = memoryview(bytearray(SUM_BYTES))
    if end < _HEAD.size:
        raise FileDamage("the side file is truncated", where=where)
    reader.read_into(end, tail)
    if running.digest() != expected or bytes(tail) != expected:
        raise FileDamage("damaged side file: its checksum does not match", where=where)
