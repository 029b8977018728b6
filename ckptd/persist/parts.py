"""A checkpoint that no job writes, an import or a copy, is written in parts, with each writer's report beside it in its attempt.

Who names the attempt after what is written, and writes the same again, after a kill or in another process, goes on from the parts
that are there. Of two who write one part the first report counts, so that all who commit the attempt commit the same files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ckptd.core.ids import SnapshotId
from ckptd.persist.encoding import bytes_to_be
from ckptd.persist.names import attempt_dir
from ckptd.persist.packing import FILE_BYTES_MAX, cut
from ckptd.persist.part_reports import Reports
from ckptd.persist.pieces import ObjectBlob, OutChunk
from ckptd.persist.quantized import Quantizer
from ckptd.persist.storage.base import Storage
from ckptd.persist.writer import Cancelled, check_room, write_chunks

PART_BYTES = FILE_BYTES_MAX  # what a kill may cost
Progress = Callable[[int, int], None]


class Part(NamedTuple):
    """Of all tensors: from the byte ``at`` on, in files of its own."""

    name: str
    chunks: list[OutChunk]
    at: int
    nbytes: int

    def made(self) -> tuple[list[OutChunk], list[ObjectBlob]]:
        return self.chunks, []


def parts_of(chunks: Sequence[OutChunk], name: str) -> list[Part]:
    groups: list[list[OutChunk]] = [[]]
    nbytes = 0
    for chunk in cut(chunks, PART_BYTES):
        if groups[-1] and nbytes + chunk.nbytes > PART_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(chunk)
        nbytes += chunk.nbytes
    sizes = [sum(chunk.nbytes for chunk in group) for group in groups]
    places = accumulate(sizes, initial=0)
    return [Part(f"{name}-{number:05d}", *found) for number, found in enumerate(zip(groups, places, sizes, strict=False))]


class Attempt:
    """written, reused: bytes of tensors, by this process and by who wrote parts of the same before."""

    def __init__(
        self, storage: Storage, job: str, snapshot: SnapshotId, attempt: str, name: str, cancelled: threading.Event
    ) -> None:
        """name: stands for the node that wrote it."""
        self._storage, self._name, self._cancelled = storage, name, cancelled
        self._place = storage, job, snapshot, attempt
        self._reports = Reports(storage, attempt_dir(job, snapshot, attempt))
        self.written = self.reused = 0

    def write(
        self,
        mine: list[Part],
        progress: Progress,
        *,
        compress: bool = False,
        quantizer: Quantizer | None = None,
    ) -> None:
        """mine: of all parts those of this process. What an earlier try wrote is read back. Raises CkptdError; the parts that are
        there stay for the next try."""
        wanted = sum(part.nbytes for part in mine)
        for part in mine:
            if self._cancelled.is_set():
                raise Cancelled("it was cancelled", where=self._place[1], hint="the same again goes on")
            if self._reports.find(part.name):
                self.reused += part.nbytes
                progress(self.reused, wanted)
        left = (chunk for part in mine if part.name not in self._reports.found for chunk in part.chunks)
        check_room(self._storage, sum(bytes_to_be(chunk, quantizer) for chunk in left), self._reports.directory)
        for part in mine:
            if part.name not in self._reports.found:
                told = _further(progress, self.reused + self.written, wanted)
                report = write_chunks(
                    *self._place, part.name, part.made, [], self._cancelled, told, compress=compress, quantizer=quantizer
                )
                self._reports.add(part.name, report)
                self.written += part.nbytes

    def whole(self, parts: list[Part], objects: list[ObjectBlob]) -> list[bytes]:
        """The reports of all parts, and of the objects, which are written now."""
        if not self._reports.find(self._name):
            ranks = sorted({blob.rank for blob in objects})
            report = write_chunks(*self._place, self._name, lambda: ([], objects), ranks, self._cancelled)
            self._reports.add(self._name, report)
        return [self._reports.found[name] for name in (*(part.name for part in parts), self._name)]

    def committed(self) -> None:
        """Nobody needs to go on with it any more."""
        self._reports.forget()


def _further(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)
