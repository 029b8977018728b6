"""The commit record and its index as files: typed, checksummed, versioned; never executed (docs/FORMAT.md sections 3 and 4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord
from ckptd.persist.again import twice
from ckptd.persist.index import INDEX_BYTES_MAX, Chunk, Index, Tensor, decode_index
from ckptd.persist.manifest import FORMAT, VERSION, Contents, Manifest, check
from ckptd.persist.names import INDEX, MANIFEST
from ckptd.persist.storage.base import NotFound, Storage, read_file
from ckptd.persist.sums import FileDamage, digest

MANIFEST_BYTES_MAX = 1 << 30
_NO_SUM = b"0" * 32
_SUM = re.compile(rb'"xxh3_128":"([0-9a-f]{32})"')
_SUM_WITHIN_BYTES = (
    256  # of the file's start; format, version and checksum stand there in every version to come
)

T = TypeVar("T")


class _Head(msgspec.Struct):
    format: str
    version: int


class _Lineage(msgspec.Struct):
    epoch: EpochRecord


class _Tensor1(msgspec.Struct):
    key: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    chunks: list[Chunk]
    rank: int | None


class _Version1(msgspec.Struct):
    """What format version 1 has beyond what is read as a Manifest: its chunks, and no index."""

    tensors: list[_Tensor1]


def encode(contents: Contents) -> dict[str, bytes]:
    """Name -> bytes of the manifest and its index, with all checksums filled in. CkptdError: larger than what is read."""
    data, index = contents.index.encode(INDEX)
    changes = {"xxh3_128": _NO_SUM.decode(), "names": contents.index.names, "index": index}
    manifest = msgspec.structs.replace(contents.manifest, **changes)
    blank = msgspec.json.encode(manifest) + b"\n"
    found = _SUM.search(blank, 0, _SUM_WITHIN_BYTES)
    assert found, "the checksum stands near the start"
    at = found.start(1)
    if len(blank) > MANIFEST_BYTES_MAX or len(data) > INDEX_BYTES_MAX:
        raise CkptdError(f"a manifest of {len(blank)} bytes and an index of {len(data)} are more than what is read")
    return {MANIFEST: blank[:at] + digest(blank).hex().encode() + blank[at + len(_NO_SUM) :], INDEX: data}


def read(storage: Storage, directory: str) -> Contents:
    """Raises NotFound: there is no manifest; CkptdError: another format or a newer version; FileDamage, StorageError. What is
    damaged is read once more: it may be what a network did to it."""
    return twice(FileDamage, partial(_read, storage, directory))


def _read(storage: Storage, directory: str) -> Contents:
    path = f"{directory}/{MANIFEST}" if directory else MANIFEST

    def index() -> bytes:
        place = path.removesuffix(MANIFEST) + INDEX
        try:
            return read_file(storage, place, INDEX_BYTES_MAX)
        except NotFound as error:
            raise FileDamage("the index of the checkpoint is missing", where=storage.locate(place)) from error

    return decode(read_file(storage, path, MANIFEST_BYTES_MAX), index, storage.locate(path))


def decode(data: bytes, index: Callable[[], bytes], where: str) -> Contents:
    """index: reads its file, which version 1 does not have. Raises as ``read``, and what ``index`` raises."""
    version = _check_head(data, where).version
    manifest = _typed(Manifest, data, where)
    try:
        if version == 1:
            found = _version_1(data, where)
        elif manifest.index is None or manifest.names is None:
            raise ValueError("it names no index")
        else:
            found = decode_index(index(), manifest.index, manifest.names, where.removesuffix(MANIFEST) + INDEX)
        check(Contents(manifest, found))
    except ValueError as error:
        raise FileDamage(f"damaged manifest: {error}", where=where) from error
    return Contents(manifest, found)


def _version_1(data: bytes, where: str) -> Index:
    tensors = _typed(_Version1, data, where).tensors
    return Index.of([(Tensor(t.key, t.dtype, t.shape, t.role, t.rank), t.chunks) for t in tensors])


def lineage(storage: Storage, directory: str) -> EpochRecord:
    """Of a checkpoint, from its manifest alone. Raises as ``read``."""
    path = f"{directory}/{MANIFEST}"
    data, where = read_file(storage, path, MANIFEST_BYTES_MAX), storage.locate(path)
    _check_head(data, where)
    return _typed(_Lineage, data, where).epoch


def _check_head(data: bytes, where: str) -> _Head:
    """Ours, whole, and of a version that we know."""
    head = _typed(_Head, data, where)
    if head.format != FORMAT:
        raise CkptdError(f"not a ckptd checkpoint but {head.format!r}", where=where)
    found = _SUM.search(data, 0, _SUM_WITHIN_BYTES)
    blank = b"" if found is None else data[: found.start(1)] + _NO_SUM + data[found.end(1) :]
    if found is None or digest(blank).hex().encode() != found[1]:
        raise FileDamage("damaged manifest: its checksum does not match", where=where)
    if not 1 <= head.version <= VERSION:
        text = f"the checkpoint has format version {head.version}, this ckptd reads up to {VERSION}"
        raise CkptdError(text, where=where, hint="upgrade ckptd on this node")
    return head


def _typed(kind: type[T], data: bytes, where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileDamage(f"damaged manifest: {error}", where=where) from error
