"""The files of an open checkpoint: data files are opened when first used, sums read and checked once.

What is missing or not what was written is asked for once more: a store, or the way to it, may have been wrong once.
"""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial

from ckptd.core.errors import CkptdError
from ckptd.persist import manifest as m
from ckptd.persist import rows
from ckptd.persist.again import twice
from ckptd.persist.cache import Cache, CachedFile
from ckptd.persist.index import Chunk
from ckptd.persist.names import is_job, step_dir
from ckptd.persist.ranges import StoredChunk
from ckptd.persist.storage.base import FileReader, NotFound, Storage
from ckptd.persist.sums import SUM_BYTES, FileDamage, block_count, digest

HINT = "`ckptd verify` names all damage; another copy or an older checkpoint serves the restore"
SHARED = (
    "all checkpoints with files there share it. Put back a copy of the file; or run `ckptd verify` on this one, which marks it: "
    "a job that still runs then writes all of it anew with its next durable step"
)


class OpenFiles:
    def __init__(self, storage: Storage, directory: str, manifest: m.Manifest, cache: Cache | None = None) -> None:
        self._storage, self._directory, self._manifest, self._cache = storage, directory, manifest, cache
        self._lock = threading.Lock()
        self._readers: dict[str, FileReader] = {}
        self._cached: dict[int, CachedFile] = {}
        self._sums: dict[int, bytes] = {}
        self._numbers: dict[str, int] = {}

    def where(self, file: m.DataFile | m.SideFile) -> str:
        return self._storage.locate(self._path(file))

    def _path(self, file: m.DataFile | m.SideFile) -> str:
        """It may lie in another checkpoint of the job: what did not change is written once."""
        directory = self._directory
        if file.of is not None:
            job = directory.rpartition("/")[0].rpartition("/")[0]
            if not is_job(job):
                hint = "open this checkpoint below its storage root"
                raise CkptdError(f"{file.path} lies in the checkpoint of {file.of}", where=directory, hint=hint)
            directory = step_dir(job, file.of)
        return f"{directory}/{file.path}" if directory else file.path

    def data(self, index: int) -> FileReader:
        """Raises FileDamage when the file is missing or has another size."""
        file = self._manifest.files[index]
        path = self._path(file)
        with self._lock:
            reader = self._readers.get(path)
            if reader is None:
                reader = self._readers[path] = self._open(path, file.size, _hint(file))
            return reader

    def done(self, index: int) -> None:
        """Nobody reads this data file just now. There may be more of them than descriptors."""
        with self._lock:
            reader = self._readers.pop(self._path(self._manifest.files[index]), None)
        if reader is not None:
            reader.close()

    def side(self, index: int) -> FileReader:
        """The caller closes it: of most of them little is read, once."""
        side = self._manifest.sides[index]
        return self._open(self._path(side), side.size, _hint(side))

    def chunk(self, name: str, chunk: Chunk, *, alone: bool = False) -> StoredChunk:
        """Everything needed to read ranges of a chunk. alone: its reader is the caller's to close, and nobody else's."""
        sums = self.sums(chunk.file)[
            chunk.block * SUM_BYTES : (chunk.block + block_count(chunk.nbytes)) * SUM_BYTES
        ]
        file = self._manifest.files[chunk.file]
        anew = partial(self._open, self._path(file), file.size, _hint(file))
        place = self.where(file), name, chunk.at, chunk.nbytes
        return StoredChunk(anew() if alone else self.data(chunk.file), anew, *place, sums, _hint(file), self._kept(chunk.file))

    def number_of(self, path: str) -> int:
        """Of a data file. Raises FileDamage: the manifest names none of this path."""
        with self._lock:
            if not self._numbers:
                self._numbers = {file.path: number for number, file in enumerate(self._manifest.files)}
            number = self._numbers.get(path)
        if number is None:
            raise FileDamage(f"rows of {path}, which the manifest does not name", where=self._storage.locate(self._directory))
        return number

    def rows_of(self, name: str, chunk: Chunk) -> rows.Place | None:
        """Where that whole lies of which a chunk has the rows that changed; None: it is whole. Raises FileDamage."""
        stored, head = self.chunk(name, chunk), memoryview(bytearray(min(chunk.nbytes, rows.HEAD_BYTES_MAX)))
        stored.read(0, head)
        try:
            return rows.place_in(head)
        except ValueError as error:
            raise FileDamage(f"{name}: {error}", where=stored.where) from error

    def part_of(self, path: str, name: str, at: int, nbytes: int, block: int, *, alone: bool = False) -> StoredChunk:
        """Bytes of a file that are no chunk of this checkpoint; ``alone`` as of a chunk. Raises FileDamage: it has not so many."""
        number = self.number_of(path)
        file = self._manifest.files[number]
        if at + nbytes > file.size or block + block_count(nbytes) > file.blocks:
            raise FileDamage(f"rows beyond the end of {path}", where=self.where(file), hint=_hint(file))
        return self.chunk(name, Chunk(number, at, nbytes, block, (), ()), alone=alone)

    def _kept(self, index: int) -> CachedFile | None:
        """Its copy in the cache, if there is one."""
        if self._cache is None:
            return None
        with self._lock:
            if index not in self._cached:
                self._cached[index] = self._cache.open(self.where(self._manifest.files[index]))
            return self._cached[index]

    def sums(self, index: int) -> bytes:
        """The block sums of a data file, 16 bytes each."""
        with self._lock:
            found = self._sums.get(index)
        if found is None:
            file = self._manifest.files[index]
            found = self.checked(
                file.side, file.sums_at, file.blocks * SUM_BYTES, file.sums_sum, f"sums of {file.path}"
            )
            with self._lock:
                self._sums[index] = found
        return found

    def blob(self, ref: m.ObjectRef) -> bytes:
        return self.checked(ref.side, ref.at, ref.nbytes, ref.sum, f"object {ref.name}")

    def checked(self, side: int, at: int, nbytes: int, expected: str, what: str) -> bytes:
        """Bytes of a side file that must match their checksum. Raises FileDamage."""
        return twice(FileDamage, partial(self._checked, side, at, nbytes, expected, what))

    def _checked(self, side: int, at: int, nbytes: int, expected: str, what: str) -> bytes:
        where, hint = self.where(self._manifest.sides[side]), _hint(self._manifest.sides[side])
        with closing(self.side(side)) as reader:
            if at < 0 or nbytes < 0 or at + nbytes > reader.size:
                raise FileDamage(f"the {what} leave the side file", where=where, hint=hint)
            data = bytearray(nbytes)
            reader.read_into(at, memoryview(data))
        if digest(data).hex() != expected:
            raise FileDamage(f"damaged {what}", where=where, hint=hint)
        return bytes(data)

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
            for cached in self._cached.values():
                cached.close()
            self._cached.clear()

    def _open(self, path: str, size: int, hint: str) -> FileReader:
        where = self._storage.locate(path)
        try:
            reader = twice(NotFound, partial(self._storage.open, path))
        except NotFound as error:
            raise FileDamage("a file of the checkpoint is missing", where=where, hint=hint) from error
        if reader.size != size:
            found = reader.size
            reader.close()
            kind = "truncated" if found < size else "not ours"
            raise FileDamage(f"{found} bytes instead of {size}: the file is {kind}", where=where, hint=hint)
        return reader


def _hint(file: m.DataFile | m.SideFile) -> str:
    return HINT if file.of is None else SHARED
