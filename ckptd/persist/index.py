"""What a checkpoint has of each tensor, and where: integer columns, ``index.columns`` (docs/FORMAT.md section 4). No row is an
object until somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box, uncovered
from ckptd.core.state_map.catalogue import TensorEntry
from ckptd.core.state_map.columns import Column, Ints, pack, unpack
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout_reader import DIMENSIONS_MAX
from ckptd.persist.names import header_name
from ckptd.persist.sums import FileDamage, digest

INDEX_BYTES_MAX = 1 << 30
ROWS_MAX = 16 << 20  # tensors, or chunks, of one checkpoint
CELLS_MAX = 1 << 28  # numbers of boxes and shapes, when each has as many dimensions as the one with the most
VOLUME_MAX = 1 << 58  # elements of one tensor: its bytes are an int64
_TENSOR = ("dtype", "role", "rank", "dims")  # one number per tensor
_CHUNK = ("tensor", "file", "at", "nbytes", "block")  # one per chunk
_SPREAD = ("shape", "offsets", "sizes")  # per tensor, per chunk, per chunk as many as the tensor has dimensions
CODEC = "codec"  # one per chunk, may be missing: RAW everywhere
RAW, SHUFFLED_ZSTD, QUANTIZED, ROWS = 0, 1, 2, 3  # codecs: the bytes themselves, encoding.py's, quantized.py's, rows.py's
CODEC_MAX = ROWS
ENCODED_BYTES_MAX = 8 << 20  # of the values of a chunk that is encoded: a reader decodes all of it

Mask = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


class Tensor(NamedTuple):
    """rank: whose own value this is when the ranks differed in this snapshot, else None (one logical tensor)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    rank: int | None = None

    @property
    def name(self) -> str:
        """In the headers of the data files."""
        return header_name(self.key, self.rank)


class Chunk(NamedTuple):
    """One box of a tensor in one file, C order. ``block``: index of its first block among the file's sums. ``codec``: RAW, or how
    it is encoded; ``nbytes`` and blocks are then of the encoded bytes."""

    file: int
    at: int
    nbytes: int
    block: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    codec: int = RAW

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class Names(msgspec.Struct, frozen=True):
    """In the manifest: the keys of the tensors in order, and the dtypes and roles that the columns number."""

    keys: list[str]
    dtypes: list[str]
    roles: list[str]


class IndexFile(msgspec.Struct, frozen=True):
    """In the manifest: where the columns lie in the index, and the sum of all of it."""

    path: str
    size: int
    sum: str
    columns: list[Column]


