"""Folders for sockets: the path of one is at most 107 bytes, and pytest's tmp_path alone may take those."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEEP = "KEEP_TMP"  # KEEP_TMP=1: what tests wrote stays, see docs/TESTING.md


def kept() -> bool:
    return os.environ.get(KEEP, "") not in ("", "0")


@contextmanager
def short_folder() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="ckptd-"))
    try:
        yield root
    finally:
        if not kept():
            shutil.rmtree(root, ignore_errors=True)
