"""What an export needs of a snapshot, wherever its bytes are: on storage (durable.py), in the memory of a running job (live.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from ckptd.core.state_map.box import Box


class Entry(NamedTuple):
    """A tensor. ``rank``: whose value it is, where each rank had its own. Not ``whole``: each of them has only a part."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    rank: int | None = None
    whole: bool = True


class Source(Protocol):
    """``objects``: names of what is no tensor. ``aliases``: alias -> key. ``notes``: grows with what a reader should know.
    ``identity``: what decides its bytes, so that an export that was killed goes on; None: nobody can say it."""

    notes: list[str]

    @property
    def where(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def identity(self) -> str | None: ...

    @property
    def objects(self) -> Collection[str]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    def tensors(self) -> Iterable[Entry]:
        """Each key once: of what each rank had for itself, the first rank's that has all of it."""

    def blobs(self, name: str) -> bytes | dict[int, bytes]:
        """Of one of the objects; by rank where each rank had its own."""

    def read(self, key: str, box: Box, dest: memoryview, rank: int | None = None) -> None:
        """Fills ``dest`` (the box, packed in C order) with verified bytes. Raises CkptdError."""
