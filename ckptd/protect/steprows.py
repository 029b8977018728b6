"""Step times as ranks report them: numbers that a well-meaning client may have sent, or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptd.core.pacing.windows import SPANS_MAX
from ckptd.wire.rank import TIMES_MAX

Row = Sequence[float]  # begin and end on the machine's monotonic clock, steps between them, CAPTURED or WAITED (traffic.py)


def check(rows: Sequence[Row], spans: Sequence[Row]) -> None:
    """``spans``: (begin, end) from the newest row's begin. Raises ValueError for what no client sends."""
    if len(rows) > TIMES_MAX or len(spans) > SPANS_MAX or not all(map(_is_row, rows)) or not all(map(_is_span, spans)):
        raise ValueError("step times that are none")


def _is_row(row: Row) -> bool:
    if len(row) != 4 or not all(map(math.isfinite, row)):
        return False
    begin, end, steps, _ = row
    return end > begin and steps >= 1 and (end - begin) / steps < 1e6


def _is_span(span: Row) -> bool:
    return len(span) == 2 and all(map(math.isfinite, span)) and 0 <= span[0] <= span[1]
