"""A file of torch.save: a zip with one pickle and the storages as they are, uncompressed (torch >= 1.6)."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from contextlib import closing
from typing import Any, BinaryIO

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.imports.stored import TORN, Place, Stored
from ckptd.imports.unpickle import PICKLE_BYTES_MAX, TensorRef, unpickle

_LOCAL = struct.Struct("<26xHH")  # of a zip's local header: the lengths of name and extra field
_MAGIC = b"PK\x03\x04"
CRC_STEP_BYTES = 1 << 20  # of a storage in memory while it is checked
AGAIN = "torch.load it where it was made, and torch.save it again with torch >= 1.6"


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, at: int, nbytes: int) -> None:
        self._file, self._at, self._nbytes, self._now = file, at, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._now = offset + (0, self._now, self._nbytes)[whence]
        return self._now

    def tell(self) -> int:
        return self._now

    def read(self, size: int = -1) -> bytes:
        left = max(self._nbytes - self._now, 0)
        self._file.seek(self._at + self._now)
        found = self._file.read(left if size < 0 else min(size, left))
        self._now += len(found)
        return found


def load(path: str, foreign: set[str], at: int = 0, nbytes: int | None = None) -> Any:
    """The saved value, each tensor as ``Stored``. at, nbytes: where the zip lies in the file. foreign: gets the names of classes
    that are not known. Raises CkptdError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size - at if nbytes is None else nbytes
            if at < 0 or size < 0 or at + size > os.fstat(file.fileno()).st_size:
                raise CkptdError(TORN, where=path)
            return _read(file, path, at, size, foreign)
    except (zipfile.BadZipFile, struct.error, EOFError) as error:
        raise CkptdError(f"{TORN} ({error})", where=path) from error
    except RecursionError as error:
        raise CkptdError("what it holds contains itself, or is nested too deep", where=path) from error
    except IsADirectoryError as error:
        hint = "--from dcp, hf, zero or universal, by what wrote it; of torch, name the file"
        raise CkptdError("a directory, and no file of torch.save", where=path, hint=hint) from error
    except OSError as error:
        raise CkptdError(f"cannot be read: {error.strerror or error}", where=path) from error


def check(data: bytes, where: str) -> None:
    """What torch.save packed, which is not looked into. Raises CkptdError: its bytes are not those that were written."""
    if not data.startswith(_MAGIC):
        return
    try:
        with closing(zipfile.ZipFile(io.BytesIO(data))) as archive:
            for info in archive.infolist():
                if info.CRC:
                    archive.read(info)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        hint = "take another copy of it, or an older one"
        raise CkptdError(f"damaged: {error}", where=where, hint=hint) from error


def _read(file: BinaryIO, path: str, at: int, size: int, foreign: set[str]) -> Any:
    file.seek(at)
    if file.read(len(_MAGIC)) != _MAGIC:
        raise CkptdError("no file of torch.save, or one of torch < 1.6", where=path, hint=AGAIN)
    with closing(zipfile.ZipFile(_Window(file, at, size))) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in entries:
            raise CkptdError("a zip, but none of torch.save: it has no data.pkl", where=path)
        places = _Places(file, path, at, entries)
        if "byteorder" in entries and places.read("byteorder") != b"little":
            raise CkptdError("its numbers are big-endian", where=path, hint=AGAIN)
        if entries["data.pkl"].file_size > PICKLE_BYTES_MAX:
            raise CkptdError(f"a pickle of {entries['data.pkl'].file_size} bytes", where=path)
        return places.filled(unpickle(places.read("data.pkl"), path, foreign))


class _Places:
    def __init__(self, file: BinaryIO, path: str, at: int, entries: dict[str, zipfile.ZipInfo]) -> None:
        self._file, self._path, self._at, self._entries = file, path, at, entries
        self._starts: dict[str, int] = {}

    def read(self, name: str) -> bytes:
        """All of an entry."""
        info = self._entries[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise CkptdError(f"{name} is compressed", where=self._path, hint=AGAIN)
        self._file.seek(self._start(info))
        return self._file.read(info.file_size)

    def filled(self, value: Any) -> Any:
        """The same with ``Stored`` for each tensor."""
        if isinstance(value, TensorRef):
            return self._stored(value)
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.filled, value))
        return value

    def _stored(self, ref: TensorRef) -> Stored:
        info = self._entries.get(f"data/{ref.storage.key}")
        item = ITEMSIZE[ref.dtype]
        if info is None or info.compress_type != zipfile.ZIP_STORED or len(ref.shape) != len(ref.strides):
            raise CkptdError(f"storage {ref.storage.key} is not there, or compressed", where=self._path, hint=AGAIN)
        steps, box = tuple(step * item for step in ref.strides), Box.whole(ref.shape)
        end = ref.offset * item + (sum((n - 1) * s for n, s in zip(ref.shape, steps, strict=True)) + item if box.volume else 0)
        if min(ref.offset, *ref.shape, *ref.strides, 0) < 0 or (box.volume and end > info.file_size):
            raise CkptdError("a tensor leaves its storage", where=self._path, hint="the file is damaged")
        place = Place(box, self._path, self._start(info) + ref.offset * item, steps, ref.dtype, ref.dtype)
        same = (self._path, place.at, ref.shape, steps) if box.volume else None
        return Stored(ref.dtype, ref.shape, (place,) if box.volume else (), same)

    def _start(self, info: zipfile.ZipInfo) -> int:
        if info.filename not in self._starts:
            self._file.seek(self._at + info.header_offset)
            name, extra = _LOCAL.unpack(self._file.read(_LOCAL.size))
            self._starts[info.filename] = self._at + info.header_offset + _LOCAL.size + name + extra
            self._check(info)
        return self._starts[info.filename]

    def _check(self, info: zipfile.ZipInfo) -> None:
        """Raises CkptdError: its bytes are not those that were written. 0: torch was told to write no sums, or no data."""
        left, found = info.file_size, 0
        self._file.seek(self._starts[info.filename])
        while info.CRC and left and (data := self._file.read(min(left, CRC_STEP_BYTES))):
            left, found = left - len(data), zlib.crc32(data, found)
        if info.CRC and (found != info.CRC or left):
            hint = "take another copy of it, or an older one"
            raise CkptdError(f"damaged: {info.filename} has another CRC than was written", where=self._path, hint=hint)
