"""How commands print: JSON for machines, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptd.units import format_bytes

NONE = "-"
PIPE_COLUMNS = 160


def console() -> Console:
    """As wide as the terminal; wide enough not to fold paths where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def plain(text: str) -> str:
    """Lines of what can be printed: who may name a directory, or a tensor, does not write into the terminal of who looks (D20)."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Text cells (never markup: names come from users); a column whose name begins with ``>`` is right-aligned."""
    made = Table(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0)
    )
    for column in columns:
        made.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(plain(str(cell))) for cell in row))
    return made


def good(is_good: bool, yes: str = "ok", no: str = "NO") -> Text:
    return Text(yes, style="green") if is_good else Text(no, style="bold red")


def step(number: int | None) -> str:
    return NONE if number is None or number < 0 else str(number)


def size(nbytes: int | None) -> str:
    return NONE if nbytes is None else format_bytes(nbytes)


def when(unix_time: float | None) -> str:
    return NONE if unix_time is None else datetime.fromtimestamp(unix_time).strftime("%Y-%m-%d %H:%M:%S")
