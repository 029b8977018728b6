"""Checksums of what lies on storage: xxh3_128 per block of at most BLOCK_BYTES, counted from a chunk's first byte (D14)."""

from __future__ import annotations

import xxhash

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.layout import BLOCK_BYTES

SUM_BYTES = 16


class Damage(CkptdError):
    """Bytes do not match their checksum (P10): quarantine that copy, use the next source."""


class SlotDamage(Damage):
    """A memory slot that was to be written: HeldPiece.slot, its rank, the slice's key ("" for the objects)."""

    def __init__(self, slot: int, rank: int, key: str, what: str) -> None:
        hint = "the slot is quarantined; another holder can write it"
        super().__init__(what, where=f"slot {slot} of rank {rank}", hint=hint)
        self.slot, self.rank, self.key = slot, rank, key


class FileDamage(Damage):
    """A file on storage is damaged or incomplete; ``where`` names it."""


def digest(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def block_count(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


class RunningSums:
    """Block sums of a chunk that passes by in pieces of any length."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while data:
            count = min(len(data), BLOCK_BYTES - self._filled)
            self._open.update(data[:count])
            self._filled += count
            data = data[count:]
            if self._filled == BLOCK_BYTES:
                self._close()

    def finish(self) -> bytes:
        if self._filled:
            self._close()
        return b"".join(self._done)

    def _close(self) -> None:
        self._done.append(self._open.digest())
        self._open.reset()
        self._filled = 0
