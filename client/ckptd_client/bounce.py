"""Registered memory of ours between a device and host memory that could not be registered (design D16)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from ckptd_client import libc

BOUNCE_BYTES, BOUNCES = 16 * 1024**2, 4


class Ring:
    """Raises RuntimeError where not even this much can be had."""

    def __init__(self, kind: str) -> None:
        self._slots = deque(_Bounce(kind) for _ in range(BOUNCES))
        self._lock = threading.Lock()

    def out(self, part: Tensor, address: int) -> None:
        """From the device, on the stream that is current. Waits for what was in the ring before. The last pieces ``land``."""
        for piece, offset in _pieces(part):
            with self._lock:
                self._slots[0].take(piece, address + offset)
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
        self._goes: tuple[int, int] | None = None  # address, bytes

    def take(self, piece: Tensor, address: int) -> None:
        self.land()
        self._memory[: piece.nbytes].view(piece.dtype).copy_(piece, non_blocking=True)
        self.full.record()
        self._goes = address, piece.nbytes

    def land(self) -> None:
        if self._goes is not None:
            self.full.synchronize()
            libc.copy(self._goes[0], self._memory.data_ptr(), self._goes[1])
            self._goes = None


def _pieces(part: Tensor) -> Iterator[tuple[Tensor, int]]:
    """What fits into one of the ring, and where it begins, in bytes."""
    flat = part.reshape(-1)
    items = BOUNCE_BYTES // flat.itemsize
    for at in range(0, flat.numel(), items):
        yield flat[at : at + items], at * flat.itemsize
