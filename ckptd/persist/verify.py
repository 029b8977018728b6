"""Reading a checkpoint back whole: every byte, every sum, and what stock readers will make of the headers (P10)."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box, uncovered
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist import manifest as m
from ckptd.persist import rows
from ckptd.persist.index import ROWS, Chunk, Tensor
from ckptd.persist.names import DAMAGED, DATA, READ, step_dir, writer_of
from ckptd.persist.reader import SEGMENT_BYTES, Checkpoint
from ckptd.persist.side import check_side
from ckptd.persist.storage.base import NotFound, Storage, StorageError
from ckptd.persist.sums import FileDamage, digest
from ckptd.thread_pool import ThreadPool, together
from ckptd.wire.bulk import Pace, wait_turn

PROBLEMS_MAX = 1000  # named in one report
FILES_AT_ONCE = 4  # each with a buffer of SEGMENT_BYTES


@dataclass
class VerifyReport:
    """``problems`` names every damage found; empty: each byte is what was captured. damaged: it is, and not only out of reach.
    older: checkpoints of the job whose own files are damaged, as this one names them. place: where its files lie, for other tools,
    if that is elsewhere (in a bucket)."""

    path: str
    problems: list[str] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    bytes_read: int = 0
    damaged: bool = False
    older: list[SnapshotId] = field(default_factory=list)
    place: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems


Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


def verify_at(
    storage: Storage,
    directory: str,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
    known: Collection[str] = (),
    at_once: int = FILES_AT_ONCE,
    trusted: Collection[SnapshotId] = (),
) -> VerifyReport:
    """Read a checkpoint back. Never raises for damage, it reports it; a cancelled run reports that as its problem. at_once: so many
    files are read side by side; 1: by this thread alone. known: writers (names.writer_of) whose files have been read back. trusted:
    older checkpoints that have been read back whole; what lies there is not read again."""
    report = VerifyReport(storage.locate(directory))
    try:
        with Checkpoint.at(storage, directory) as checkpoint:
            _Pass(checkpoint, report, progress, cancelled or threading.Event(), None, at_once).run(known, trusted)
    except CkptdError as error:
        report.problems.append(str(error))
        report.damaged |= isinstance(error, FileDamage)  # and not a version that this reader does not know
    return report


def mark_damaged(storage: Storage, directory: str, text: str) -> None:
    """Lists say so from then on, and retention does not count on it; a restore tries it all the same."""
    with contextlib.suppress(StorageError):  # it has gone, or storage is full
        storage.mark(directory, DAMAGED, text.encode())


def mark_report(storage: Storage, directory: str, report: VerifyReport) -> None:
    """The checkpoint, and those whose files it names: otherwise the next one would name them, too."""
    if not report.damaged:
        return
    mark_damaged(storage, directory, report.problems[0])
    job = directory.rpartition("/")[0].rpartition("/")[0]
    for snapshot in report.older:
        mark_damaged(storage, step_dir(job, snapshot), report.problems[0])


def read_back(
    storage: Storage, directory: str, writer: str, pace: Pace | None = None, cancelled: threading.Event | None = None
) -> VerifyReport:
    """What one writer wrote of a committed checkpoint, by itself: each node reads its own files, all of them at once. If they are
    intact a mark says so, and nobody reads them again before older checkpoints go."""
    report = VerifyReport(storage.locate(directory))
    failpoint("persist.read_back")
    try:
        with Checkpoint.at(storage, directory) as checkpoint:
            _Pass(checkpoint, report, None, cancelled or threading.Event(), pace).files_of(writer)
        if report.ok and report.files:
            storage.mark(directory, f"{READ}{writer}", b"")
    except NotFound:
        pass  # it has gone already
    except CkptdError as error:
        report.problems.append(str(error))
        report.damaged |= isinstance(error, FileDamage)
    mark_report(storage, directory, report)
    return report


class _Pass:
    def __init__(
        self,
        checkpoint: Checkpoint,
        report: VerifyReport,
        progress: Progress | None,
        cancelled: threading.Event,
        pace: Pace | None,
        at_once: int = FILES_AT_ONCE,
    ) -> None:
        self._checkpoint, self._report, self._at_once = checkpoint, report, at_once
        self._manifest = checkpoint.manifest
        self._progress, self._cancelled, self._pace = progress, cancelled, pace
        self._total = sum(file.size for file in self._manifest.files)
        self._total += sum(side.size for side in self._manifest.sides)
        self._lock = threading.Lock()
        self._trusted: Collection[SnapshotId] | None = None  # None: all older ones
        self._rows: dict[int, list[tuple[Tensor, Chunk]]] = {}

    def run(self, known: Collection[str], trusted: Collection[SnapshotId]) -> None:
        report, manifest, index = self._report, self._manifest, self._checkpoint.index
        self._trusted = trusted
        report.files, report.tensors = len(manifest.files) + len(manifest.sides), len(index.dims)
        self._try(self._strangers)
        for at, tensor in enumerate(index.tensors()):
            chunks = index.chunks_at(at)
            self._try(_covered, tensor, chunks)
            for chunk in chunks:
                self._rows.setdefault(chunk.file, []).append((tensor, chunk))
        self._read(lambda file: file.of not in trusted if file.of is not None else writer_of(file.path) not in known)
        for ref in manifest.objects:
            self._try(self._checkpoint.files.blob, ref)

    def files_of(self, writer: str) -> None:
        index = self._checkpoint.index
        mine = {at for at, file in enumerate(self._manifest.files) if writer_of(file.path) == writer}
        for row in np.flatnonzero(np.isin(index.file, sorted(mine))).tolist():
            chunk = index.chunk(row)
            self._rows.setdefault(chunk.file, []).append((index.tensor_at(int(index.tensor[row])), chunk))
        sides = sum(writer_of(side.path) == writer for side in self._manifest.sides)
        self._report.files, self._report.tensors = len(mine) + sides, sum(map(len, self._rows.values()))
        self._read(lambda file: writer_of(file.path) == writer)

    def _read(self, wanted: Callable[[m.DataFile | m.SideFile], bool]) -> None:
        """Several files at once."""
        sides, files = self._manifest.sides, self._manifest.files
        calls = [partial(self._try, self._side, at, of=side.of) for at, side in enumerate(sides) if wanted(side)]
        calls += [partial(self._try, self._file_and_done, at, of=file.of) for at, file in enumerate(files) if wanted(file)]
        if self._at_once == 1:
            for call in calls:
                call()
            return
        with ThreadPool(self._at_once - 1, "ckptd-verify") as pool:  # and whoever reads
            for done in together(pool, calls):
                done.result()

    def _try(self, check: Callable[..., object], *args: object, of: SnapshotId | None = None) -> None:
        """of: the older checkpoint whose file is looked at."""
        if len(self._report.problems) >= PROBLEMS_MAX:
            return
        if self._cancelled.is_set():
            self._report.problems[:] = ["cancelled"]
            return
        try:
            check(*args)
        except CkptdError as error:
            if str(error) not in self._report.problems:  # one file that is away stops whatever lies in it
                self._report.problems.append(str(error))
            self._report.damaged |= not isinstance(error, StorageError)
            if of is not None and of not in self._report.older and not isinstance(error, StorageError):
                self._report.older.append(of)

    def _count(self, nbytes: int) -> None:
        wait_turn(self._pace, nbytes, self._cancelled.is_set)
        with self._lock:
            self._report.bytes_read += nbytes
            if self._progress is not None:
                self._progress(self._report.bytes_read, self._total)

    def _strangers(self) -> None:
        """A stock reader would load a foreign data file along with the rest."""
        known = {file.path for file in self._manifest.files if file.of is None}
        for entry in self._checkpoint.storage.list(self._checkpoint.directory):
            if entry.name.endswith(DATA) and entry.name not in known:
                where = self._checkpoint.storage.locate(f"{self._checkpoint.directory}/{entry.name}")
                raise CkptdError("a data file that is not part of the checkpoint", where=where)

    def _side(self, index: int) -> None:
        side = self._manifest.sides[index]
        with contextlib.closing(self._checkpoint.files.side(index)) as reader:
            check_side(reader, bytes.fromhex(side.sum), self._checkpoint.files.where(side))
        self._count(side.size)

    def _file_and_done(self, index: int) -> None:
        try:
            self._file(index)
        finally:
            self._checkpoint.files.done(index)

    def _file(self, index: int) -> None:
        file, rows = self._manifest.files[index], self._rows.get(index, [])
        where = self._checkpoint.files.where(file)
        reader = self._checkpoint.files.data(index)
        head = bytearray(file.data_start)
        reader.read_into(0, memoryview(head))
        if digest(head).hex() != file.header_sum:
            raise CkptdError("damaged header", where=where)
        if file.path.endswith(DATA):
            _check_header(head, file, rows, where)
        if file.of is None and file.data_start + sum(chunk.nbytes for _, chunk in rows) != file.size:
            raise CkptdError("bytes that belong to no tensor", where=where)
        self._count(len(head))
        buffer = memoryview(bytearray(min(SEGMENT_BYTES, file.size)))
        for tensor, chunk in rows:
            self._try(self._chunk, tensor, chunk, buffer, of=file.of)

    def _chunk(self, tensor: Tensor, chunk: Chunk, buffer: memoryview) -> None:
        stored = self._checkpoint.files.chunk(tensor.name, chunk)
        for at in range(0, chunk.nbytes, SEGMENT_BYTES):
            part = buffer[: min(SEGMENT_BYTES, chunk.nbytes - at)]
            self._try(stored.read, at, part, of=self._manifest.files[chunk.file].of)
            self._count(len(part))
        if chunk.codec == ROWS:
            self._base(tensor, chunk)

    def _base(self, tensor: Tensor, chunk: Chunk) -> None:
        """Of rows that changed the whole ones, which are no chunk of this checkpoint; not of checkpoints that are trusted."""
        if self._trusted is None:
            return
        files = self._checkpoint.files
        place = files.rows_of(tensor.name, chunk)
        if place is None:
            return
        of = self._manifest.files[files.number_of(place.path)].of
        if of in self._trusted:
            return
        nbytes = rows.whole_of(chunk.box, ITEMSIZE[tensor.dtype])
        base = files.part_of(place.path, tensor.name, place.at, nbytes, place.block, alone=True)
        buffer = memoryview(bytearray(min(SEGMENT_BYTES, nbytes)))
        with contextlib.closing(base.reader):
            for at in range(0, nbytes, SEGMENT_BYTES):
                self._try(base.read, at, buffer[: min(SEGMENT_BYTES, nbytes - at)], of=of)


def _covered(tensor: Tensor, chunks: list[Chunk]) -> None:
    if tensor.rank is None:
        gaps = uncovered(Box.whole(tensor.shape), [chunk.box for chunk in chunks])
        if gaps:
            raise CkptdError(f"{tensor.name}: {gaps[0]} is in no file")


def _check_header(
    head: bytearray, file: m.DataFile, rows: list[tuple[Tensor, Chunk]], where: str
) -> None:
    """The safetensors header must say what the manifest says, and the chunks must fill the file."""
    try:
        entries: dict[str, Any] = json.loads(bytes(head[8:]))
        places = json.loads(entries.pop("__metadata__")["DCP_SHARDING_INFO"])
        found = {
            name: (row["dtype"], row["shape"], row["data_offsets"], places[name]["saved_offsets"])
            for name, row in entries.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CkptdError(f"not a safetensors header: {error!r}", where=where) from error
    wanted = {}
    if file.of is not None:  # there may be more in it than this checkpoint needs
        found = {tensor.name: found[tensor.name] for tensor, _ in rows if tensor.name in found}
    for tensor, chunk in rows:
        at = chunk.at - file.data_start
        wanted[tensor.name] = (tensor.dtype, [*chunk.sizes], [at, at + chunk.nbytes], [*chunk.offsets])
    if found != wanted:
        odd = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise CkptdError(f"header and manifest disagree about {', '.join(odd[:5])}", where=where)
