"""A folder for parsers that open files by name; it goes with the process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def folder() -> Path:
    made = tempfile.mkdtemp(prefix="ckptd-fuzz-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)