class Index:
    """Tensors, and chunks sorted by tensor and then by offsets; one attribute per column. ``shape``, ``offsets`` and ``sizes`` have
    a column per dimension: what a tensor does not have of them is 0 in ``offsets`` and 1 in the others.

    ValueError: the numbers are none of tensors and chunks.
    """

    def __init__(self, names: Names, columns: dict[str, Ints]) -> None:
        self.names = names
        self.dtype, self.role, self.rank, self.dims = (columns[name] for name in _TENSOR)
        self.tensor, self.file, self.at, self.nbytes, self.block = (columns[name] for name in _CHUNK)
        self.codec = columns.get(CODEC, np.zeros(len(self.tensor), np.int64))
        _check_rows(columns | {CODEC: self.codec}, len(names.keys))
        if len(self.dtype) and (self.dtype.max() >= len(names.dtypes) or self.role.max() >= len(names.roles)):
            raise ValueError("a dtype or a role that has no name")
        if not {*names.dtypes} <= ITEMSIZE.keys():
            raise ValueError(f"unknown dtypes among {names.dtypes}")
        width = int(self.dims.max(initial=0))
        if width > DIMENSIONS_MAX:
            raise ValueError(f"a tensor of {width} dimensions")
        if width * max(len(self.dims), len(self.tensor)) > CELLS_MAX:
            raise ValueError(f"too many rows for tensors of {width} dimensions")
        of_tensor, of_chunk = self._masks(width)
        self.shape = _spread(columns["shape"], of_tensor, 1)
        self.offsets, self.sizes = _spread(columns["offsets"], of_chunk, 0), _spread(columns["sizes"], of_chunk, 1)
        if width and bool(((np.diff(self.offsets[:, 0]) < 0) & (np.diff(self.tensor) == 0)).any()):
            raise ValueError("chunks that are not sorted by offsets")
        if len(self.shape) and self.shape.prod(1, dtype=np.float64).max() > VOLUME_MAX:
            raise ValueError("a shape of more elements than bytes can be counted")
        self.first = np.searchsorted(self.tensor, np.arange(len(names.keys) + 1))  # of each tensor's chunks, and the end

    def _masks(self, width: int) -> tuple[Mask, Mask]:
        """Which columns of ``shape``, and of ``offsets`` and ``sizes``, are dimensions that the tensor has."""
        of_tensor: Mask = np.arange(width) < self.dims[:, None]
        return of_tensor, of_tensor[self.tensor]

    @staticmethod
    def of(rows: Sequence[tuple[Tensor, Sequence[Chunk]]]) -> Index:
        """Tensors with their chunks, in the order of their offsets."""
        tensors = [tensor for tensor, _ in rows]
        chunks = [(at, chunk) for at, (_, chunks) in enumerate(rows) for chunk in chunks]
        if any({len(c.offsets), len(c.sizes)} != {len(tensors[at].shape)} for at, c in chunks):
            raise ValueError("a chunk of other dimensions than its tensor has")
        if any(tensor.rank is not None and tensor.rank < 0 for tensor in tensors):
            raise ValueError("a rank below 0")
        dtypes = {dtype: at for at, dtype in enumerate(sorted({tensor.dtype for tensor in tensors}))}
        roles = {role: at for at, role in enumerate(sorted({tensor.role for tensor in tensors}))}
        columns: dict[str, list[int]] = {
            "dtype": [dtypes[tensor.dtype] for tensor in tensors],
            "role": [roles[tensor.role] for tensor in tensors],
            "rank": [0 if tensor.rank is None else tensor.rank + 1 for tensor in tensors],
            "dims": [len(tensor.shape) for tensor in tensors],
            "shape": [size for tensor in tensors for size in tensor.shape],
            "tensor": [at for at, _ in chunks],
            "file": [chunk.file for _, chunk in chunks],
            "at": [chunk.at for _, chunk in chunks],
            "nbytes": [chunk.nbytes for _, chunk in chunks],
            "block": [chunk.block for _, chunk in chunks],
            "offsets": [offset for _, chunk in chunks for offset in chunk.offsets],
            "sizes": [size for _, chunk in chunks for size in chunk.sizes],
            CODEC: [chunk.codec for _, chunk in chunks],
        }
        try:
            made = {name: np.array(column, np.int64) for name, column in columns.items()}
        except OverflowError as error:
            raise ValueError("a number of more than 64 bits") from error
        return Index(Names([tensor.key for tensor in tensors], [*dtypes], [*roles]), made)

    @property
    def values_bytes(self) -> Ints:
        """Of each chunk's values, however they are encoded."""
        items = np.array([ITEMSIZE[dtype] for dtype in self.names.dtypes], np.int64)[self.dtype[self.tensor]]
        found: Ints = self.sizes.prod(1) * items
        return found

    def once(self) -> dict[str, tuple[Tensor, bool]]:
        """Each key once, and whether all of it is there: of ranks' own the first that has, or the first."""
        found: dict[str, tuple[Tensor, bool]] = {}
        for at, tensor in enumerate(self.tensors()):
            if tensor.key in found and found[tensor.key][1]:
                continue
            boxes = [chunk.box for chunk in self.chunks_at(at)] if tensor.rank is not None else []
            whole = tensor.rank is None or not uncovered(Box.whole(tensor.shape), boxes)
            if whole or tensor.key not in found:
                found[tensor.key] = tensor, whole
        return found

    def tensors(self) -> Iterator[Tensor]:
        """In order."""
        rows = zip(self.names.keys, self.entries(), self.owners(), strict=True)
        return (Tensor(key, *entry, rank) for key, entry, rank in rows)

    def entries(self) -> Iterator[TensorEntry]:
        """What the catalogue says of each tensor, in order."""
        dtypes = map(self.names.dtypes.__getitem__, self.dtype.tolist())
        roles = map(self.names.roles.__getitem__, self.role.tolist())
        shapes = (tuple(row[:dims]) for row, dims in zip(self.shape.tolist(), self.dims.tolist(), strict=True))
        return map(TensorEntry, dtypes, shapes, roles)

    def owners(self) -> list[int | None]:
        """Of each tensor, whose own value it is."""
        return [rank - 1 if rank else None for rank in self.rank.tolist()]

    def tensor_at(self, at: int) -> Tensor:
        shape, rank = tuple(self.shape[at, : self.dims[at]].tolist()), int(self.rank[at])
        dtype, role = self.names.dtypes[self.dtype[at]], self.names.roles[self.role[at]]
        return Tensor(self.names.keys[at], dtype, shape, role, rank - 1 if rank else None)

    def chunks_at(self, at: int) -> list[Chunk]:
        """Of that tensor, by offsets, ascending."""
        rows, dims = slice(self.first[at], self.first[at + 1]), self.dims[at]
        numbers = (column[rows].tolist() for column in (self.file, self.at, self.nbytes, self.block))
        boxes = (map(tuple, column[rows, :dims].tolist()) for column in (self.offsets, self.sizes))
        return [Chunk(*row) for row in zip(*numbers, *boxes, self.codec[rows].tolist(), strict=True)]

    def chunk(self, row: int) -> Chunk:
        dims = self.dims[self.tensor[row]]
        box = tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist())
        place = int(self.file[row]), int(self.at[row]), int(self.nbytes[row]), int(self.block[row])
        return Chunk(*place, *box, int(self.codec[row]))

    def encode(self, path: str) -> tuple[bytes, IndexFile]:
        of_tensor, of_chunk = self._masks(self.shape.shape[1])
        columns: dict[str, Ints] = {name: getattr(self, name) for name in (*_TENSOR, *_CHUNK)}
        columns |= {"shape": self.shape[of_tensor], "offsets": self.offsets[of_chunk], "sizes": self.sizes[of_chunk]}
        if self.codec.any():
            columns[CODEC] = self.codec
        data, places = pack(columns)
        return data, IndexFile(path, len(data), digest(data).hex(), places)


