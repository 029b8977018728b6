"""Parity over rows of bytes, for the simulated daemons and for the oracle: XOR and Reed-Solomon, written anew from the design.

A parity set has n positions, of which each has a row of data (or none), and m rows of parity per stripe (D8; REFT's rotation).
Stripe s has its parity at the positions s, s+1, ... s+m-1 (around the end); every other position has one chunk of its row in
it. So a position's row is cut into n - m chunks, and it holds m chunks of parity, in the order of their stripes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate, repeat

POLYNOMIAL = 0x11D


def _doubled(value: int) -> int:
    return value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)


_POWERS = list(accumulate(repeat(1, 255), lambda value, _: _doubled(value)))
_LOGS = {value: at for at, value in enumerate(_POWERS)}


def times(a: int, b: int) -> int:
    return _POWERS[(_LOGS[a] + _LOGS[b]) % 255] if a and b else 0


def inverse(a: int) -> int:
    return _POWERS[-_LOGS[a] % 255]


def factor(m: int, row: int, position: int) -> int:
    """What a position's chunk counts in this row of parity: plain XOR for one row, Cauchy's matrix for more."""
    return 1 if m == 1 else inverse((255 - row) ^ position)


@lru_cache(maxsize=256)
def _products(by: int) -> bytes:
    return bytes(times(by, value) for value in range(256))


def _added(to: int, chunk: bytes, by: int) -> int:
    return to ^ int.from_bytes(chunk.translate(_products(by)) if by != 1 else chunk, "big")


def _parity_at(n: int, m: int, stripe: int) -> list[int]:
    """The position of each row of parity."""
    return [(stripe + row) % n for row in range(m)]


def chunk_bytes(n: int, m: int, longest: int) -> int:
    """longest: bytes of the longest row."""
    return max(1, -(-longest // (n - m)))


def _chunk(row: bytes, n: int, m: int, position: int, stripe: int, size: int) -> bytes:
    """Of a position's row, what lies in this stripe."""
    before = sum(position not in _parity_at(n, m, other) for other in range(stripe))
    return row[before * size : (before + 1) * size].ljust(size, b"\0")


def _held_by(n: int, m: int, position: int) -> list[tuple[int, int]]:
    """(stripe, row) of the parity that a position holds, by stripe."""
    return [(s, _parity_at(n, m, s).index(position)) for s in range(n) if position in _parity_at(n, m, s)]


def encode(n: int, m: int, rows: Mapping[int, bytes], position: int, longest: int) -> bytes:
    """What ``position`` holds of parity. rows: by position; those that are not there count as zeros."""
    size, out = chunk_bytes(n, m, longest), b""
    for stripe, row in _held_by(n, m, position):
        total = 0
        for at, data in rows.items():
            if at not in _parity_at(n, m, stripe):
                total = _added(total, _chunk(data, n, m, at, stripe, size), factor(m, row, at))
        out += total.to_bytes(size, "big")
    return out


def decode(
    n: int, m: int, lengths: Mapping[int, int], rows: Mapping[int, bytes], shards: Mapping[int, bytes]
) -> dict[int, bytes] | None:
    """Every row again. lengths: of all rows, by position. None: something of some row cannot be had."""
    size = chunk_bytes(n, m, max(lengths.values(), default=0))
    lost = [at for at in lengths if at not in rows]
    found: dict[int, list[bytes]] = {at: [] for at in lost}
    for stripe in range(n) if lost else ():
        parity = _parity_at(n, m, stripe)
        unknown = [at for at in lost if at not in parity]
        equations: list[tuple[list[int], bytes]] = []
        for row, holder in enumerate(parity):
            if holder in shards and len(equations) < len(unknown):
                place = _held_by(n, m, holder).index((stripe, row))
                total = int.from_bytes(shards[holder][place * size : (place + 1) * size], "big")
                for at, data in rows.items():
                    if at not in parity:
                        total = _added(total, _chunk(data, n, m, at, stripe, size), factor(m, row, at))
                equations.append(([factor(m, row, at) for at in unknown], total.to_bytes(size, "big")))
        if len(equations) < len(unknown):
            return None
        for at, chunk in zip(unknown, _solved(equations, size), strict=True):
            found[at].append(chunk)
    return {**rows, **{at: b"".join(chunks)[: lengths[at]] for at, chunks in found.items()}}


def _solved(equations: list[tuple[list[int], bytes]], size: int) -> list[bytes]:
    """Gauss and Jordan. Every square part of Cauchy's matrix is regular."""
    rows = [(list(factors), value) for factors, value in equations]
    for column in range(len(rows)):
        pivot = next(at for at in range(column, len(rows)) if rows[at][0][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        by = inverse(rows[column][0][column])
        factors, value = [times(by, f) for f in rows[column][0]], rows[column][1].translate(_products(by))
        rows[column] = factors, value
        for at, (others, other) in enumerate(rows):
            if at != column and others[column]:
                less = others[column]
                total = _added(int.from_bytes(other, "big"), value, less)
                rows[at] = [a ^ times(less, b) for a, b in zip(others, factors, strict=True)], total.to_bytes(size, "big")
    return [value for _, value in rows]
