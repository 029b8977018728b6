"""Places that are too small: file systems of a few megabytes, and memory cgroups (root)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from tests.waiting import until

EMPTY_S = 10.0
needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts, makes cgroups or namespaces, or becomes somebody else"),
]
T = TypeVar("T")


def for_root(test: T) -> T:
    """The marks of ``needs_root`` on one test of a file."""
    for mark in needs_root:
        test = mark(test)
    return test


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs, such as "8m"."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(path: Path) -> None:
    """To the last byte."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(b"x"):
            pass


class MemoryGroup:
    """A memory cgroup, v1 or v2, of so many bytes."""

    def __init__(self, name: str, nbytes: int) -> None:
        tops = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
        top = next((p for p in tops if (p / "cgroup.procs").exists()), None)
        if top is None:
            pytest.skip("no memory cgroup is mounted")
        self.path = top / name
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        try:
            self.limit(nbytes)
        except OSError as error:
            self.path.rmdir()
            pytest.skip(f"the memory controller is not available here: {error}")

    @property
    def _old(self) -> bool:
        return (self.path / "memory.limit_in_bytes").exists()

    def limit(self, nbytes: int) -> None:
        (self.path / ("memory.limit_in_bytes" if self._old else "memory.max")).write_text(str(nbytes))
        if not self._old:
            (self.path / "memory.swap.max").write_text("0")

    def used(self) -> int:
        """Bytes."""
        return int((self.path / ("memory.usage_in_bytes" if self._old else "memory.current")).read_text())

    @property
    def within(self) -> list[str]:
        """A command that runs the rest of its line in the group."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    def take(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """How many processes the OOM killer took in here."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.path / name).exists():
                lines = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(lines.get("oom_kill", 0))
        return 0

    def close(self) -> None:
        until(lambda: not (self.path / "cgroup.procs").read_text(), EMPTY_S, "the cgroup to be empty")
        self.path.rmdir()
