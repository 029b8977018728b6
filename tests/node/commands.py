"""Running the command line in this process; the fixture `cli` is in conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Ran]


def places(folder: Path) -> list[str]:
    return ["--state-dir", str(folder / "state"), "--socket", str(folder / "ckptd.sock")]
