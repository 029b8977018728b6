"""Chunks that are smaller on storage than in memory: the bytes of one significance side by side, as Blosc shuffles them, then zstd.

Mantissas of trained numbers are noise, signs and exponents repeat. What does not become smaller stays as it is, so nobody decodes
it for nothing. A chunk is decoded whole, and is small enough for that (docs/FORMAT.md section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist import quantized, rows
from ckptd.persist.files import OpenFiles
from ckptd.persist.index import QUANTIZED, RAW, ROWS, SHUFFLED_ZSTD
from ckptd.persist.quantized import Quantizer
from ckptd.persist.ranges import StoredChunk
from ckptd.persist.stream import fill_range
from ckptd.persist.sums import FileDamage, RunningSums

if TYPE_CHECKING:
    from ckptd.persist.pieces import OutChunk
    from ckptd.persist.storage.base import FileWriter

LEVEL = 1  # of zstd: a flush is as quick as the storage is
PAYS_RATIO = 0.9  # encoded size in values' size, at most
SAMPLES, SAMPLE_VALUES = 4, 16 << 10  # of a chunk, before it is known whether encoding pays
HINT = "pip install 'ckptd[compress]'"
Frame: TypeAlias = "bytes | memoryview"
Coder: TypeAlias = "Callable[[OutChunk, memoryview], tuple[Frame, int]]"  # chunk, its values: what is written, and the codec


def available() -> None:
    """Raises CkptdError: the library is not there."""
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise CkptdError("compressed checkpoints need zstandard", where=str(error), hint=HINT) from error


def encode(values: memoryview, item: int) -> bytes:
    """values: of ``item`` bytes each."""
    return _compressed(_turned(values, item))


def decode(frame: memoryview, item: int, nbytes: int) -> memoryview:
    """Raises ValueError: it is no frame of so many bytes."""
    import zstandard

    try:
        if zstandard.get_frame_parameters(frame).content_size != nbytes:
            raise ValueError("it holds another number of bytes")
        shuffled = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return _turned(memoryview(shuffled), nbytes // item)


def _compressed(data: memoryview) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _turned(data: memoryview, width: int) -> memoryview:
    """Rows of so many bytes become columns, and the other way round."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    return np.ascontiguousarray(rows.T).reshape(-1).data


def pays(chunk: OutChunk) -> bool:
    """Are samples of it enough smaller? Each significance by itself, as zstd meets them in a large chunk. Raises SlotDamage."""
    item, count = chunk.itemsize, chunk.box.volume
    size = min(SAMPLE_VALUES, count)
    if not size:
        return False
    starts = sorted({at * (count - size) // (SAMPLES - 1) for at in range(SAMPLES)})
    turned = [_turned(_values(chunk, at, at + size), item) for at in starts]
    found = sum(len(_compressed(part[at : at + size])) for part in turned for at in range(0, len(part), size))
    return found <= PAYS_RATIO * len(turned) * size * item


def compressed(chunk: OutChunk, values: memoryview) -> tuple[Frame, int]:
    frame = encode(values, chunk.itemsize)
    return (frame, SHUFFLED_ZSTD) if len(frame) <= PAYS_RATIO * len(values) else (values, RAW)


def quantised(by: Quantizer, chunk: OutChunk, values: memoryview) -> tuple[Frame, int]:
    frame = by.encode(chunk.key, values, chunk.dtype, width_of(chunk.box))
    return (values, RAW) if frame is None else (frame, QUANTIZED)


def write_encoded(
    chunk: OutChunk, out: FileWriter, tick: Callable[[int], None], code: Coder
) -> tuple[bytes, int, int]:
    """Append it; the sums of its blocks as they lie there, their bytes, the codec. Raises as ``write_chunk``."""
    frame, codec = code(chunk, _values(chunk, 0, chunk.box.volume))
    sums = RunningSums()
    sums.update(memoryview(frame))
    out.write(frame)
    tick(chunk.nbytes)
    return sums.finish(), len(frame), codec


def _values(chunk: OutChunk, start: int, stop: int) -> memoryview:
    view = memoryview(bytearray((stop - start) * chunk.itemsize))
    fill_range(chunk, start, stop, view)
    return view


class EncodedChunk:
    """As StoredChunk, of its values. They are decoded once, for all that is read of them through this."""

    def __init__(self, stored: StoredChunk, codec: int, dtype: str, box: Box, files: OpenFiles) -> None:
        """files: of the checkpoint, where a chunk may need another one's bytes."""
        self._stored, self._codec, self._dtype, self._box, self._files = stored, codec, dtype, box, files

    def read(self, start: int, dest: memoryview) -> int:
        """As StoredChunk's. Raises FileDamage, StorageError; CkptdError: the library is not there."""
        values, known = self._values
        dest[:] = values[start : start + len(dest)]
        return len(dest) if known else 0

    @cached_property
    def _values(self) -> tuple[memoryview, bool]:
        """And whether they came from the cache."""
        frame = memoryview(bytearray(self._stored.nbytes))
        known = self._stored.read(0, frame) == len(frame)
        item = ITEMSIZE[self._dtype]
        nbytes = self._box.volume * item
        try:
            if self._codec == QUANTIZED:
                return quantized.decode(frame, self._dtype, width_of(self._box), nbytes), known
            if self._codec == ROWS:
                return rows.decode(frame, self._box, item, self._base), known
            available()
            return decode(frame, item, nbytes), known
        except ValueError as error:
            raise FileDamage(f"{self._stored.name} cannot be decoded: {error}", where=self._stored.where) from error


    def _base(self, place: rows.Place, nbytes: int) -> memoryview:
        frame = memoryview(bytearray(nbytes))
        self._files.part_of(place.path, self._stored.name, place.at, nbytes, place.block).read(0, frame)
        return frame


def bytes_to_be(chunk: OutChunk, quantizer: Quantizer | None) -> int:
    """What a chunk takes on storage, but for what compressing may save."""
    bits = quantizer.bits(chunk.key, chunk.dtype) if quantizer is not None else None
    width = width_of(chunk.box)
    return chunk.nbytes if bits is None or not chunk.nbytes else quantized.size_of(chunk.box.volume // width, width, bits)


def width_of(box: Box) -> int:
    """Values of a row: the last dimension."""
    return box.sizes[-1] if box.sizes else 1
