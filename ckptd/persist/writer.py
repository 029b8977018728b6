"""A node's share of a checkpoint becomes files: verified at the source, sequential, durable, not yet visible (D13, P10)."""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import SnapshotId
from ckptd.persist.encoding import Coder, available, bytes_to_be, compressed, pays, quantised, write_encoded
from ckptd.persist.index import ENCODED_BYTES_MAX, RAW
from ckptd.persist.names import DATA, ENCODED, SIDE, attempt_dir, file_stem
from ckptd.persist.packing import FILE_BYTES_MAX, Package, cut, header, pack, pack_encoded
from ckptd.persist.pieces import HeldPiece, ObjectBlob, OutChunk, chunks_of, objects_of
from ckptd.persist.quantized import Quantizer
from ckptd.persist.report import (
    REPORT_VERSION,
    KeptFile,
    Report,
    WrittenChunk,
    WrittenFile,
    WrittenObject,
    WrittenSide,
    encode,
)
from ckptd.persist.row_deltas import RowDeltas
from ckptd.persist.rows import whole_of
from ckptd.persist.side import SideWriter
from ckptd.persist.storage.base import Storage, StorageError, SyncFailed, storage_error
from ckptd.persist.stream import write_chunk
from ckptd.persist.sums import SUM_BYTES, block_count, digest
from ckptd.persist.unchanged import unchanged
from ckptd.thread_pool import ThreadPool, here
from ckptd.units import format_bytes
from ckptd.wire.bulk import Pace, wait_turn

WRITER_THREADS = 2
SYNC_TRIES = 2  # a file whose fsync failed is written anew under another name once, then the attempt fails
SPARE_BYTES = 16 << 20  # free space asked for beyond the payload: headers, sums, manifest

Progress = Callable[[int, int], None]  # (bytes written, in all), from the writer threads, one at a time
T = TypeVar("T")


class Cancelled(CkptdError):
    """The write was called off; nothing of it is left."""


@dataclass(frozen=True)
class _Finished:
    """A durable data file and the sums of its blocks, before the side file says where those lie."""

    path: str
    size: int
    data_start: int
    header_sum: bytes
    sums: bytes
    chunks: list[WrittenChunk]


def write_pieces(
    storage: Storage,
    job: str,
    snapshot: SnapshotId,
    attempt: str,
    node: str,
    pieces: Sequence[HeldPiece],
    cancelled: threading.Event,
    progress: Progress | None = None,
    *,
    pace: Pace | None = None,
    per_rank: Collection[str] = (),
    dedup: bool = False,
    compress: bool = False,
    row_deltas: Collection[str] = (),
    bytes_max: int = FILE_BYTES_MAX,
    threads: int = WRITER_THREADS,
) -> bytes:
    """Write the pieces and return the report for ``commit``. Blocks; a cancel is noticed within a few MiB. ``pace`` is asked after
    each few MiB, so that the next ones wait.

    per_rank: "t:key" of slices that differ between ranks in this snapshot. dedup: what an older checkpoint has is not written, but
    named. compress: what becomes smaller is encoded. row_deltas: patterns of tables of which the rows that changed are written.
    Raises SlotDamage (quarantine that slot), Cancelled, StorageError; whatever it raises, its files are deleted unless the storage
    itself refuses.
    """

    def made() -> tuple[list[OutChunk], list[ObjectBlob]]:
        return chunks_of(pieces, per_rank), objects_of(pieces)

    ranks = sorted({held.piece.rank for held in pieces if held.piece.objects})
    place = storage, job, snapshot, attempt, node
    return write_chunks(
        *place, made, ranks, cancelled, progress, pace=pace, dedup=dedup, compress=compress, row_deltas=row_deltas,
        bytes_max=bytes_max, threads=threads,
    )  # fmt: skip


