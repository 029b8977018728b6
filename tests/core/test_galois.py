"""GF(2^8) and the parity matrix: a field, and a code from which any columns that are enough give back all others."""

from __future__ import annotations

import itertools
import random

import pytest

from ckptd.core.redundancy.galois import (
    COLUMNS_MAX,
    POLYNOMIAL,
    Matrix,
    coefficient,
    inv,
    inverse,
    mul,
    parity_matrix,
    products,
    recovery_row,
)  # fmt: skip


def long_mul(a: int, b: int) -> int:
    """The definition: polynomials multiplied, then reduced modulo 0x11d."""
    product = 0
    for bit in range(8):
        product ^= a << bit if b >> bit & 1 else 0
    for bit in range(15, 7, -1):
        product ^= POLYNOMIAL << (bit - 8) if product >> bit & 1 else 0
    return product


def columns(data: list[int], parity: int) -> list[int]:
    """The bytes of a group whose data columns are one byte long."""
    rows = parity_matrix(len(data), parity)
    return data + [summed(row, data) for row in rows]


def summed(row: tuple[int, ...], values: list[int]) -> int:
    total = 0
    for factor, value in zip(row, values, strict=True):
        total ^= long_mul(factor, value)
    return total


def test_products_are_those_of_polynomials_modulo_0x11d() -> None:
    assert all(mul(a, b) == long_mul(a, b) for a in range(256) for b in range(256))
    assert all(products(a)[b] == long_mul(a, b) for a in range(256) for b in range(256))


def test_every_byte_but_0_has_an_inverse() -> None:
    assert all(mul(a, inv(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inv(0)


def test_an_inverse_matrix_times_its_matrix_is_one() -> None:
    chance = random.Random(1)
    for size in (1, 2, 3, 8, 20):
        matrix = [[chance.randrange(256) for _ in range(size)] for _ in range(size)]
        try:
            found = inverse(matrix)
        except ValueError:
            continue  # by chance singular, 1 in 256
        assert gives_one(matrix, found)
    with pytest.raises(ValueError, match="singular"):
        inverse([[1, 2], [2, 4]])
    with pytest.raises(ValueError, match="square"):
        inverse([[1, 2]])


def gives_one(matrix: list[list[int]], found: Matrix) -> bool:
    """Is ``found`` its inverse?"""
    places = itertools.product(range(len(matrix)), repeat=2)
    return all(summed(found[i], [row[j] for row in matrix]) == int(i == j) for i, j in places)


def test_one_parity_is_plain_xor_and_costs_nothing_more_in_a_larger_code() -> None:
    assert parity_matrix(7, 1) == ((1,) * 7,)
    assert parity_matrix(7, 3)[0] == (1,) * 7
    assert all(row[0] == 1 for row in parity_matrix(7, 3))


def test_a_smaller_group_is_a_corner_of_a_larger_one() -> None:
    """A group that is not full is one whose other columns are zeros: same coefficients."""
    whole = parity_matrix(20, 5)
    assert parity_matrix(6, 2) == tuple(row[:6] for row in whole[:2])


@pytest.mark.parametrize(("data", "parity"), [(k, m) for k in range(1, 9) for m in range(1, 6)])
def test_every_square_submatrix_of_a_small_parity_matrix_is_regular(data: int, parity: int) -> None:
    """Exactly the condition for MDS: any ``parity`` losses can be solved for."""
    matrix = parity_matrix(data, parity)
    for size in range(1, min(data, parity) + 1):
        for rows in itertools.combinations(range(parity), size):
            for chosen in itertools.combinations(range(data), size):
                square = [[matrix[i][j] for j in chosen] for i in rows]
                assert gives_one(square, inverse(square))


def test_every_submatrix_of_two_rows_is_regular_up_to_the_largest_group() -> None:
    """All codes with one or two parities, all sizes: no entry is 0 and no 2 x 2 determinant is."""
    rows = [[coefficient(i, j) for j in range(253)] for i in (0, 1)]
    assert all(all(row) for row in rows)
    ratios = [mul(a, inv(b)) for a, b in zip(*rows, strict=True)]
    assert len(set(ratios)) == len(ratios)


def test_random_submatrices_of_large_codes_are_regular() -> None:
    chance = random.Random(2)
    for _ in range(300):
        data = chance.randrange(9, COLUMNS_MAX)
        parity = chance.randrange(1, COLUMNS_MAX - data + 1)
        size = chance.randrange(1, min(data, parity, 12) + 1)
        rows = chance.sample(range(parity), size)
        chosen = chance.sample(range(data), size)
        square = [[coefficient(i, j) for j in chosen] for i in rows]
        assert gives_one(square, inverse(square))


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (4, 2), (3, 3), (5, 3)])
def test_any_enough_columns_give_every_other(data: int, parity: int) -> None:
    chance = random.Random(data * 10 + parity)
    group = columns([chance.randrange(256) for _ in range(data)], parity)
    for have in itertools.permutations(range(data + parity), data):
        for want in range(data + parity):
            row = recovery_row(data, parity, have, want)
            assert summed(row, [group[i] for i in have]) == group[want]


def test_random_losses_of_large_groups_are_recovered() -> None:
    chance = random.Random(3)
    for data, parity in [(200, 3), (64, 16), (10, 100), (254, 1), (1, 254), (128, 127)]:
        group = columns([chance.randrange(256) for _ in range(data)], parity)
        have = chance.sample(range(data + parity), data)
        for want in chance.sample(range(data + parity), 3):
            row = recovery_row(data, parity, have, want)
            assert summed(row, [group[i] for i in have]) == group[want]


@pytest.mark.parametrize(
    ("data", "parity", "have", "want"),
    [
        (4, 2, (0, 1, 2), 3),  # too few
        (4, 2, (0, 1, 2, 4, 5), 3),  # too many
        (4, 2, (0, 1, 2, 2), 3),  # one twice
        (4, 2, (0, 1, 2, 6), 3),  # none of the group
        (4, 2, (0, 1, 2, -1), 3),
        (4, 2, (0, 1, 2, 4), 6),
        (0, 2, (), 0),
        (4, 0, (0, 1, 2, 3), 0),
        (200, 56, tuple(range(200)), 0),  # 256 columns
    ],
)
def test_what_cannot_be_asked_is_refused(data: int, parity: int, have: tuple[int, ...], want: int) -> None:
    with pytest.raises(ValueError, match=r"column|group|data"):
        recovery_row(data, parity, have, want)


def test_a_matrix_of_an_impossible_size_is_refused() -> None:
    for data, parity in [(0, 1), (1, 0), (-1, 2), (255, 1), (1, 255)]:
        with pytest.raises(ValueError, match="at most 255"):
            parity_matrix(data, parity)
