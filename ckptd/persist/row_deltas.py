"""Which rows of a table a checkpoint writes: those whose sums are others than in the last one where it was whole (rows.py).

All tables of a job are whole in the same checkpoints, whoever writes them: a checkpoint needs one other at most, which needs none,
so that retention keeps that one and no more. Each writer reads in the newest manifest whether it is time.
"""

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
from ckptd.persist.names import step_dir
from ckptd.persist.pieces import OutChunk
from ckptd.persist.reader import Checkpoint
from ckptd.persist.report import KeptFile, WrittenRows, decode, kept_file
from ckptd.persist.rows import Place
from ckptd.persist.storage.base import Storage
from ckptd.persist.sums import SUM_BYTES, FileDamage
from ckptd.persist.unchanged import newest_before
from ckptd.persist.verify import mark_damaged

log = logging.getLogger("ckptd")


class RowDeltas:
    """For one writer's share of a checkpoint. Used by several threads; ``close`` when done."""

    def __init__(self, storage: Storage, job: str, snapshot: SnapshotId, patterns: Collection[str]) -> None:
        """patterns: of the keys of the tables. Raises StorageError."""
        self._storage, self._job, self._patterns = storage, job, tuple(patterns)
        self._older, without = newest_before(storage, job, snapshot) if patterns else (None, ())
        self._base = _base_of(self._older) if self._older is not None else None  # None: all is written whole
        if self._base in without:
            self._base = None
        self._used: set[int] = set()  # files of ``older``
        self._wholes = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        if self._older is not None:
            self._older.close()

    def wants(self, chunk: OutChunk) -> bool:
        return rows.fits(chunk.box, chunk.itemsize) and any(fnmatchcase(chunk.key, pattern) for pattern in self._patterns)

    def encode(self, chunk: OutChunk, values: memoryview) -> tuple[bytes, int]:
        """Its frame and codec. Raises StorageError."""
        width = rows.row_bytes(chunk.box, chunk.itemsize)
        sums = b"".join(xxhash.xxh3_128_digest(values[at : at + width]) for at in range(0, len(values), width))
        known = self._known(chunk, len(values) // width, width)
        if known is None:
            with self._lock:
                self._wholes += 1
            return rows.whole(values, sums), ROWS
        file, place, theirs = known
        with self._lock:
            self._used.add(file)
        return rows.changes(values, width, np.flatnonzero((_numbers(sums) != _numbers(theirs)).any(1)), place), ROWS

    def kept(self) -> list[KeptFile]:
        """What the checkpoint needs of older ones: nothing of it lies there alone."""
        if self._older is None:
            return []
        manifest = self._older.manifest
        files = (manifest.files[number] for number in sorted(self._used))
        return [kept_file(self._older.holder_of(file), manifest, file, []) for file in files]

    def told(self) -> WrittenRows | None:
        """For the committer. None: this writer has written no table."""
        if not self._used and not self._wholes:
            return None
        told = self._older.manifest.rows if self._older is not None and self._used else None
        return WrittenRows(self._base if self._used else None, bool(self._used and self._wholes), told.since if told else 0)

    def _known(self, chunk: OutChunk, count: int, width: int) -> tuple[int, Place, bytes] | None:
        """The piece where it is whole: number of its file in the newest checkpoint's manifest, place, sums of its rows."""
        if self._older is None or self._base is None:
            return None
        try:
            return self._look(self._older, self._base, chunk, count, width)
        except FileDamage as error:
            log.warning("job=%s %s is written whole, not only the rows that changed: %s", self._job, chunk.key, error)
            for snapshot in {self._base, SnapshotId(*self._older.manifest.snapshot.at)}:
                mark_damaged(self._storage, step_dir(self._job, snapshot), str(error))
            return None

    def _look(
        self, older: Checkpoint, base: SnapshotId, chunk: OutChunk, count: int, width: int
    ) -> tuple[int, Place, bytes] | None:
        tensor = older.tensor(chunk.key, chunk.rank)
        if tensor is None or (tensor[0].dtype, tensor[0].shape) != (chunk.dtype, chunk.shape):
            return None
        its = next((one for one in tensor[1] if one.box == chunk.box and one.codec == ROWS), None)
        if its is None:
            return None
        place = older.files.rows_of(chunk.name, its) or Place(older.manifest.files[its.file].path, its.at, its.block)
        number = older.files.number_of(place.path)
        if older.holder_of(older.manifest.files[number]) != base:
            return None
        whole = older.files.part_of(place.path, chunk.name, place.at, rows.whole_size(count, width), place.block)
        begin = memoryview(bytearray(rows.HEAD.size + count * SUM_BYTES))
        whole.read(0, begin)
        if begin[: rows.HEAD.size] != rows.HEAD.pack(rows.WHOLE, count):
            raise FileDamage(f"{chunk.name}: not the whole of its rows", where=whole.where)
        return number, place, bytes(begin[rows.HEAD.size :])


def fit_nothing(report: bytes, patterns: Collection[str]) -> list[str]:
    """Of these patterns those that no table fits which this writer has written."""
    keys = {chunk.key for file in decode(report).files for chunk in file.chunks if chunk.codec == ROWS}
    return [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in keys)]


def _base_of(older: Checkpoint) -> SnapshotId | None:
    """Where the tables are whole that the next checkpoint has changes of. None: it is time that they are again, or there are none:
    as soon as what the changes since have taken is more than the whole would (Check-N-Run's predictor, where they grow evenly)."""
    told = older.manifest.rows
    if told is None:
        return None
    if told.base is None:
        return SnapshotId(*older.manifest.snapshot.at)
    index, tables = older.index, older.index.codec == ROWS
    again = int(index.nbytes[tables].sum())  # the next one's changes will take as much, or more
    return told.base if told.since + again <= int(index.values_bytes[tables].sum()) else None


def _numbers(sums: bytes) -> Ints:
    return np.frombuffer(sums, np.int64).reshape(-1, 2)