def write_chunks(
    storage: Storage,
    job: str,
    snapshot: SnapshotId,
    attempt: str,
    node: str,
    made: Callable[[], tuple[list[OutChunk], list[ObjectBlob]]],
    ranks: list[int],
    cancelled: threading.Event,
    progress: Progress | None = None,
    *,
    pace: Pace | None = None,
    dedup: bool = False,
    compress: bool = False,
    row_deltas: Collection[str] = (),
    quantizer: Quantizer | None = None,
    bytes_max: int = FILE_BYTES_MAX,
    threads: int = WRITER_THREADS,
) -> bytes:
    """As ``write_pieces``, of what ``made`` finds: also what lies in no slot. ranks: whose objects these are. quantizer: what it
    names is not written as it is."""
    run = _Run(storage, attempt_dir(job, snapshot, attempt), node, cancelled, progress, pace)
    run.origin = {"version": REPORT_VERSION, "job": job, "epoch": snapshot.epoch, "step": snapshot.step}
    try:
        chunks, blobs = made()
        kept: list[KeptFile] = []
        run.ranks, run.quantizer = ranks, quantizer
        run.tables = RowDeltas(storage, job, snapshot, row_deltas)
        if dedup:
            tables = [chunk for chunk in chunks if run.tables.wants(chunk)]
            others = [chunk for chunk in chunks if not run.tables.wants(chunk)]
            others, kept = unchanged(storage, job, snapshot, cut(others, bytes_max), run.check)
            chunks = tables + others
        run.total = sum(chunk.nbytes for chunk in chunks) + sum(len(blob.data) for blob in blobs)
        run.begin(sum(run.bytes_to_be(chunk) - chunk.nbytes for chunk in chunks) + run.total)
        report = run.write(run.packages(chunks, compress, bytes_max, threads), blobs, kept, threads)
    except BaseException:
        run.clean()
        raise
    finally:
        if run.tables is not None:
            run.tables.close()
    failpoint("persist.write.report")
    return encode(report)


def check_room(storage: Storage, nbytes: int, directory: str) -> None:
    """Raises StorageError: so much would not fit."""
    free = storage.free_bytes()
    if free < nbytes + SPARE_BYTES:
        text = f"{format_bytes(nbytes)} needed and {format_bytes(SPARE_BYTES)} in reserve, {format_bytes(free)} free"
        raise storage_error(OSError(errno.ENOSPC, text), "write", storage.locate(directory))


