"""What a checkpoint's ``manifest.json`` says (docs/FORMAT.md section 3), and what readers rely on when they compute addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.core.state_map.layout_reader import WORLD_MAX
from ckptd.persist.index import ENCODED_BYTES_MAX, RAW, ROWS, Index, IndexFile, Names
from ckptd.persist.names import DATA, ENCODED, SIDE
from ckptd.persist.rows import HEAD_BYTES_MAX

FORMAT = "ckptd-checkpoint"
VERSION = 2
SIZE_MAX = 1 << 62  # of a file in bytes, and of any number about it: they are computed with as int64
_HEX = re.compile(r"[0-9a-f]{32}")


class DataFile(msgspec.Struct, frozen=True, omit_defaults=True):
    path: str
    size: int
    data_start: int  # of the safetensors buffer
    header_sum: str  # of the bytes before data_start
    blocks: int
    side: int  # index into ``sides`` of the file with the block sums
    sums_at: int
    sums_sum: str  # of those blocks * 16 bytes
    of: SnapshotId | None = None  # the checkpoint of this job in whose directory it lies; None: this one


class SideFile(msgspec.Struct, frozen=True, omit_defaults=True):
    path: str
    size: int
    sum: str  # of all bytes but the last 16, which repeat it
    of: SnapshotId | None = None  # as of a data file


class ObjectRef(msgspec.Struct, frozen=True):
    """ranks None: the value of all ranks; else of these. The bytes are the blob in side file ``side``."""

    name: str
    ranks: list[int] | None
    side: int
    at: int
    nbytes: int
    sum: str


class Rows(msgspec.Struct, frozen=True):
    """Of tables that are written by rows: ``base`` is the checkpoint where all of them are whole; None: this one. ``since``: bytes
    that were written of their changes in those between."""

    base: SnapshotId | None
    since: int


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
    objects: list[ObjectRef]
    files: list[DataFile]
    sides: list[SideFile]
    without: list[str] = []  # patterns of parameters whose optimizer state is meant to be absent
    names: Names | None = None  # of the tensors; None: version 1, which has tensors and chunks in the file itself
    index: IndexFile | None = None
    rows: Rows | None = None  # None: there are no tables that are written by rows, or what follows does not build on them
    lossy: list[str] = []  # PATTERN=BITS: tensors whose values are not those of the snapshot, but as near as so many bits come


@dataclass(frozen=True)
class Contents:
    """A checkpoint's manifest and what its index says."""

    manifest: Manifest
    index: Index



def check(contents: Contents) -> None:
    """Everything a reader relies on. Raises ValueError."""
    manifest = contents.manifest
    if manifest.block_bytes != BLOCK_BYTES:
        raise ValueError(f"blocks of {manifest.block_bytes} bytes")
    if not 0 < manifest.world <= WORLD_MAX:
        raise ValueError(f"a world of {manifest.world}")
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
    _check_chunks(manifest, contents.index)


def _check_chunks(manifest: Manifest, index: Index) -> None:
    """All rows at once: a checkpoint has hundreds of thousands."""
    if int(index.rank.max(initial=0)) > manifest.world:
        raise ValueError(f"a rank outside a world of {manifest.world}")
    if int(index.file.max(initial=-1)) >= len(manifest.files):
        raise ValueError("a chunk in a file that is not named")
    files = np.array([(f.data_start, f.size, f.blocks) for f in manifest.files], np.int64).reshape(-1, 3)
    start, size, blocks = files[index.file].T
    shapes = index.shape[index.tensor]
    raw, encoded = index.values_bytes, index.codec != RAW
    most = np.where(index.codec == ROWS, raw + raw // 4 + HEAD_BYTES_MAX, raw)  # their sums
    within = (index.offsets <= shapes) & (index.sizes <= shapes - index.offsets)
    for wrong, what in (
        (~within.all(1), "leaves its tensor's shape"),
        (~encoded & (index.nbytes != raw), "has another length than its box"),
        (encoded & ((index.nbytes > most) | (raw > ENCODED_BYTES_MAX)), "is encoded, and larger than it may be"),
        ((index.at < start) | (index.at > size) | (index.nbytes > size - index.at), "leaves its file"),
        ((index.block > blocks) | (-(-index.nbytes // BLOCK_BYTES) > blocks - index.block), "has no sums"),
    ):
        if wrong.any():
            raise ValueError(f"{index.tensor_at(int(index.tensor[wrong][0])).name}: a chunk {what}")


def _check_file(file: DataFile, sides: list[SideFile]) -> None:
    if not 0 <= file.side < len(sides):
        raise ValueError(f"{file.path}: no such side file")
    numbers = (file.blocks, file.sums_at, file.data_start, file.size - file.data_start)
    sums = _is_sum(file.header_sum) and _is_sum(file.sums_sum)
    named = _is_name(file.path, DATA) or _is_name(file.path, ENCODED)
    if not (named and sums and min(numbers) >= 0 and max(file.size, *numbers) < SIZE_MAX):
        raise ValueError(f"{file.path}: not a data file")


def _check_rank(rank: int | None, world: int) -> None:
    if rank is not None and not 0 <= rank < world:
        raise ValueError(f"rank {rank} in a world of {world}")


def _is_name(path: str, suffix: str) -> bool:
    """A file of the checkpoint's own directory."""
    return path.endswith(suffix) and not {"/", "\0"} & set(path)


def _is_sum(text: str) -> bool:
    return _HEX.fullmatch(text) is not None
