"""The non-tensor state of a snapshot's ranks: a msgpack map {name: bin} at the start of each rank's payload."""

from __future__ import annotations

import msgpack

OBJECTS_MAX = 100_000  # names of one rank


def split_objects(region: bytes | memoryview) -> dict[str, bytes]:
    """The map in an objects region (trailing zeros belong to the region, not to the map).

    Values stay encoded: the daemon never decodes a user's state (P13). Raises ValueError for anything else than such a map.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=0, max_map_len=OBJECTS_MAX, strict_map_key=True)
    unpacker.feed(region)
    try:
        body = unpacker.unpack()
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"objects region does not parse: {error}") from error
    if type(body) is not dict or not all(type(k) is str and type(v) is bytes for k, v in body.items()):
        raise ValueError("objects region is not a map of names to bytes")
    return body


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