class _Run:
    """One call of write_pieces: names, progress, what to delete if it fails."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        node: str,
        cancelled: threading.Event,
        progress: Progress | None,
        pace: Pace | None = None,
    ) -> None:
        self.storage, self.directory, self.node = storage, directory, node
        self._cancelled, self._progress, self._pace = cancelled, progress, pace
        self.origin: dict[str, object] = {}
        self.total = 0
        self.ranks: list[int] = []
        self.quantizer: Quantizer | None = None
        self.tables: RowDeltas | None = None
        self._stem = f"{file_stem(node)}-{secrets.token_hex(4)}"  # a repeated order of the same attempt meets no old name
        self._lock = threading.Lock()
        self._names = 0
        self._done = 0
        self._created: list[str] = []
        self._stop = threading.Event()  # the other thread failed

    def begin(self, room: int) -> None:
        failpoint("persist.write.begin")
        check_room(self.storage, room, self.directory)
        self.storage.begin(self.directory)

    def write(self, packages: list[Package], blobs: list[ObjectBlob], kept: list[KeptFile], threads: int) -> Report:
        if not packages and not blobs:
            return Report(REPORT_VERSION, self.node, [], None, self.ranks, kept)
        finished = self._data_files(packages, threads)
        written, side = self._durable(SIDE, lambda path: self._side_file(path, finished, blobs))
        failpoint("persist.write.synced")
        told = None
        if self.tables is not None:
            kept, told = kept + self.tables.kept(), self.tables.told()
        return Report(REPORT_VERSION, self.node, written, side, self.ranks, kept, told)

    def packages(self, chunks: list[OutChunk], compress: bool, bytes_max: int, threads: int) -> list[Package]:
        """Raises Cancelled, SlotDamage, CkptdError: nothing to compress with."""
        plain, encoded = list[OutChunk](), list[OutChunk]()
        if compress:
            available()
        for chunk in chunks:
            self.check()
            (encoded if self._coder_of(chunk) or (compress and pays(chunk)) else plain).append(chunk)
        found = pack(plain, bytes_max=bytes_max, writers=threads)
        return found + pack_encoded(encoded, ENCODED_BYTES_MAX, bytes_max=bytes_max, writers=threads)

    def bytes_to_be(self, chunk: OutChunk) -> int:
        """What it takes on storage at most, but for what compressing may save."""
        if self.tables is not None and self.tables.wants(chunk):
            return whole_of(chunk.box, chunk.itemsize)
        return bytes_to_be(chunk, self.quantizer)

    def _coder_of(self, chunk: OutChunk) -> Coder | None:
        """None: it is not asked for."""
        if self.quantizer is not None and self.quantizer.bits(chunk.key, chunk.dtype) is not None:
            return partial(quantised, self.quantizer)
        return self.tables.encode if self.tables is not None and self.tables.wants(chunk) else None

    def clean(self) -> None:
        """Best effort: the storage may be what failed. Old attempts are swept later."""
        for path in self._created:
            try:
                self.storage.delete(f"{self.directory}/{path}")
            except StorageError:
                return

    def _data_files(self, packages: list[Package], threads: int) -> list[_Finished]:
        calls = [partial(self._data_file, package) for package in packages]
        with ThreadPool(threads, "ckptd-write") as pool:
            try:
                pool.ready(1)
            except OSError:  # no thread can be started: by this one, one after the other
                futures = [here(call) for call in calls]
            else:
                futures = [pool.submit(call) for call in calls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Cancelled))  # the cause, not its echo
        return [future.result() for future in futures]

    def _data_file(self, package: Package) -> _Finished:
        try:
            return self._durable(ENCODED if package.encoded else DATA, lambda path: self._fill(path, package))
        except BaseException:
            self._stop.set()
            raise

    def _durable(self, suffix: str, write: Callable[[str], T]) -> T:
        """Write a file; when its fsync fails, write it anew under another name (P11)."""
        for left in reversed(range(SYNC_TRIES)):
            path = self._name(suffix)
            try:
                return write(path)
            except SyncFailed:
                self.storage.delete(f"{self.directory}/{path}")
                if not left:
                    raise
        raise AssertionError("SYNC_TRIES is at least 1")

    def _fill(self, path: str, package: Package) -> _Finished:
        head = b"" if package.encoded else header(package.chunks, self.origin)
        out = self.storage.put(f"{self.directory}/{path}")
        try:
            out.write(head)
            rows: list[WrittenChunk] = []
            sums: list[bytes] = []
            block = 0
            for chunk in package.chunks:
                at, nbytes, codec = out.position, chunk.nbytes, RAW
                if package.encoded:
                    its, nbytes, codec = write_encoded(chunk, out, self._tick, self._coder_of(chunk) or compressed)
                else:
                    its = write_chunk(chunk, out, self._tick)
                rows.append(chunk.row(at, block, nbytes, codec))
                sums.append(its)
                block += block_count(nbytes)
                failpoint("persist.write.chunk")
            return _Finished(path, out.finish(), len(head), digest(head), b"".join(sums), rows)
        finally:
            out.abort()

    def _side_file(
        self, path: str, finished: list[_Finished], blobs: list[ObjectBlob]
    ) -> tuple[list[WrittenFile], WrittenSide]:
        out = self.storage.put(f"{self.directory}/{path}")
        try:
            side = SideWriter(out)
            files = [_located(file, side.append(file.sums)) for file in finished]
            objects = self._objects(side, blobs)
            size, found = side.finish()
            return files, WrittenSide(path, size, found, objects)
        finally:
            out.abort()

    def _objects(self, side: SideWriter, blobs: list[ObjectBlob]) -> list[WrittenObject]:
        """Equal values of several ranks are stored once."""
        places: dict[bytes, int] = {}
        rows: list[WrittenObject] = []
        for blob in blobs:
            at = places.get(blob.data)
            if at is None:
                at = places[blob.data] = side.append(blob.data)
                self._tick(len(blob.data))
            rows.append(WrittenObject(blob.name, blob.rank, at, len(blob.data), digest(blob.data)))
        return rows

    def _name(self, suffix: str) -> str:
        with self._lock:
            path = f"{self._stem}-{self._names:04d}{suffix}"
            self._names += 1
            self._created.append(path)
            return path

    def _stopped(self) -> bool:
        return self._cancelled.is_set() or self._stop.is_set()

    def check(self) -> None:
        """Raises Cancelled."""
        if self._stopped():
            raise Cancelled("the write was cancelled", where=self.storage.locate(self.directory))

    def _tick(self, nbytes: int) -> None:
        wait_turn(self._pace, nbytes, self._stopped)
        self.check()
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self.total)


def _located(file: _Finished, sums_at: int) -> WrittenFile:
    blocks = len(file.sums) // SUM_BYTES
    return WrittenFile(
        file.path,
        file.size,
        file.data_start,
        file.header_sum,
        blocks,
        sums_at,
        digest(file.sums),
        file.chunks,
    )
