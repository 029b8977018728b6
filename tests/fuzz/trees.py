"""Trees of plain values, as msgpack and as JSON, with what no encoder writes: keys twice, depths beyond all bounds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgpack

DEPTHS = (20, 300, 900, 960, 1000, 1018, 100_000)  # the interpreter's limit is 1000, msgpack's own 1024
NUMBERS = (
    0, 1, -1, 2, 63, 64, 65, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
TEXTS = (
    "", "\0", "x", "x" * 5000, "..", "../../etc/passwd", "/", "a/b", "\u0661", "1", "0" * 32, "e\u0301", "\U0010ffff", "nan",
    "9" * 30, "[::1]:99999", "all",
)  # fmt: skip


class Raw(bytes):
    """Stands in the encoded tree as it is."""


class Pairs(list[tuple[Any, Any]]):
    """A map whose keys may repeat."""


def odd_value(chance: random.Random, form: str) -> Any:
    kind = chance.randrange(8)
    if kind == 0:
        return Raw(_deep(chance, form))
    if kind == 1:
        return chance.choice(TEXTS)
    if kind == 2:
        return chance.choice((float("nan"), float("inf"), float("-inf"), 0.5, -0.0, 1e308, 1.0))
    if kind == 3:
        return chance.choice(
            (None, True, False, [], {}, [[]], [0] * 70, [None], {"": {}}, {"x": [1]}, [1, 2], ["a", "b"])
        )
    if kind == 4:
        return (
            chance.choice((b"", b"\xff" * 9, b"\0" * 16, chance.randbytes(40)))
            if form == "msgpack"
            else "\ud800"
        )
    if kind == 5:
        return Raw(chance.choice(ODD_BYTES[form]))
    return chance.choice(NUMBERS)


ODD_BYTES: dict[str, tuple[bytes, ...]] = {
    "msgpack": (
        b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xdf\x7f\xff\xff\xff",
        b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xa2\xff\xfe",
        b"\xd9\x02\xc3\x28",
        b"\xd6\xff\x00\x00\x00\x01", b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd4\x05x", b"\xc7\x00\x05",
        b"\xc9\x7f\xff\xff\xff\x05", b"\x81\x90\x90",
        b"\x81\x01\x02", b"\x81\xc4\x01a\x02", b"\x81\xc0\x02", b"\xca\x7f\xc0\x00\x00",
    ),
    "json": (
        b"NaN", b"-Infinity", b"1e999", b"1" * 5000, b"-0", b"1.0", b'"\\ud800"', b'"\xff"', b"nul", b'{"a":1,"a":2}', b"[,]",
        b"1E2", b'"\\u0000"', b"99999999999999999999",
    ),
}  # fmt: skip


def _deep(chance: random.Random, form: str) -> bytes:
    depth = chance.choice(DEPTHS)
    if form == "json":
        begin, end = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return begin * depth + b"0" + end * depth
    return chance.choice((b"\x91", b"\x81\xa1a", b"\x92\xc0")) * depth + b"\xc0"


def parse(data: bytes, form: str) -> Any:
    """Of a valid sample."""
    if form == "json":
        return json.loads(data)
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    return unpacker.unpack()  # zeros may lie behind it


def places(above: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside a list or dict."""
    for key in range(len(above)) if isinstance(above, list) else list(above):
        yield above, key
        if type(above[key]) in (dict, list):
            yield from places(above[key])


def as_json(tree: Any) -> Any:
    """The same tree as far as JSON can say it."""
    if isinstance(tree, dict):
        return {str(key): as_json(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [as_json(value) for value in tree]
    return tree.hex() if isinstance(tree, bytes) else tree


def pack(tree: Any, form: str) -> bytes:
    return _json(tree) if form == "json" else _msgpack(tree)


def _msgpack(tree: Any) -> bytes:
    if isinstance(tree, Raw):
        return bytes(tree)
    if isinstance(tree, dict | Pairs):
        pairs = list(tree.items()) if isinstance(tree, dict) else tree
        return _head(0x80, 0xDE, len(pairs)) + b"".join(_msgpack(k) + _msgpack(v) for k, v in pairs)
    if isinstance(tree, list):
        return _head(0x90, 0xDC, len(tree)) + b"".join(map(_msgpack, tree))
    packed: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
    return packed


def _head(short: int, long: int, count: int) -> bytes:
    if count < 16:
        return bytes([short | count])
    return (
        bytes([long]) + count.to_bytes(2, "big")
        if count < 1 << 16
        else bytes([long + 1]) + count.to_bytes(4, "big")
    )


def _json(tree: Any) -> bytes:
    if isinstance(tree, Raw):
        return bytes(tree)
    if isinstance(tree, dict | Pairs):
        pairs = list(tree.items()) if isinstance(tree, dict) else tree
        return b"{" + b",".join(_json(str(k)) + b":" + _json(v) for k, v in pairs) + b"}"
    if isinstance(tree, list):
        return b"[" + b",".join(map(_json, tree)) + b"]"
    return json.dumps(tree).encode()
