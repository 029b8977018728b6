"""Object blobs that ranks want back, in one piece of memory."""

from __future__ import annotations


class ObjectPool:
    """Object blobs laid out one after the other, to be handed to a rank in one sealed memfd."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._places: dict[bytes, int] = {}
        self.size = 0

    def place(self, blob: bytes) -> tuple[int, int]:
        """(offset, length) of the blob; equal blobs are stored once."""
        at = self._places.get(blob)
        if at is None:
            at = self._places[blob] = self.size
            self._parts.append(blob)
            self.size += len(blob)
        return at, len(blob)

    def data(self) -> bytes:
        return b"".join(self._parts)
