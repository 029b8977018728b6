"""Registered memory of ours between a device and host memory that could not be registered (design D16)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

BOUNCE_BYTES, BOUNCES = 16 * 1024**2, 4


class Ring:
    """Raises RuntimeError where not even this much can be had."""

    def __init__(self, kind: str) -> None:
        self._slots = deque(_Bounce(kind) for _ in range(BOUNCES))
        self._lock = threading.Lock()

    def out(self, source: Tensor, place: Tensor) -> None:
        """From the device, on the stream that is current, to host memory of any kind. Waits for what was in the ring before. The
        last pieces ``land``. Dtype and shape are the same."""
        for piece, where in _pairs(source, place):
            with self._lock:
                self._slots[0].take(piece, where)
                self._slots.rotate(-1)

    def into(self, source: Tensor, dest: Tensor) -> None:
        """From host memory of any kind to the device, on its current stream. ``source`` has been read when this returns; dtype
        and shape are the same."""
        for piece, place in _pairs(source, dest):
            with self._lock:
                self._slots[0].give(piece, place)
                self._slots.rotate(-1)

    def land(self) -> None:
        """What has come from the device goes where it belongs."""
        with self._lock:
            for slot in self._slots:
                if slot.full.query():
                    slot.land()


class _Bounce:
    def __init__(self, kind: str) -> None:
        self._memory = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.full = torch.Event(kind)
        self._goes: tuple[Tensor, Tensor] | None = None  # what has come into the memory, and its place

    def _for(self, piece: Tensor) -> Tensor:
        """Free for this one: what came last has landed, what went last has arrived."""
        self.land()
        self.full.synchronize()
        return self._memory[: piece.nbytes].view(piece.dtype).view(piece.shape)

    def take(self, piece: Tensor, place: Tensor) -> None:
        memory = self._for(piece)
        memory.copy_(piece, non_blocking=True)
        self.full.record()
        self._goes = memory, place

    def give(self, piece: Tensor, place: Tensor) -> None:
        memory = self._for(piece)
        memory.copy_(piece)
        place.copy_(memory, non_blocking=True)
        self.full.record(torch.accelerator.current_stream(place.device))

    def land(self) -> None:
        if self._goes is not None:
            self.full.synchronize()
            self._goes[1].copy_(self._goes[0])
            self._goes = None


def _pairs(source: Tensor, dest: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same parts of both, each of which fits into one of the ring."""
    if dest.nbytes <= BOUNCE_BYTES:
        if dest.nbytes:
            yield source, dest
    elif dest.is_contiguous() and source.is_contiguous():
        items = BOUNCE_BYTES // dest.itemsize
        for at in range(0, dest.numel(), items):
            yield source.view(-1)[at : at + items], dest.view(-1)[at : at + items]
    else:
        dim = max(range(dest.dim()), key=lambda dim: dest.shape[dim])
        half = dest.shape[dim] // 2
        for begin, length in ((0, half), (half, dest.shape[dim] - half)):
            yield from _pairs(source.narrow(dim, begin, length), dest.narrow(dim, begin, length))
