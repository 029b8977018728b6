"""``ckptd export --to ckptd``: the same checkpoint below another storage root, whole and without what it needs of others; with
``--quantize`` some tensors as near as a few bits per value come (Check-N-Run, section 5.2)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from ckptd.choices import Share
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box, merge
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist import parts as p
from ckptd.persist.assemble import copied
from ckptd.persist.commit import check_report, commit_made
from ckptd.persist.encoding import bytes_to_be
from ckptd.persist.index import QUANTIZED, Tensor
from ckptd.persist.lineage import copy_claim
from ckptd.persist.manifest import Contents
from ckptd.persist.manifest_file import read
from ckptd.persist.names import attempt_dir, step_dir
from ckptd.persist.pieces import ObjectBlob, OutChunk
from ckptd.persist.quantized import Quantizer
from ckptd.persist.reader import Checkpoint
from ckptd.persist.report import REPORT_VERSION, decode
from ckptd.persist.storage.base import NotFound, Storage
from ckptd.persist.strided import Elements, elements

NODE = "copy"  # stands for the node that wrote it


class Copied(NamedTuple):
    """written, reused: bytes of tensors, by this process and by who wrote parts of the same copy before. notes: what was lost."""

    path: str
    written: int
    reused: int
    notes: list[str]


@dataclass(frozen=True)
class _Stored:
    """A box of a tensor as a writer's source."""

    checkpoint: Checkpoint
    tensor: Tensor
    box: Box

    def values(self, inner: Box) -> Elements:
        item = ITEMSIZE[self.tensor.dtype]
        data = np.empty(inner.volume * item, np.uint8)
        self.checkpoint.read(self.tensor.key, inner, data.data, self.tensor.rank)
        return elements(data, inner.sizes, item)


class Copy:
    """What is to be written, before anything is. nbytes: of all tensors; stored: about what they will be there. Raises CkptdError:
    a pattern fits nothing that can be quantised."""

    def __init__(self, checkpoint: Checkpoint, quantizer: Quantizer) -> None:
        self._checkpoint, self._quantizer, self._manifest = checkpoint, quantizer, checkpoint.manifest
        tensors = [*checkpoint.index.tensors()]
        for pattern in quantizer.wanted:
            alone = Quantizer({pattern: quantizer.wanted[pattern]})
            if all(alone.bits(tensor.key, tensor.dtype) is None for tensor in tensors):
                hint = "a pattern is of a whole key, as `ckptd ls --tensors` shows it; F32, BF16 and F16 can be quantised"
                raise CkptdError(f"fits no tensor that can be quantised: {pattern}", where="--quantize", hint=hint)
        chunks = [chunk for at, found in enumerate(tensors) for chunk in self._chunks(at, found)]
        self._parts: list[p.Part] = p.parts_of(chunks, NODE)
        self.stored = sum(bytes_to_be(chunk, quantizer) for chunk in chunks)
        self.tensors, self.nbytes = len(tensors), sum(part.nbytes for part in self._parts)

    def write(self, storage: Storage, share: Share | None, progress: p.Progress, cancelled: threading.Event) -> Copied:
        """Raises CkptdError: it is there already, or anything that storage has against it."""
        job, snapshot, quantizer = self._manifest.job, SnapshotId(*self._manifest.snapshot.at), self._quantizer
        directory = step_dir(job, snapshot)
        path = storage.locate(directory)  # of a store before it says in which attempt
        with suppress(NotFound):
            read(storage, directory)
            raise CkptdError("it is there already", where=path, hint="name another root, or delete it first")
        how = [REPORT_VERSION, p.PART_BYTES, self._manifest.xxh3_128, *quantizer.wanted.items()]
        attempt = f"{NODE}-{xxhash.xxh3_64_hexdigest(msgspec.json.encode(how))}"
        made = p.Attempt(storage, job, snapshot, attempt, NODE, cancelled)
        mine = self._parts if share is None else share.among(self._parts)
        made.write(mine, progress, quantizer=quantizer)
        if share is None:
            reports = made.whole(self._parts, self._objects())
            if not copy_claim(storage, job, self._manifest.epoch):
                raise CkptdError(f"another run of this job has epoch {snapshot.epoch} there", where=storage.locate(job))
            self._commit(storage, attempt, directory, reports)
            made.committed()
        notes = quantizer.notes()
        if quantizer.wanted and made.reused:
            notes.append("of the parts that were there, what it cost was said when they were written")
        return Copied(path, made.written, made.reused, notes)

    def _commit(self, storage: Storage, attempt: str, pointer: str, reports: Sequence[bytes]) -> None:
        directory = attempt_dir(self._manifest.job, self._manifest.snapshot, attempt)
        decoded = [decode(report) for report in reports]
        rows = (row for report in decoded for file in report.files for row in file.chunks)
        patterns = {self._quantizer.pattern(row.key) for row in rows if row.codec == QUANTIZED}
        lossy = [f"{pattern}={bits}" for pattern, bits in self._quantizer.wanted.items() if pattern in patterns]

        def contents() -> Contents:
            made = copied(Contents(self._manifest, self._checkpoint.index), decoded, attempt, lossy)
            for report in decoded:
                check_report(storage, directory, report)
            return made

        commit_made(storage, directory, pointer, contents, self._manifest.keep)

    def _chunks(self, at: int, tensor: Tensor) -> list[OutChunk]:
        """One box, whoever wrote parts of it; of what a rank had for itself as few as may be."""
        facts = tensor.key, tensor.rank, tensor.dtype, tensor.shape, tensor.role
        boxes = [Box.whole(tensor.shape)]
        if tensor.rank is not None:
            found = [chunk.box for chunk in self._checkpoint.index.chunks_at(at)]
            boxes = merge([box for box in found if box.volume]) or found[:1]
        return [OutChunk(*facts, box, (_Stored(self._checkpoint, tensor, box),)) for box in boxes]

    def _objects(self) -> list[ObjectBlob]:
        world, blob = range(self._manifest.world), self._checkpoint.files.blob
        found = ((ref, blob(ref)) for ref in self._manifest.objects)
        return [ObjectBlob(rank, ref.name, data) for ref, data in found for rank in (world if ref.ranks is None else ref.ranks)]
