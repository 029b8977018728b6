"""One target under atheris, in a process of its own: libFuzzer ends it without a chance to clean up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0  # to import and instrument
MISSING = "atheris is not installed: pip install -e '.[fuzz]'"


def guided(name: str, seconds: int, folder: Path) -> tuple[list[Path], str]:
    """(inputs of findings, what libFuzzer said). Its own way of failing (memory, a crash of C code) is a finding, too."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob(f"{name}-*"))
    with tempfile.TemporaryDirectory(prefix="ckptd-fuzz-") as scratch:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.guided", name, str(seconds), str(folder.resolve())],
            cwd=ROOT, env={**os.environ, "TMPDIR": scratch}, text=True, timeout=3 * seconds + START_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    found = sorted(set(folder.glob(f"{name}-*")) - before)
    if ran.returncode and not found:
        raise RuntimeError(f"{name}: {ran.stdout[-3000:]}")
    return found, ran.stdout
