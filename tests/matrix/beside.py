"""python -m tests.matrix.beside FIRST SECOND: what is installed in one virtual environment is there in the other, too."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def packages(environment: str) -> Path:
    root = str(Path(environment).resolve())
    return Path(sysconfig.get_path("purelib", "venv", {"base": root, "platbase": root}))


if __name__ == "__main__":
    first, second = map(packages, sys.argv[1:3])
    (second / "beside.pth").write_text(f"import site; site.addsitedir({str(first)!r})\n")
