"""The non-tensor state of a rank: a msgpack map {name: bin} at the start of its payload."""

from __future__ import annotations

import msgpack

OBJECTS_MAX = 1 << 16  # names of one rank


def split_objects(region: bytes | memoryview) -> dict[str, bytes]:
    """The map in an objects region (trailing zeros belong to the region, not to the map). Its rank wrote it: nothing is built but
    names and bytes (D20), and values stay encoded, as the daemon never decodes a user's state (P13). ValueError: anything else."""
    unpacker = msgpack.Unpacker(max_buffer_size=0, max_array_len=0, max_map_len=0, max_ext_len=0)
    unpacker.feed(region)
    found: dict[str, bytes] = {}
    try:
        count = unpacker.read_map_header()
        if count > OBJECTS_MAX:
            raise ValueError(f"{count} names, at most {OBJECTS_MAX}")
        for _ in range(count):
            name, value = unpacker.unpack(), unpacker.unpack()
            if type(name) is not str or type(value) is not bytes:
                raise ValueError("a name that is no text, or a value that is no bytes")
            found[name] = value
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"the objects region is no map of names to bytes: {error}") from error
    return found
