"""``manifest.json``, the commit record (docs/FORMAT.md). Typed, checksummed, versioned; never executed."""

from __future__ import annotations

import re

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.core.state_map.layout_check import WORLD_MAX
from ckptd.persist.names import DATA, SIDE
from ckptd.persist.sums import FileDamage, block_count, digest

FORMAT = "ckptd-checkpoint"
VERSION = 1
MANIFEST_BYTES_MAX = 1 << 30
_NO_SUM = b"0" * 32
_SUM = re.compile(rb'"xxh3_128":"([0-9a-f]{32})"')
_HEX = re.compile(r"[0-9a-f]{32}")
_SUM_WITHIN_BYTES = (
    256  # of the file's start; format, version and checksum stand there in every version to come
)


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """One box of a tensor in one file, C order. ``block``: index of its first block among the file's sums."""

    file: int
    at: int
    nbytes: int
    block: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class Tensor(msgspec.Struct, frozen=True):
    """rank: whose own value this is when the ranks differed in this snapshot, else None (one logical tensor)."""

    key: str
    name: str  # in the headers of the data files
    dtype: str
    shape: tuple[int, ...]
    role: str
    chunks: list[Chunk]
    rank: int | None = None


class DataFile(msgspec.Struct, frozen=True):
    path: str
    size: int
    data_start: int  # of the safetensors buffer
    header_sum: str  # of the bytes before data_start
    blocks: int
    side: int  # index into ``sides`` of the file with the block sums
    sums_at: int
    sums_sum: str  # of those blocks * 16 bytes


class SideFile(msgspec.Struct, frozen=True):
    path: str
    size: int
    sum: str  # of all bytes but the last 16, which repeat it


class ObjectRef(msgspec.Struct, frozen=True):
    """ranks None: the value of all ranks; else of these. The bytes are the blob in side file ``side``."""

    name: str
    ranks: list[int] | None
    side: int
    at: int
    nbytes: int
    sum: str


class Manifest(msgspec.Struct, frozen=True):
    format: str
    version: int
    xxh3_128: str  # of the whole file with these digits as zeros
    created_by: str
    created: str  # UTC
    job: str
    attempt: str
    snapshot: SnapshotId
    keep: bool
    world: int
    epoch: EpochRecord  # lineage and topology: ancestry, nodes, node of each rank
    block_bytes: int
    per_rank: list[str]
    aliases: dict[str, str]
    tensors: list[Tensor]
    objects: list[ObjectRef]
    files: list[DataFile]
    sides: list[SideFile]
    without: list[str] = []  # patterns of parameters whose optimizer state is meant to be absent


class _Head(msgspec.Struct):
    format: str
    version: int


def encode(manifest: Manifest) -> bytes:
    """The file's bytes, with the checksum filled in."""
    blank = msgspec.json.encode(msgspec.structs.replace(manifest, xxh3_128=_NO_SUM.decode())) + b"\n"
    found = _SUM.search(blank, 0, _SUM_WITHIN_BYTES)
    assert found, "the checksum stands near the start"
    at = found.start(1)
    return blank[:at] + digest(blank).hex().encode() + blank[at + len(_NO_SUM) :]


def decode(data: bytes | bytearray, where: str) -> Manifest:
    """Raises CkptdError for another format or a newer version, FileDamage for anything that is not intact."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileDamage(f"damaged manifest: {error}", where=where) from error
    if head.format != FORMAT:
        raise CkptdError(f"not a ckptd checkpoint but {head.format!r}", where=where)
    found = _SUM.search(data, 0, _SUM_WITHIN_BYTES)
    blank = bytes(data) if found is None else data[: found.start(1)] + _NO_SUM + data[found.end(1) :]
    if found is None or digest(blank).hex().encode() != found[1]:
        raise FileDamage("damaged manifest: its checksum does not match", where=where)
    if not 1 <= head.version <= VERSION:
        text = f"the checkpoint has format version {head.version}, this ckptd reads up to {VERSION}"
        raise CkptdError(text, where=where, hint="upgrade ckptd on this node")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        _check(manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FileDamage(f"damaged manifest: {error}", where=where) from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Everything a reader relies on when it computes addresses. Raises ValueError."""
    if manifest.block_bytes != BLOCK_BYTES:
        raise ValueError(f"blocks of {manifest.block_bytes} bytes")
    if not 0 < manifest.world <= WORLD_MAX:
        raise ValueError(f"a world of {manifest.world}")
    for tensor in manifest.tensors:
        _check_rank(tensor.rank, manifest.world)
        itemsize = ITEMSIZE.get(tensor.dtype)
        if itemsize is None:
            raise ValueError(f"{tensor.key}: unknown dtype {tensor.dtype!r}")
        for chunk in tensor.chunks:
            _check_chunk(tensor, chunk, itemsize, manifest.files)
    for file in manifest.files:
        _check_file(file, manifest.sides)
    for side in manifest.sides:
        if not (_is_name(side.path, SIDE) and _is_sum(side.sum) and side.size >= 0):
            raise ValueError(f"{side.path}: not a side file")
    for ref in manifest.objects:
        for rank in ref.ranks or ():
            _check_rank(rank, manifest.world)
        if not 0 <= ref.side < len(manifest.sides) or min(ref.at, ref.nbytes) < 0:
            raise ValueError(f"object {ref.name}: no such side file")


def _check_file(file: DataFile, sides: list[SideFile]) -> None:
    if not 0 <= file.side < len(sides):
        raise ValueError(f"{file.path}: no such side file")
    numbers = (file.blocks, file.sums_at, file.data_start, file.size - file.data_start)
    sums = _is_sum(file.header_sum) and _is_sum(file.sums_sum)
    if not (_is_name(file.path, DATA) and sums and min(numbers) >= 0):
        raise ValueError(f"{file.path}: not a data file")


def _check_rank(rank: int | None, world: int) -> None:
    if rank is not None and not 0 <= rank < world:
        raise ValueError(f"rank {rank} in a world of {world}")


def _is_name(path: str, suffix: str) -> bool:
    """A file of the checkpoint's own directory."""
    return path.endswith(suffix) and not {"/", "\0"} & set(path)


def _is_sum(text: str) -> bool:
    return _HEX.fullmatch(text) is not None


def _check_chunk(tensor: Tensor, chunk: Chunk, itemsize: int, files: list[DataFile]) -> None:
    dims = len(tensor.shape)
    if not 0 <= chunk.file < len(files):
        raise ValueError(f"{tensor.key}: no file {chunk.file}")
    file = files[chunk.file]
    if len(chunk.offsets) != dims or len(chunk.sizes) != dims or chunk.nbytes != chunk.box.volume * itemsize:
        raise ValueError(f"{tensor.key}: a chunk does not fit shape {tensor.shape}")
    spans = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
    if any(at < 0 or size < 0 or at + size > whole for at, size, whole in spans):
        raise ValueError(f"{tensor.key}: a chunk leaves shape {tensor.shape}")
    if chunk.at < file.data_start or chunk.at + chunk.nbytes > file.size:
        raise ValueError(f"{tensor.key}: a chunk leaves {file.path}")
    if chunk.block < 0 or chunk.block + block_count(chunk.nbytes) > file.blocks:
        raise ValueError(f"{tensor.key}: a chunk has no sums in {file.path}")
