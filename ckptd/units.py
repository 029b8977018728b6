"""Bytes as people write them, and how much memory this machine (or its cgroup) has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_bytes(text: str) -> int:
    """``1048576``, ``16GiB``, ``1.5 TB``, ``512M`` (binary) -> bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 1048576, 512MiB or 16GiB")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_budget(text: str, whole_bytes: int) -> int:
    """A size, or a share of ``whole_bytes`` such as ``70%``. Raises ValueError."""
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        return parse_bytes(text)
    share = float(match[1])
    if not 0 < share <= 100:
        raise ValueError(f"{text!r} is not a share between 0% and 100%")
    return int(whole_bytes * share / 100)


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def machine_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process may use at most: the machine's, or the smallest limit of a cgroup around it."""
    return min([_total_bytes(proc), *_cgroup_limits(proc, cgroups)])


def _total_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{proc}/meminfo names no MemTotal")


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits_up(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_up(cgroups / "memory", path, "memory.limit_in_bytes")


def _limits_up(root: Path, path: str, name: str) -> Iterator[int]:
    """The limit of the cgroup and of each one above it (v2 ``max`` and v1's huge number mean none)."""
    here = root / path.lstrip("/")
    for folder in (here, *here.parents):
        if (folder / name).is_file():
            text = (folder / name).read_text().strip()
            if text.isdigit():
                yield int(text)
        if folder == root:
            return
