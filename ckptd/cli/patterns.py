"""`--only` of several commands: shell patterns of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase


def chosen(patterns: Iterable[str]) -> Callable[[str], bool]:
    """None: all names."""
    given = list(patterns)
    return lambda name: not given or any(fnmatchcase(name, pattern) for pattern in given)
