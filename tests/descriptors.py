"""What this process has open, in tests of leaks: named, not counted. The garbage collection may close what an earlier test left
while another test counts, and a leak could hide behind that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

HERE = "/proc/self/fd"


def opened() -> frozenset[tuple[int, str]]:
    """(descriptor, what it is)."""
    found = set()
    for number in map(int, os.listdir(HERE)):
        with contextlib.suppress(OSError):  # that of this very listing
            found.add((number, os.readlink(f"{HERE}/{number}")))
    return frozenset(found)


def opened_since(before: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    return sorted(opened() - set(before))
