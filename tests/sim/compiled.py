"""python -m tests.sim.compiled DIR: the core and the simulator compiled by mypyc into a copy, for a long soak.

The worlds are the same, event for event, at 1.8 times the speed; `cd DIR && python -m tests.sim --seeds A:B` runs them. What goes
over the simulated wire, or is subclassed by tests, stays as it is: compiled it would have another size or other rules. So does a
dataclass with a field of type object, which mypyc cannot import.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("ckptd", "client", "tests")
INTERPRETED = (
    "box", "errors", "events", "failpoint", "fragments", "ids", "instructions", "joining", "parity_sets", "layout", "messages",
    "policy", "recovery", "policies", "retention",
)  # fmt: skip
SIMULATOR = (
    "clock", "copies", "decisions", "disk", "evidence", "faults", "fetch", "field", "forgetting", "host", "judge", "links",
    "moments", "net", "oracle", "parity", "seasons", "shape", "state", "steps", "store", "trainer", "training", "wire", "world",
    "writes",
)  # fmt: skip
SETTINGS = "[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n"


def compile_into(target: Path) -> None:
    """Minutes. Raises FileExistsError: there is something. CalledProcessError: see what mypyc printed."""
    target.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    (target / "mypy.ini").write_text(SETTINGS)
    core = sorted((target / "ckptd/core").rglob("*.py"))
    chosen = [path for path in core if path.stem not in INTERPRETED]
    chosen += [target / f"tests/sim/{name}.py" for name in SIMULATOR]
    mypyc = Path(sys.executable).with_name("mypyc")
    command = [str(mypyc), "--config-file", "mypy.ini", *(str(path.relative_to(target)) for path in chosen)]
    subprocess.run(command, cwd=target, check=True, env={**os.environ, "MYPYC_OPT_LEVEL": "1"})


if __name__ == "__main__":
    compile_into(Path(sys.argv[1]))