def decode_index(data: bytes, told: IndexFile, names: Names, where: str) -> Index:
    """Raises FileDamage; CkptdError: chunks that only a newer ckptd reads."""
    if len(data) != told.size or digest(data).hex() != told.sum:
        raise FileDamage("damaged index: its checksum does not match", where=where)
    try:
        columns = unpack(data, told.columns, (*_TENSOR, *_CHUNK, *_SPREAD, CODEC))
        if int(columns.get(CODEC, np.zeros(1, np.int64)).max(initial=0)) > CODEC_MAX:
            raise CkptdError("chunks that this ckptd cannot decode", where=where, hint="upgrade ckptd on this node")
        return Index(names, columns)
    except (ValueError, KeyError) as error:
        raise FileDamage(f"damaged index: {error}", where=where) from error


def _check_rows(columns: dict[str, Ints], tensors: int) -> None:
    tensor = columns["tensor"]
    if max(tensors, len(tensor)) > ROWS_MAX:
        raise ValueError(f"{tensors} tensors and {len(tensor)} chunks, at most {ROWS_MAX} are read")
    for names, count in ((_TENSOR, tensors), ((*_CHUNK, CODEC), len(tensor))):
        if any(len(columns[name]) != count for name in names):
            raise ValueError("columns of different lengths")
    if any(int(columns[name].min(initial=0)) < 0 for name in (*_TENSOR, *_CHUNK, *_SPREAD, CODEC)):
        raise ValueError("a number below 0")
    if len(tensor) and (int(tensor.max()) >= tensors or bool((np.diff(tensor) < 0).any())):
        raise ValueError("chunks of no tensor, or not sorted by tensor")


def _spread(values: Ints, inside: Mask, outside: int) -> Ints:
    """From one after the other, as they lie in the file, to a column per dimension."""
    if len(values) != np.count_nonzero(inside):
        raise ValueError("shapes and boxes have other dimensions than the tensors")
    found = np.full(inside.shape, outside, np.int64)
    found[inside] = values
    return found
