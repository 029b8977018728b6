"""Files of an object store: multipart uploads with a bounded number of parts in memory, reads by ranges."""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore

from ckptd.persist.again import twice
from ckptd.persist.storage.base import NotFound, StorageError, SyncFailed
from ckptd.persist.storage.object_errors import store_error
from ckptd.persist.storage.object_pointer import write_once
from ckptd.persist.storage.object_windows import Windows

if TYPE_CHECKING:
    from ckptd.persist.storage.object_service import Service

PART_BYTES = 8 << 20  # of a multipart upload; stores take 10,000 of them, at least 5 MiB each
SPAN_BYTES = 8 << 20  # of one request of a long read
ALONE_BYTES = 1 << 20  # from which on what is read is all that is asked for
PARTS_AT_ONCE = 4  # of one file under way; one more is being filled


class ObjectWriter:
    """A file of at most one part is one conditional PUT. Of a larger one each part is sent when it is full, so that memory is
    bounded by (PARTS_AT_ONCE + 2) * PART_BYTES; the store shows it when the upload is completed, whole."""

    def __init__(self, store: Service, key: str, where: str) -> None:
        self._store, self._key, self._where = store, key, where
        self._part = np.empty(PART_BYTES, np.uint8)
        self._lent: list[tuple[memoryview, np.ndarray[Any, np.dtype[np.uint8]]]] = []  # parts that are being sent
        self._sent = self._fill = 0
        self._upload: obstore.WritableFile | None = None
        self._failed = False

    @property
    def position(self) -> int:
        return self._sent + self._fill

    def space(self) -> memoryview:
        return self._part[self._fill :].data

    def advance(self, nbytes: int) -> None:
        self._fill += nbytes
        assert self._fill <= PART_BYTES, "advance() beyond space()"
        if self._fill == PART_BYTES:
            self._send()

    def write(self, data: bytes | memoryview) -> None:
        """A copy: the upload holds on to a part, and what it was made from may be a slot that is given up meanwhile."""
        source = np.frombuffer(data, np.uint8)
        done = 0
        while done < len(source):
            count = min(len(source) - done, PART_BYTES - self._fill)
            np.copyto(self._part[self._fill : self._fill + count], source[done : done + count])
            self.advance(count)
            done += count

    def finish(self) -> int:
        """A failure is final for this file (P11): whether the store has it, nobody knows. Of one PUT its token tells, where
        only the answer was lost: without it a storm of late errors would cost every attempt."""
        self._check()
        try:
            if self._upload is None:
                if not write_once(self._store, self._key, self._part[: self._fill].data, self._where):
                    raise StorageError("the name was taken meanwhile", where=self._where, errno=errno.EEXIST)
            else:
                if self._fill:
                    self._upload.write(self._part[: self._fill].data)
                self._upload.close()
                self._upload = None
        except Exception as error:
            self._failed = True
            found = store_error(error, "finish the upload", self._where)
            raise SyncFailed(found.what, where=found.where, hint=found.hint, errno=found.errno) from error
        finally:
            self.abort()
        return self.position

    def abort(self) -> None:
        """The store forgets the parts. Where it cannot be reached a rule of the bucket deletes them (docs/OPERATIONS.md)."""
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(Exception):
                upload.__exit__(StorageError, None, None)

    def _send(self) -> None:
        self._check()
        try:
            if self._upload is None:
                self._upload = obstore.open_writer(
                    self._store, self._key, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
                )
            lent = self._part.data
            self._upload.write(lent)
            self._lent.append((lent, self._part))
        except Exception as error:
            self._failed = True
            raise store_error(error, "upload", self._where) from error
        self._sent += self._fill
        self._part, self._fill = self._free_part(), 0

    def _free_part(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """One that was sent, if there is any: the first touch of memory may take longer than sending it."""
        for at, (lent, part) in enumerate(self._lent):
            with suppress(BufferError):  # the upload holds on to it
                lent.release()
                del self._lent[at]
                return part
        return np.empty(PART_BYTES, np.uint8)

    def _check(self) -> None:
        if self._failed:
            raise StorageError("an earlier part of the file could not be sent", where=self._where, errno=errno.EIO)


class ObjectReader:
    at_once = SPAN_BYTES

    def __init__(self, store: Service, key: str, where: str, size: int, windows: Windows) -> None:
        self._store, self._key, self._where, self._size = store, key, where, size
        self._windows, self._number = windows, windows.reader()

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, at: int, dest: memoryview) -> None:
        if not dest:
            return
        if at + len(dest) > self._size:
            raise StorageError(f"the file ends at byte {self._size}", where=self._where)
        if len(dest) < ALONE_BYTES:
            self._windows.read_into(self._number, self._fetch, self._size, at, dest)
        else:
            np.copyto(np.frombuffer(dest, np.uint8), np.frombuffer(self._fetch(at, len(dest)), np.uint8))

    def _fetch(self, at: int, nbytes: int) -> memoryview:
        return twice(NotFound, partial(self._range, at, nbytes))  # it was there when it was opened

    def _range(self, at: int, nbytes: int) -> memoryview:
        try:
            found = obstore.get_range(self._store, self._key, start=at, length=nbytes)
        except Exception as error:
            raise store_error(error, "read", self._where) from error
        if len(found) != nbytes:
            raise StorageError(f"the store sent {len(found)} bytes of {nbytes}", where=self._where, errno=errno.EIO)
        return memoryview(found)

    def close(self) -> None:
        self._windows.drop(self._number)
