"""Verified reads of ranges of one chunk: rounded out to its blocks, straight into the destination where possible (D14). A block
that is not what was written is read once more before it counts as damaged: it may be what a network did to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist.storage.base import FileReader
from ckptd.persist.sums import SUM_BYTES, FileDamage, digest

Read = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk's bytes in an open file, and the sums of its blocks. anew: opens the file once more, past all that is kept of it."""

    reader: FileReader
    anew: Callable[[], FileReader]
    where: str
    name: str
    at: int
    nbytes: int
    sums: bytes
    hint: str

    def read(self, start: int, dest: memoryview) -> None:
        """Bytes [start, start + len(dest)) of the chunk. Raises FileDamage naming the file and block, StorageError."""
        stop = start + len(dest)
        first = -(-start // BLOCK_BYTES) * BLOCK_BYTES  # whole blocks lie in [first, last)
        last = stop if stop == self.nbytes else stop // BLOCK_BYTES * BLOCK_BYTES
        if first >= last:
            self._read_edges(start, dest)
            return
        self._read_edges(start, dest[: first - start])
        self._read_whole(first, dest[first - start : last - start])
        self._read_edges(last, dest[last - start :])

    def _read_whole(self, start: int, dest: memoryview) -> None:
        """``start`` is the first byte of a block, the end of ``dest`` the end of one."""
        for begin in range(0, len(dest), self.reader.at_once):  # of what is local a block, which is in the cache when it is summed
            span = dest[begin : begin + self.reader.at_once]
            self.reader.read_into(self.at + start + begin, span)
            for at in range(0, len(span), BLOCK_BYTES):
                self._check((start + begin + at) // BLOCK_BYTES, span[at : at + BLOCK_BYTES])

    def _read_edges(self, start: int, dest: memoryview) -> None:
        """A range that begins or ends inside a block, through a block of scratch."""
        done = 0
        while done < len(dest):
            at = start + done
            block = at // BLOCK_BYTES
            begin = block * BLOCK_BYTES
            scratch = memoryview(bytearray(min(BLOCK_BYTES, self.nbytes - begin)))
            self._read_whole(begin, scratch)
            part = scratch[at - begin : at - begin + len(dest) - done]
            dest[done : done + len(part)] = part
            done += len(part)

    def _check(self, block: int, data: memoryview) -> None:
        if self._is_right(block, data):
            return
        at = self.at + block * BLOCK_BYTES
        with closing(self.anew()) as reader:
            reader.read_into(at, data)
        if not self._is_right(block, data):
            raise FileDamage(f"damaged block {block} of {self.name} (bytes {at} and on)", where=self.where, hint=self.hint)

    def _is_right(self, block: int, data: memoryview) -> bool:
        return digest(data) == self.sums[block * SUM_BYTES : (block + 1) * SUM_BYTES]
