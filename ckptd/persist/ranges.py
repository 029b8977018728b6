"""Verified reads of ranges of one chunk: rounded out to its blocks, straight into the destination where possible (D14). A block
that is not what was written is read once more before it counts as damaged: it may be what a network did to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist.cache import CachedFile
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
    cached: CachedFile | None = None

    def read(self, start: int, dest: memoryview) -> int:
        """Bytes [start, start + len(dest)) of the chunk; so many of them came from the cache. Raises FileDamage naming the file and
        block, StorageError."""
        stop = start + len(dest)
        first = -(-start // BLOCK_BYTES) * BLOCK_BYTES  # whole blocks lie in [first, last)
        last = stop if stop == self.nbytes else stop // BLOCK_BYTES * BLOCK_BYTES
        if first >= last:
            return self._read_edges(start, dest)
        edges = self._read_edges(start, dest[: first - start]) + self._read_edges(last, dest[last - start :])
        return edges + self._read_whole(first, dest[first - start : last - start])

    def _read_whole(self, start: int, dest: memoryview) -> int:
        """``start`` is the first byte of a block, the end of ``dest`` the end of one."""
        known = 0
        for begin in range(0, len(dest), self.reader.at_once):  # of what is local a block, which is in the cache when it is summed
            span = dest[begin : begin + self.reader.at_once]
            if self._find(start + begin, span):
                known += len(span)
                continue
            self.reader.read_into(self.at + start + begin, span)
            for at, block in _blocks(span):
                self._check((start + begin + at) // BLOCK_BYTES, block)
            if self.cached is not None:
                self.cached.write(self.at + start + begin, span)
        return known

    def _find(self, start: int, span: memoryview) -> bool:
        """Is all of it in the cache, as it was written?"""
        if self.cached is None or not self.cached.read(self.at + start, span):
            return False
        return all(self._is_right((start + at) // BLOCK_BYTES, block) for at, block in _blocks(span))

    def _read_edges(self, start: int, dest: memoryview) -> int:
        """A range that begins or ends inside a block, through a block of scratch."""
        done = known = 0
        while done < len(dest):
            at = start + done
            block = at // BLOCK_BYTES
            begin = block * BLOCK_BYTES
            scratch = memoryview(bytearray(min(BLOCK_BYTES, self.nbytes - begin)))
            found = self._read_whole(begin, scratch)
            part = scratch[at - begin : at - begin + len(dest) - done]
            dest[done : done + len(part)] = part
            done += len(part)
            known += len(part) if found else 0
        return known

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


def _blocks(span: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Where each begins, and what it holds, of a range that begins with one."""
    return ((at, span[at : at + BLOCK_BYTES]) for at in range(0, len(span), BLOCK_BYTES))
