"""Reading a committed checkpoint: any box of any tensor, every byte verified before it is handed out (P1, P9, P10)."""

from __future__ import annotations

import os
import threading
from functools import cached_property, partial
from itertools import pairwise
from types import TracebackType

import numpy as np

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box, contains, intersect, uncovered
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.catalogue import Catalogue, TensorEntry
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist import manifest as m
from ckptd.persist.again import twice
from ckptd.persist.cache import Cache
from ckptd.persist.encoding import EncodedChunk
from ckptd.persist.files import OpenFiles
from ckptd.persist.index import Chunk, Tensor
from ckptd.persist.lease import Lease
from ckptd.persist.manifest_file import read
from ckptd.persist.names import epoch_of_dir, step_dir, step_of_dir
from ckptd.persist.ranges import StoredChunk
from ckptd.persist.storage.base import NotFound, Storage
from ckptd.persist.strided import elements, extent, inside, slabs, window
from ckptd.persist.sums import FileDamage
from ckptd.thread_pool import ThreadPool, together

SEGMENT_BYTES = 8 << 20  # of a big contiguous read per thread and turn; also the scratch of a strided one
READER_THREADS = min(4, os.cpu_count() or 1)
assert SEGMENT_BYTES % BLOCK_BYTES == 0


class Checkpoint:
    """An open checkpoint. Methods may be called from several threads; ``close`` when done (it drops the reader's lease)."""

    def __init__(
        self, storage: Storage, directory: str, contents: m.Contents, lease: Lease | None = None, cache: Cache | None = None
    ) -> None:
        self.manifest, self.index = contents.manifest, contents.index
        self.directory = directory
        self.storage = storage
        self.files = OpenFiles(storage, directory, self.manifest, cache)
        self._lease = lease
        named = zip(self.index.names.keys, self.index.owners(), strict=True)
        self._tensors = {name: at for at, name in enumerate(named)}
        self._lock = threading.Lock()
        self._pool: ThreadPool | None = None

    @staticmethod
    def open(storage: Storage, job: str, snapshot: SnapshotId, cache: Cache | None = None) -> Checkpoint:
        """Holds a lease against retention. cache: what keeps the bytes that are read. Raises CkptdError: not there, damaged
        manifest (FileDamage), newer version."""
        directory = step_dir(job, snapshot)
        lease = Lease.take(storage, job, snapshot)
        try:
            return Checkpoint._at(storage, directory, lease, cache)
        except BaseException:
            lease.drop()
            raise

    @staticmethod
    def at(storage: Storage, directory: str) -> Checkpoint:
        """A checkpoint directory anywhere, without a lease."""
        return Checkpoint._at(storage, directory, None)

    @staticmethod
    def _at(storage: Storage, directory: str, lease: Lease | None, cache: Cache | None = None) -> Checkpoint:
        try:
            contents = twice(NotFound, partial(read, storage, directory))
        except NotFound as error:
            hint = "`ckptd ls` shows what there is"
            raise NotFound("no such checkpoint", where=error.where, hint=hint) from error
        _check_place(directory, contents.manifest.snapshot, storage.locate(directory))
        return Checkpoint(storage, directory, contents, lease, cache)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self.files.close()
        if self._lease is not None:
            self._lease.drop()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what is there ------------------------------------------------------------------------------------------
    def catalogue(self) -> Catalogue:
        keys = self.index.names.keys
        tensors = dict(zip(keys, self.index.entries(), strict=True))
        variants: dict[str, dict[int, TensorEntry]] = {}
        own: dict[str, list[int]] = {}
        if len(tensors) < len(keys):  # some are each rank's own
            tensors.update(reversed([*zip(keys, self.index.entries(), strict=True)]))  # the first of each key
            for key, entry, owner in zip(keys, self.index.entries(), self.index.owners(), strict=True):
                if tensors[key] != entry and owner is not None:
                    variants.setdefault(key, {})[owner] = entry
        for key, owner in zip(keys, self.index.owners(), strict=True):
            if owner is not None:
                own.setdefault(key, []).append(owner)
        world = self.manifest.world
        objects: dict[str, set[int]] = {}
        for ref in self.manifest.objects:
            objects.setdefault(ref.name, set()).update(range(world) if ref.ranks is None else ref.ranks)
        held = {name: tuple(sorted(ranks)) for name, ranks in objects.items()}
        per_rank = frozenset(self.manifest.per_rank)
        owners = {key: tuple(sorted(found)) for key, found in own.items()}
        return Catalogue(world, tensors, held, dict(self.manifest.aliases), per_rank, variants, owners)

    def tensor(self, key: str, owner: int | None) -> tuple[Tensor, list[Chunk]] | None:
        """What is stored under exactly this name, as the value of all ranks (None) or of one."""
        at = self._tensors.get((key, owner))
        return None if at is None else (self.index.tensor_at(at), self.index.chunks_at(at))

    def boxes(self, key: str, rank: int | None = None) -> list[Box]:
        """The stored boxes of a tensor; of a per-rank one those of ``rank``. Raises CkptdError: no such tensor."""
        return [chunk.box for chunk in self.index.chunks_at(self._tensor(key, rank))]

    def boxes_for(self, rank: int) -> BoxIndex:
        """Of all tensors, by key or alias; of a per-rank one those of ``rank``."""

        def number(key: str, dims: int) -> int | None:
            found = self._find(key, rank)
            return found if found is not None and self.index.dims[found] == dims else None

        return self._boxes.named(number)

    @cached_property
    def _boxes(self) -> BoxIndex:
        return BoxIndex(lambda key, dims: None, self.index.first, self.index.offsets, self.index.sizes)

    # --- bytes --------------------------------------------------------------------------------------------------
    def read(self, key: str, box: Box, dest: memoryview, rank: int | None = None) -> int:
        """Fill ``dest`` (the box, packed in C order) with verified bytes; so many came from the cache. Raises FileDamage,
        StorageError, CkptdError.

        After an error ``dest`` holds anything. rank: whose value, for a tensor that is each rank's own.
        """
        at = self._tensor(key, rank)
        tensor, chunks = self.index.tensor_at(at), self.index.chunks_at(at)
        item = ITEMSIZE[tensor.dtype]
        target = memoryview(dest).cast("B")
        if not contains(Box.whole(tensor.shape), box) or len(target) != box.volume * item:
            raise CkptdError(
                f"{box} into {len(target)} bytes does not fit {tensor.dtype}{list(tensor.shape)}", where=key
            )
        gaps = uncovered(box, [chunk.box for chunk in chunks])
        if gaps:
            raise CkptdError(f"{gaps[0]} is not in this checkpoint", where=f"{key} in {self.where}")
        if self._lease is not None:
            self._lease.refresh()
        known = 0
        for chunk in chunks:
            inner = intersect(chunk.box, box)
            if inner is not None:
                stored = self.files.chunk(tensor.name, chunk)
                found = EncodedChunk(stored, chunk.codec, tensor.dtype, chunk.box, self.files) if chunk.codec else stored
                known += self._read_part(found, chunk.box, inner, box, target, item)
        return known

    def object_bytes(self, name: str, rank: int | None = None) -> bytes:
        """A non-tensor value as it was captured; rank None: the one that is the same on all ranks that have it."""
        refs = [ref for ref in self.manifest.objects if ref.name == name]
        if rank is not None:
            refs = [ref for ref in refs if ref.ranks is None or rank in ref.ranks]
        if len(refs) != 1:
            text = (
                f"object {name} of rank {rank} is not there"
                if not refs
                else f"object {name} differs between ranks"
            )
            raise CkptdError(text, where=self.where, hint="name a rank of the snapshot's world")
        return self.files.blob(refs[0])

    def owner(self, key: str, rank: int | None) -> int | None:
        """Whose value ``read`` takes for this rank: None is everybody's. Raises CkptdError: no such tensor."""
        return self.index.tensor_at(self._tensor(key, rank)).rank

    def holder_of(self, file: m.DataFile) -> SnapshotId:
        """In whose directory it lies."""
        return file.of or SnapshotId(*self.manifest.snapshot.at)  # storage does not know grants

    @property
    def where(self) -> str:
        return self.storage.locate(self.directory)

    def _tensor(self, key: str, rank: int | None) -> int:
        found = self._find(key, rank)
        if found is None:
            owner = "" if rank is None else f" of rank {rank}"
            raise CkptdError(f"no tensor {key}{owner}", where=self.where)
        return found

    def _find(self, key: str, rank: int | None) -> int | None:
        for name in (key, self.manifest.aliases.get(key, key)):
            for whose in (None, rank):
                found = self._tensors.get((name, whose))
                if found is not None:
                    return found
        return None

    def _read_part(
        self, stored: StoredChunk | EncodedChunk, chunk: Box, inner: Box, box: Box, target: memoryview, item: int
    ) -> int:
        start, stop = extent(chunk, inner, item)
        to, end = extent(box, inner, item)
        nbytes = inner.volume * item
        if stop - start == nbytes == end - to:
            return self._read_run(stored, start, target[to:end])
        values = elements(np.frombuffer(target, np.uint8), box.sizes, item)
        known = 0
        for part in slabs(chunk, inner, item, SEGMENT_BYTES):
            start, stop = extent(chunk, part, item)
            scratch = np.empty(stop - start, np.uint8)
            if stored.read(start, scratch.data) == len(scratch):
                known += part.volume * item
            values[window(box, part)] = inside(scratch, chunk, part, item)
        return known

    def _read_run(self, stored: StoredChunk | EncodedChunk, start: int, dest: memoryview) -> int:
        """One contiguous range, by several threads when it is long. They meet at block borders: no block is read twice."""
        if len(dest) <= SEGMENT_BYTES or READER_THREADS == 1:
            return stored.read(start, dest)
        first = SEGMENT_BYTES - start % BLOCK_BYTES
        cuts = [0, *range(first, len(dest), SEGMENT_BYTES), len(dest)]
        reads = [partial(stored.read, start + at, dest[at:end]) for at, end in pairwise(cuts)]
        return sum(future.result() for future in together(self._workers(), reads))

    def _workers(self) -> ThreadPool:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPool(READER_THREADS - 1, "ckptd-read")  # and whoever reads
            return self._pool


def _check_place(directory: str, snapshot: SnapshotId, where: str) -> None:
    """Raises FileDamage: it lies under the name of another step, where it would be taken for that."""
    *_, epoch_name, step_name = "", "", *directory.split("/")
    epoch, step = epoch_of_dir(epoch_name), step_of_dir(step_name)
    if step is not None and (step != snapshot.step or epoch not in (None, snapshot.epoch)):
        text = f"it is step {snapshot.step} of epoch {snapshot.epoch}, under the name of another"
        raise FileDamage(text, where=where)
