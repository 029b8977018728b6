"""What fits: arithmetic before any page is touched (design D1, P8). Headroom is the least of MemAvailable and
what each memory cgroup above us still allows (v1 and v2; inactive page cache counts as free, as the kernel
would drop it).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptd.core.errors import CkptdError

UNLIMITED_BYTES = 1 << 62  # v1 says "no limit" with a number near 2**63
KIB = 1024


class NoMemory(CkptdError):
    """The arena's budget, the machine or a cgroup has no room. Nothing was allocated."""


@dataclass(frozen=True, slots=True)
class Headroom:
    nbytes: int
    limited_by: str  # file that says so
    kills_group: bool = False  # memory.oom.group: the OOM killer would take the daemon along


def headroom(proc: Path = Path("/proc")) -> Headroom:
    """How many bytes can still be touched by this process' cgroup. Unreadable files limit nothing."""
    found = [_machine(proc / "meminfo")]
    for kind, directory, top in _memory_cgroups(proc):
        while True:
            found.append(_cgroup(kind, directory))
            if directory == top or directory == directory.parent:
                break
            directory = directory.parent
    tightest = min(found, key=lambda h: h.nbytes)
    return Headroom(max(0, tightest.nbytes), tightest.limited_by, any(h.kills_group for h in found))


def _machine(path: Path) -> Headroom:
    for line in _lines(path):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return Headroom(int(value.split()[0]) * KIB, str(path))
    return Headroom(UNLIMITED_BYTES, str(path))


def _memory_cgroups(proc: Path) -> list[tuple[str, Path, Path]]:
    """(v1 or v2, our cgroup's directory, the mount's top) for each hierarchy that counts memory."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths["v1" if controllers else "v2"] = path
    found = []
    for line in _lines(proc / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind = _cgroup_kind(after.split())
        if kind in paths:
            found.append((kind, Path(mount) / _below(paths[kind], root), Path(mount)))
    return found


def _cgroup_kind(mount: list[str]) -> str:
    if mount[0] == "cgroup2":
        return "v2"
    return "v1" if mount[0] == "cgroup" and "memory" in mount[-1].split(",") else ""


def _below(path: str, root: str) -> PurePosixPath:
    """A container may see only a part of the hierarchy: its mount begins at ``root``."""
    try:
        return PurePosixPath(path).relative_to(root)
    except ValueError:
        return PurePosixPath()


_FILES = {  # limits, usage, the line of memory.stat that counts droppable cache
    "v2": (("memory.max", "memory.high"), "memory.current", "inactive_file "),
    "v1": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file "),
}


def _cgroup(kind: str, directory: Path) -> Headroom:
    limits, usage_name, cache_name = _FILES[kind]
    limit, where = min((_number(directory / name), str(directory / name)) for name in limits)
    group = _number(directory / "memory.oom.group", 0) == 1
    if limit >= UNLIMITED_BYTES:
        return Headroom(UNLIMITED_BYTES, where, group)
    usage = _number(directory / usage_name, 0)
    stat = _lines(directory / "memory.stat")
    cache = next((int(line.split()[1]) for line in stat if line.startswith(cache_name)), 0)
    return Headroom(limit - usage + min(cache, usage), where, group)


def _number(path: Path, missing: int = UNLIMITED_BYTES) -> int:
    text = "".join(_lines(path)[:1])
    return int(text) if text.isdigit() else missing


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
