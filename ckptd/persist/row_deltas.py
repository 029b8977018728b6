"""Which rows of a table a checkpoint writes: those whose sums are others than the newest checkpoint's (rows.py)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from fnmatch import fnmatchcase

import numpy as np
import xxhash

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.columns import Ints
from ckptd.persist import rows
from ckptd.persist.index import ROWS
from ckptd.persist.pieces import OutChunk
from ckptd.persist.reader import Checkpoint
from ckptd.persist.report import KeptFile, kept_file
from ckptd.persist.rows import Place
from ckptd.persist.storage.base import Storage
from ckptd.persist.sums import SUM_BYTES, FileDamage
from ckptd.persist.unchanged import newest_before

log = logging.getLogger("ckptd")


class RowDeltas:
    """For one writer's share of a checkpoint. Used by several threads; ``close`` when done."""

    def __init__(self, storage: Storage, job: str, snapshot: SnapshotId, patterns: Collection[str]) -> None:
        """patterns: of the keys of the tables. Raises StorageError."""
        self._patterns = tuple(patterns)
        self._older, self._without = newest_before(storage, job, snapshot) if patterns else (None, ())
        self._used: set[int] = set()  # files of ``older``
        self._lock = threading.Lock()

    def close(self) -> None:
        if self._older is not None:
            self._older.close()

    def wants(self, chunk: OutChunk) -> bool:
        return rows.fits(chunk.box, chunk.itemsize) and any(fnmatchcase(chunk.key, pattern) for pattern in self._patterns)

    def encode(self, chunk: OutChunk, values: memoryview) -> tuple[bytes, int]:
        """Its frame and codec. Raises StorageError."""
        width = rows.row_bytes(chunk.box, chunk.itemsize)
        count = len(values) // width
        sums = b"".join(xxhash.xxh3_128_digest(values[at : at + width]) for at in range(0, len(values), width))
        known = self._known(chunk, count, width)
        if known is not None:
            file, place, theirs = known
            changed = np.flatnonzero((_numbers(sums) != _numbers(theirs)).any(1))
            if place.since + len(changed) <= count:
                with self._lock:
                    self._used.add(file)
                place = place._replace(since=place.since + len(changed))
                return rows.changes(values, width, changed, place), ROWS
        return rows.whole(values, sums), ROWS

    def kept(self) -> list[KeptFile]:
        """What the checkpoint needs of older ones: nothing of it lies there alone."""
        if self._older is None:
            return []
        manifest = self._older.manifest
        files = (manifest.files[number] for number in sorted(self._used))
        return [kept_file(self._older.holder_of(file), manifest, file, []) for file in files]

    def _known(self, chunk: OutChunk, count: int, width: int) -> tuple[int, Place, bytes] | None:
        """The whole piece that the newest checkpoint has or names: number of its file there, place, sums of its rows."""
        if self._older is None:
            return None
        try:
            return self._look(self._older, chunk, count, width)
        except FileDamage as error:
            log.warning("%s is written whole, not only the rows that changed: %s", chunk.key, error)
            return None

    def _look(self, older: Checkpoint, chunk: OutChunk, count: int, width: int) -> tuple[int, Place, bytes] | None:
        tensor = older.tensor(chunk.key, chunk.rank)
        if tensor is None or (tensor[0].dtype, tensor[0].shape) != (chunk.dtype, chunk.shape):
            return None
        its = next((one for one in tensor[1] if one.box == chunk.box and one.codec == ROWS), None)
        if its is None:
            return None
        head = memoryview(bytearray(min(its.nbytes, rows.HEAD_BYTES_MAX)))
        stored = older.files.chunk(chunk.name, its)
        stored.read(0, head)
        try:
            place = rows.place_in(head) or Place(older.manifest.files[its.file].path, its.at, its.block, 0)
        except ValueError as error:
            raise FileDamage(f"{chunk.name}: {error}", where=stored.where) from error
        number = older.files.number_of(place.path)
        if older.holder_of(older.manifest.files[number]) in self._without:
            return None
        base = older.files.part_of(place.path, chunk.name, place.at, rows.whole_size(count, width), place.block)
        begin = memoryview(bytearray(rows.HEAD.size + count * SUM_BYTES))
        base.read(0, begin)
        if begin[: rows.HEAD.size] != rows.HEAD.pack(rows.WHOLE, count):
            raise FileDamage(f"{chunk.name}: not the whole of its rows", where=base.where)
        return number, place, bytes(begin[rows.HEAD.size :])


def _numbers(sums: bytes) -> Ints:
    return np.frombuffer(sums, np.int64).reshape(-1, 2)
