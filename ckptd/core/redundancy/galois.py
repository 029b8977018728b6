"""Arithmetic of GF(2^8) and the coefficients of Reed-Solomon parity over it.

Bytes are polynomials over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), the field that ISA-L computes in: addition is XOR. A
group has ``data`` + ``parity`` columns of equal length, numbered 0..data-1 (data) and data..data+parity-1 (parity); parity column
``data + i`` is the sum over j of ``coefficient(i, j)`` times data column j. Any ``data`` of the columns give back all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

POLYNOMIAL = 0x11D
COLUMNS_MAX = 255  # of a group, data and parity together

Matrix = tuple[tuple[int, ...], ...]


def _powers() -> tuple[bytes, bytes]:
    """2^n for n < 510 (twice around, so that sums of logarithms need no modulo), and the logarithm of each byte."""
    power, log, value = bytearray(510), bytearray(256), 1
    for exponent in range(255):
        power[exponent] = power[exponent + 255] = value
        log[value] = exponent
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    return bytes(power), bytes(log)


_POWER, _LOG = _powers()


def mul(a: int, b: int) -> int:
    """The product of two bytes. IndexError: not bytes."""
    return _POWER[_LOG[a] + _LOG[b]] if a and b else 0


def inv(a: int) -> int:
    """1 / a. ZeroDivisionError: a is 0."""
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return _POWER[255 - _LOG[a]]


@lru_cache(maxsize=256)
def products(coefficient: int) -> bytes:
    """``coefficient`` times each of 0..255: 256 bytes."""
    return bytes(mul(coefficient, value) for value in range(256))


def inverse(matrix: Sequence[Sequence[int]]) -> Matrix:
    """The inverse of a square matrix, by Gauss-Jordan elimination. ValueError: not square, or singular."""
    size = len(matrix)
    if any(len(row) != size for row in matrix):
        raise ValueError("the matrix is not square")
    rows = [list(row) + [int(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if rows[i][column]), None)
        if pivot is None:
            raise ValueError("the matrix is singular")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = _scaled(rows[column], inv(rows[column][column]))
        for i in range(size):
            if i != column and rows[i][column]:
                rows[i] = _added(rows[i], rows[column], rows[i][column])
    return tuple(tuple(row[size:]) for row in rows)


def coefficient(parity_row: int, data_column: int) -> int:
    """What data column ``data_column`` is multiplied with in parity row ``parity_row``, whatever the size of the group.

    The Cauchy matrix 1 / (x_i + y_j) with x_i = i and y_j = 255 - j, its columns and then its rows scaled so that the first row
    and the first column are ones. Every square submatrix of a Cauchy matrix is regular and scaling keeps it so: the code is
    MDS. Row 0 is plain XOR, and a smaller group's matrix is a corner of a larger one's.
    """
    x, y = parity_row, 255 - data_column
    column_scale = y  # 1 / (the entry of row 0): x_0 is 0
    row_scale = mul(x ^ 255, inv(255))  # 1 / (the entry of column 0 after that): y_0 is 255
    return mul(mul(column_scale, row_scale), inv(x ^ y))


@lru_cache(maxsize=64)
def parity_matrix(data: int, parity: int) -> Matrix:
    """``parity`` rows of ``data`` coefficients. ValueError: fewer than one of either, or more than COLUMNS_MAX together."""
    _check_group(data, parity)
    return tuple(tuple(coefficient(i, j) for j in range(data)) for i in range(parity))


def recovery_row(data: int, parity: int, have: Sequence[int], want: int) -> tuple[int, ...]:
    """Coefficients such that column ``want`` = the sum over ``have``, in its order, of coefficient times column.

    ``have``: exactly ``data`` different columns. ValueError: it is not, or a column is none of the group's.
    """
    _check_group(data, parity)
    columns = data + parity
    if len(have) != data or len(set(have)) != data:
        raise ValueError(f"{data} different columns are needed, not {list(have)}")
    if not all(0 <= column < columns for column in (*have, want)):
        raise ValueError(f"the columns are 0 to {columns - 1}: {list(have)} -> {want}")
    return _recovery_row(data, parity, tuple(have), want)


@lru_cache(maxsize=1024)
def _recovery_row(data: int, parity: int, have: tuple[int, ...], want: int) -> tuple[int, ...]:
    if want in have:
        return tuple(int(column == want) for column in have)
    place = {column: at for at, column in enumerate(have)}
    lost = [column for column in range(data) if column not in place]
    if want < data:
        return tuple(_lost_data(data, have, place, lost)[lost.index(want)])
    row = [0] * data
    for column in range(
        data
    ):  # the parity row over its data, lost data replaced by what it is recovered from
        if column in place:
            row[place[column]] ^= coefficient(want - data, column)
    if lost:
        for column, source in zip(lost, _lost_data(data, have, place, lost), strict=True):
            row = _added(row, source, coefficient(want - data, column))
    return tuple(row)


def _lost_data(data: int, have: tuple[int, ...], place: dict[int, int], lost: list[int]) -> list[list[int]]:
    """A row over ``have`` for each lost data column. Of k equations only as many need solving as data columns are lost: each
    surviving parity column, less the surviving data in it, is a sum over the lost ones."""
    rows = [column - data for column in have if column >= data]
    solved = inverse([[coefficient(i, j) for j in lost] for i in rows])
    known = []
    for i in rows:
        row = [0] * data
        row[place[data + i]] = 1
        for column, at in place.items():
            if column < data:
                row[at] = coefficient(i, column)
        known.append(row)
    found = []
    for factors in solved:
        row = [0] * data
        for factor, other in zip(factors, known, strict=True):
            row = _added(row, other, factor)
        found.append(row)
    return found


def _check_group(data: int, parity: int) -> None:
    if data < 1 or parity < 1 or data + parity > COLUMNS_MAX:
        raise ValueError(
            f"{data} data and {parity} parity columns: at least 1 of each, at most {COLUMNS_MAX} in all"
        )


def _scaled(row: Sequence[int], factor: int) -> list[int]:
    return list(bytes(row).translate(products(factor)))


def _added(row: Sequence[int], other: Sequence[int], factor: int) -> list[int]:
    """row + factor * other."""
    return [a ^ b for a, b in zip(row, bytes(other).translate(products(factor)), strict=True)]
