"""The simulated accelerator's library: compiled once per source and torch, then loaded into this process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "accelerator"
UNITS = ("runtime", "guard", "kernels")
GRAPHS = "ATen/core/GraphImplInterface.h"
NEEDS = f"a C++ compiler, and a torch with {GRAPHS}"
FLAGS = ("-std=c++20", "-fPIC", "-Wall", "-Wno-unused-function", "-Wno-interference-size")


def library() -> Path:
    """Half a minute the first time. Raises CalledProcessError with the compiler's words on stderr."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock, ThreadPoolExecutor() as pool:  # test workers come at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = list(pool.map(_compiled, UNITS))
        target = BUILT / f"{_digest(*(path.name for path in objects))}.so"
        if not target.exists():
            _run("-shared", "-o", str(target.with_suffix(".made")), *map(str, objects), *_libraries())
            target.with_suffix(".made").rename(target)
            for old in {*BUILT.glob("*.so"), *BUILT.glob("*.o")} - {target, *objects}:
                old.unlink()
    return target


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def has_graphs() -> bool:
    """Has this torch an interface for graphs of a backend? Older ones have not, and what replays them could not be simulated."""
    return any(Path(path, GRAPHS).is_file() for path in cpp_extension.include_paths())


def _compiled(unit: str) -> Path:
    source = HERE / f"{unit}.cpp"
    target = BUILT / f"{unit}-{_digest((HERE / 'runtime.h').read_text(), source.read_text())}.o"
    if not target.exists():
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        _run(*FLAGS, *include, "-c", str(source), "-o", str(target.with_suffix(".made")))
        target.with_suffix(".made").rename(target)
    return target


def _digest(*told: str) -> str:
    return hashlib.sha256("\0".join((torch.__version__, *FLAGS, *told)).encode()).hexdigest()[:16]


def _libraries() -> list[str]:
    folder = str(Path(torch.__file__).parent / "lib")
    return [f"-L{folder}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}"]


def _run(*arguments: str) -> None:
    subprocess.run([compiler() or "g++", *arguments], check=True)
