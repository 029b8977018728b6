"""Which chunk goes into which file, and the safetensors header of a file whose bytes are still to come (design D12)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist.pieces import OutChunk

FILE_BYTES_MAX = 4 << 30  # payload of one data file; a larger tensor is cut into boxes
FILE_BYTES_MIN = 64 << 20  # below this two writer threads are not worth two files
KEYS_MAX = 20_000  # of one file: readers parse its whole header
HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
DATA_ALIGN_BYTES = 4096  # of the payload's start, for O_DIRECT and mmap
_LENGTH = struct.Struct("<Q")


@dataclass
class Package:
    """One data file to be. encoded: without a header, and names may repeat."""

    chunks: list[OutChunk] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    nbytes: int = 0
    encoded: bool = False

    def fits(self, chunk: OutChunk, bytes_max: int) -> bool:
        roomy = not self.chunks or self.nbytes + chunk.nbytes <= bytes_max
        return roomy and chunk.name not in self.names and len(self.chunks) < KEYS_MAX

    def add(self, chunk: OutChunk) -> None:
        self.chunks.append(chunk)
        self.names.add(chunk.name)
        self.nbytes += chunk.nbytes


def pack(chunks: Sequence[OutChunk], *, bytes_max: int = FILE_BYTES_MAX, writers: int = 2) -> list[Package]:
    """Largest first into the emptiest file, as many files as the size and ``writers`` ask for.

    Header keys are unique, so a second box of one key goes into another file. Inside a file wide elements come first:
    then every tensor is aligned to its element without holes, which the format forbids.
    """
    small = cut(chunks, bytes_max)
    packages = [Package() for _ in range(_file_count(small, bytes_max, writers))]
    for chunk in sorted(small, key=lambda chunk: -chunk.nbytes):
        open_ones = [package for package in packages if package.fits(chunk, bytes_max)]
        if not open_ones:
            packages.append(Package())
            open_ones = packages[-1:]
        min(open_ones, key=lambda package: package.nbytes).add(chunk)
    for package in packages:
        package.chunks.sort(key=lambda chunk: (-chunk.itemsize, -chunk.nbytes, chunk.name))
    return [package for package in packages if package.chunks]


def pack_encoded(chunks: Sequence[OutChunk], piece_max: int, *, bytes_max: int = FILE_BYTES_MAX, writers: int = 2) -> list[Package]:
    """One after the other, in pieces of at most ``piece_max`` bytes."""
    small = cut(chunks, piece_max)
    total, at = sum(chunk.nbytes for chunk in small), 0
    packages = [Package(encoded=True) for _ in range(_file_count(small, bytes_max, writers))]
    for chunk in small:
        packages[min(at * len(packages) // max(total, 1), len(packages) - 1)].add(chunk)
        at += chunk.nbytes
    return [package for package in packages if package.chunks]


def _file_count(chunks: Sequence[OutChunk], bytes_max: int, writers: int) -> int:
    total = sum(chunk.nbytes for chunk in chunks)
    return max(-(-total // bytes_max), min(writers, -(-total // FILE_BYTES_MIN)), 1 if chunks else 0)


def header(chunks: Sequence[OutChunk], origin: Mapping[str, object]) -> bytes:
    """Everything before the payload: length, JSON padded with spaces to DATA_ALIGN_BYTES.

    ``DCP_SHARDING_INFO`` makes torch's HuggingFaceStorageReader (>= 2.9) see each chunk at its place in the whole tensor.
    """
    offsets = {chunk.name: {"saved_offsets": chunk.box.offsets} for chunk in chunks}
    rows: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":")),
            "ckptd": json.dumps(origin, separators=(",", ":")),
        }
    }
    at = 0
    for chunk in chunks:
        rows[chunk.name] = {
            "dtype": chunk.dtype,
            "shape": chunk.box.sizes,
            "data_offsets": [at, at + chunk.nbytes],
        }
        at += chunk.nbytes
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(_LENGTH.size + len(text)) // DATA_ALIGN_BYTES) * DATA_ALIGN_BYTES - _LENGTH.size
    if length > HEADER_BYTES_MAX:
        raise CkptdError(
            f"a header of {length} bytes", hint="tensor names are too long for safetensors files"
        )
    return _LENGTH.pack(length) + text.ljust(length)


def cut(chunks: Sequence[OutChunk], bytes_max: int = FILE_BYTES_MAX) -> list[OutChunk]:
    """As boxes of at most ``bytes_max``, cut along their first dimensions."""
    return [part for chunk in chunks for part in _cut(chunk, bytes_max)]


def _cut(chunk: OutChunk, bytes_max: int) -> list[OutChunk]:
    if chunk.nbytes <= bytes_max:
        return [chunk]
    return [_part(chunk, box) for box in split_box(chunk.box, bytes_max // ITEMSIZE[chunk.dtype])]


def split_box(box: Box, volume_max: int) -> list[Box]:
    """Boxes of at most ``max(volume_max, 1)`` elements, each contiguous in the C order of ``box``."""
    if box.volume <= max(volume_max, 1):
        return [box]
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(volume_max // (box.volume // box.sizes[dim]), 1)
    made: list[Box] = []
    for at in range(0, box.sizes[dim], rows):
        offsets = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(rows, box.sizes[dim] - at), *box.sizes[dim + 1 :])
        made += split_box(Box(offsets, sizes), volume_max)
    return made


def _part(chunk: OutChunk, box: Box) -> OutChunk:
    return OutChunk(chunk.key, chunk.rank, chunk.dtype, chunk.shape, chunk.role, box, chunk.sources)
