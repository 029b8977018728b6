"""Pieces of a load plan, row by row, as tests make and read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.pieces import Form, Placed

Row = list[Any]  # [want, offsets, sizes, segment, byte, offsets and sizes of the stored box]


def placed(rows: Sequence[Row]) -> Placed:
    columns = np.array([(row[0], at, row[3], row[4]) for at, row in enumerate(rows)], np.int64).reshape(-1, 4).T
    forms = [Form(Box(tuple(row[1]), tuple(row[2])), Box(tuple(row[5]), tuple(row[6]))) for row in rows]
    want, form, segment, at = columns
    return Placed(want, form, segment, at, forms)


def rows_in(plan: dict[str, Any]) -> Iterator[tuple[int, Box, int, int, Box]]:
    """(want, box, segment, byte, stored box) of each piece."""
    for want, (box, stored), segment, at in Placed.decode(plan["pieces"]):
        yield want, box, segment, at, stored
