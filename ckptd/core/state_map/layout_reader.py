"""One value of a layout after the other, each within bounds before the next is built (P13, D20)."""

from __future__ import annotations

from typing import Any

import msgpack

LAYOUT_BYTES_MAX = 256 << 20  # encoded
FRAGMENTS_MAX = 1 << 18  # of one rank
DIMENSIONS_MAX = 64
KEY_CHARACTERS_MAX = 4096
KEY_BYTES_MAX = 4 * KEY_CHARACTERS_MAX
PAYLOAD_BYTES_MAX = 1 << 50
ELEMENTS_MAX = 1 << 62  # along one dimension
WORLD_MAX = 1 << 20
TIER_MAX = 255


class TableNotHere(ValueError):
    """What was read is a rank's part alone, and the table that it names is not known. ``digest``: its name."""

    def __init__(self, digest: str) -> None:
        super().__init__("not a layout: its table is not here")
        self.digest = digest


class Reader:
    """Lists are read entry by entry, so that nothing is built of what does not fit."""

    def __init__(self, data: bytes) -> None:
        self._nbytes = len(data)
        unpacker = msgpack.Unpacker(
            max_buffer_size=max(len(data), 1), max_array_len=0, max_map_len=0, max_ext_len=0, max_bin_len=len(data),
            max_str_len=KEY_BYTES_MAX,
        )  # fmt: skip
        unpacker.feed(data)
        self._unpacker = unpacker
        self.value, self.length = unpacker.unpack, unpacker.read_array_header

    def at_end(self) -> bool:
        return bool(self._unpacker.tell() == self._nbytes)

    def count(self, most: int, what: str) -> int:
        """Of the entries of the list that comes."""
        found: int = self.length()
        require(found <= most, f"{what}: {found} of them, at most {most}")
        return found

    def whole(self, low: int, high: int, what: str) -> int:
        value = self.value()
        require(is_whole(value, low, high), f"{what} out of bounds")
        return int(value)

    def numbers(self) -> tuple[int, ...]:
        found = tuple([self.value() for _ in range(self.count(DIMENSIONS_MAX, "dimensions"))])
        for number in found:
            if type(number) is not int or not 0 <= number <= ELEMENTS_MAX:
                raise ValueError("shape or box is not made of numbers within bounds")
        return found

    def keys(self, most: int) -> tuple[str, ...]:
        found = tuple([self.value() for _ in range(self.count(most, "texts"))])
        require(all(map(is_key, found)), "not texts within bounds")
        return found


def is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # not bool


def is_key(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= KEY_CHARACTERS_MAX


def require(condition: object, text: str) -> None:
    if not condition:
        raise ValueError(text)
