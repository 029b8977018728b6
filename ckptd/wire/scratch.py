"""Reused buffers for chunks that must be decrypted or encrypted beside the arena: bounded, warm, shared by streams.

A stream holds one for the time of one chunk. Senders and receivers have pools of their own: with a common one, two daemons
that push to each other could hold all of it for sending and wait for each other's receivers for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ckptd.wire.bulk import CHUNK_BYTES, POLL_S, TransferError

SCRATCHES_MAX = 8  # per direction; 8 x 4 MiB
TAG_BYTES = 16  # of AES-GCM, behind the chunk


class ScratchPool:
    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._made = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, stopped: Callable[[], bool]) -> Iterator[memoryview]:
        """CHUNK_BYTES and a tag. Raises TransferError when ``stopped()`` while all are taken."""
        scratch = self._take(stopped)
        try:
            yield scratch
        finally:
            with self._changed:
                self._free.append(scratch)
                self._changed.notify()

    def _take(self, stopped: Callable[[], bool]) -> memoryview:
        with self._changed:
            while not self._free and self._made >= SCRATCHES_MAX:
                if stopped():
                    raise TransferError("cancelled")
                self._changed.wait(POLL_S)
            if self._free:
                return self._free.pop()
            self._made += 1
        return memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
