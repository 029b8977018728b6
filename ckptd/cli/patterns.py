"""`--only` of several commands: shell patterns of names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ckptd.core.errors import CkptdError


class Chosen:
    """Does one of the patterns fit a name? Without patterns all names do."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._given = list(patterns)
        self._idle = {*self._given}

    def __call__(self, name: str) -> bool:
        fitting = [pattern for pattern in self._given if fnmatchcase(name, pattern)]
        self._idle.difference_update(fitting)
        return bool(fitting) or not self._given

    def check(self) -> None:
        """After all names. Raises CkptdError: who compares nothing finds no difference."""
        if self._idle:
            hint = "a pattern is of a whole name, as 'model.*'; `ckptd ls --tensors '*' PATH` shows them"
            raise CkptdError(f"fits no name: {', '.join(sorted(self._idle))}", where="--only", hint=hint)
