"""A chunk as a stream of bytes, gathered from the memory of its sources and verified on the way (design D12, P10)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckptd.core.state_map.box import Box, flat_range_boxes, intersect
from ckptd.persist.pieces import OutChunk, Source
from ckptd.persist.storage.base import FileWriter
from ckptd.persist.strided import elements, window
from ckptd.persist.sums import RunningSums

CHECK_BYTES = 4 << 20  # verified and copied at a time: stays in the cache in between

Tick = Callable[[int], None]  # so many bytes more were written; raises to stop the write


def write_chunk(chunk: OutChunk, out: FileWriter, tick: Tick) -> bytes:
    """Append the chunk's bytes; the sums of its blocks. Raises SlotDamage, StorageError, and what ``tick`` raises.

    A chunk that is one fragment keeps the sums made at the capture, so whatever happens to its bytes from there on is found.
    """
    for source in chunk.sources:
        if isinstance(source, Source) and source.box == chunk.box:
            return _write_whole(source, out, tick)
    sums = RunningSums()
    done = 0
    while done < chunk.nbytes:
        count = _gather(chunk, done, out, sums)
        done += count
        tick(count)
    return sums.finish()


def _write_whole(source: Source, out: FileWriter, tick: Tick) -> bytes:
    for at in range(0, len(source.data), CHECK_BYTES):
        end = min(at + CHECK_BYTES, len(source.data))
        source.check(at, end)
        out.write(source.data[at:end].data)
        tick(end - at)
    return source.sums


def _gather(chunk: OutChunk, done: int, out: FileWriter, sums: RunningSums) -> int:
    """Fill the writer's space with the next whole elements of the chunk; how many bytes."""
    item = chunk.itemsize
    space = out.space()
    count = min(chunk.nbytes - done, len(space) // item * item)
    if count == 0:  # an element across the end of the space
        return _gather_one(chunk, done, out, sums)
    view = space[:count]
    fill_range(chunk, done // item, (done + count) // item, view)
    sums.update(view)
    out.advance(count)
    return count


def _gather_one(chunk: OutChunk, done: int, out: FileWriter, sums: RunningSums) -> int:
    view = memoryview(bytearray(chunk.itemsize))
    fill_range(chunk, done // chunk.itemsize, done // chunk.itemsize + 1, view)
    sums.update(view)
    out.write(view)
    return chunk.itemsize


def fill_range(chunk: OutChunk, start: int, stop: int, dest: memoryview) -> None:
    """Elements [start, stop) of the chunk in C order into ``dest``, from whichever sources hold them."""
    at, item = 0, chunk.itemsize
    for local in flat_range_boxes(chunk.box.sizes, start, stop):
        part = Box(tuple(a + b for a, b in zip(local.offsets, chunk.box.offsets, strict=True)), local.sizes)
        target = elements(np.frombuffer(dest, np.uint8, part.volume * item, at), part.sizes, item)
        for source in chunk.sources:
            inner = intersect(part, source.box)
            if inner is not None:
                target[window(part, inner)] = source.values(inner)
        at += part.volume * item
