"""What did not change since an older checkpoint of the job is not written again: the new one names where it lies (D22).

A frozen base model, experts that saw no token, rows of an embedding that nobody looked up. A chunk is compared by the checksums of
its blocks, not by its bytes: those of memory were made at the capture, those of storage when it was written. What lies in a third
checkpoint already is named there: no reader goes further than one hop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.retention import doubted
from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist.commits import list_commits
from ckptd.persist.index import RAW, Chunk
from ckptd.persist.names import step_dir, writer_of
from ckptd.persist.pieces import OutChunk, Source
from ckptd.persist.reader import Checkpoint
from ckptd.persist.report import KeptFile, WrittenChunk, kept_file
from ckptd.persist.storage.base import NotFound, Storage, StorageError
from ckptd.persist.stream import fill_range
from ckptd.persist.sums import SUM_BYTES, FileDamage, block_count, digest

# Of what each writer of a checkpoint wrote of it on average. Who needs less than that of it writes it again: a single number that
# never changes would keep a whole checkpoint from going.
KEPT_SHARE_MIN = 0.1

log = logging.getLogger("ckptd")


def unchanged(
    storage: Storage, job: str, snapshot: SnapshotId, chunks: Sequence[OutChunk], check: Callable[[], None]
) -> tuple[list[OutChunk], list[KeptFile]]:
    """(what is to be written, what lies in older checkpoints) of chunks as they would be written. ``check`` is called before each,
    and raises to stop. Raises SlotDamage, StorageError; where no older checkpoint can be read, all is to be written."""
    checkpoint, without = newest_before(storage, job, snapshot)
    if checkpoint is None:
        return list(chunks), []
    with checkpoint:
        try:
            return _Comparison(checkpoint, without, check).split(chunks)
        except FileDamage as error:
            log.warning("job=%s step %d is written whole, not only what changed: %s", job, snapshot.step, error)
            return list(chunks), []


def newest_before(storage: Storage, job: str, snapshot: SnapshotId) -> tuple[Checkpoint | None, Collection[SnapshotId]]:
    """The newest older checkpoint, open, and which ones are not counted on. Not one that came before this one, though it is newer:
    it may go, and this one stay. Raises StorageError."""
    commits = list_commits(storage, job)
    without = doubted(commits)
    older = [info.snapshot for info in commits if info.snapshot not in without and info.snapshot.at < snapshot.at]
    return _opened(storage, step_dir(job, older[-1])) if older else None, without


def _opened(storage: Storage, directory: str) -> Checkpoint | None:
    """None: it went just now, is damaged, or was written by a version that this one does not know."""
    try:
        return Checkpoint.at(storage, directory)
    except StorageError as error:
        if isinstance(error, NotFound):
            return None
        raise
    except CkptdError as error:
        log.warning("all of the next checkpoint is written, not only what changed: %s", error)
        return None


class _Comparison:
    def __init__(self, checkpoint: Checkpoint, without: Collection[SnapshotId], check: Callable[[], None]) -> None:
        """without: checkpoints that are not counted on."""
        self._checkpoint, self._manifest, self._without, self._check = checkpoint, checkpoint.manifest, without, check
        self._block = bytearray(BLOCK_BYTES)

    def split(self, chunks: Sequence[OutChunk]) -> tuple[list[OutChunk], list[KeptFile]]:
        found = [(chunk, self._find(chunk)) for chunk in chunks]
        worth = self._worth([its for _, its in found if its is not None])
        rows: dict[int, list[WrittenChunk]] = {}
        changed = []
        for chunk, its in found:
            if its is not None and self._lies_in(its) in worth:
                rows.setdefault(its.file, []).append(chunk.row(its.at, its.block))
            else:
                changed.append(chunk)
        for number in rows:  # FileDamage: it is not there any more
            self._checkpoint.files.data(number)
            self._checkpoint.files.done(number)
        files = ((self._manifest.files[number], of_it) for number, of_it in sorted(rows.items()))
        return changed, [kept_file(self._checkpoint.holder_of(file), self._manifest, file, of_it) for file, of_it in files]

    def _find(self, chunk: OutChunk) -> Chunk | None:
        """Where the same bytes lie as the same box of the same tensor."""
        self._check()
        tensor = self._checkpoint.tensor(chunk.key, chunk.rank)
        if tensor is None or not chunk.nbytes:
            return None
        facts, stored = tensor
        if (facts.dtype, facts.shape) != (chunk.dtype, chunk.shape):
            return None
        its = next((one for one in stored if one.box == chunk.box and one.codec == RAW), None)
        return its if its is not None and self._same(chunk, its) else None

    def _same(self, chunk: OutChunk, its: Chunk) -> bool:
        sums = self._checkpoint.files.sums(its.file)[its.block * SUM_BYTES : (its.block + block_count(its.nbytes)) * SUM_BYTES]
        for source in chunk.sources:
            if isinstance(source, Source) and source.box == chunk.box:
                return source.sums == sums
        # Of several sources: block by block, as nearly all that changed differs in the first one already.
        for block, at in enumerate(range(0, chunk.nbytes, BLOCK_BYTES)):
            end = min(at + BLOCK_BYTES, chunk.nbytes)
            view = memoryview(self._block)[: end - at]
            fill_range(chunk, at // chunk.itemsize, end // chunk.itemsize, view)
            if digest(view) != sums[block * SUM_BYTES : (block + 1) * SUM_BYTES]:
                return False
        return True

    def _lies_in(self, its: Chunk) -> SnapshotId:
        return self._checkpoint.holder_of(self._manifest.files[its.file])

    def _worth(self, found: Sequence[Chunk]) -> set[SnapshotId]:
        """Checkpoints of which this writer needs so much that they may stay for it."""
        needed: Counter[SnapshotId] = Counter()
        for its in found:
            needed[self._lies_in(its)] += its.nbytes
        worth = set()
        for of, nbytes in needed.items():
            if of in self._without:
                continue
            theirs = [file for file in self._manifest.files if self._checkpoint.holder_of(file) == of]
            writers = {writer_of(file.path) for file in theirs}
            if nbytes * len(writers) >= KEPT_SHARE_MIN * sum(file.size for file in theirs):
                worth.add(of)
        return worth
