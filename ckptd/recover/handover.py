"""One rank's restore as it is handed over: load plans one after the other (wire.rank.LoadPlan).

There is more than one when the slices lie in more segments than a frame holds, and in direct mode: then the slices did not fit
into memory at once, and each part is fetched into the scratch memory of the one before (design D11).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgpack
import numpy as np

from ckptd.core.state_map.pieces import Placed
from ckptd.recover.assembly import Assembly
from ckptd.wire.rank import LOAD_SEGMENTS_MAX

VERIFIED, DIRECT = "verified", "direct"

Gather = Callable[[int], Awaitable[Assembly]]


@dataclass
class Blobs:
    """A rank's objects in one sealed memfd, the rebuild's: (offset, length) by name, and by name and rank. fd -1: none."""

    fd: int = -1
    size: int = 0
    single: dict[str, tuple[int, int]] = field(default_factory=dict)
    every: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@dataclass(frozen=True)
class Frame:
    """One LoadPlan. ``fds`` stay ours."""

    plan: bytes
    fds: list[int]
    segment_bytes: list[int]


class Handover:
    """``first``: the wants that the rank checks before it writes any other. ``gather(k)``: bring group k of ``groups``;
    group 0 is ``assembly``. Between ``advance`` and the rank's answer nothing touches the memory that the frame names."""

    def __init__(
        self, assembly: Assembly, blobs: Blobs, first: int, *, groups: int = 1, gather: Gather | None = None
    ) -> None:
        self.mode = VERIFIED if gather is None else DIRECT
        self.part = 0
        self.seconds: dict[str, float] = {}
        self.bytes_by_source: dict[str, int] = {}
        self._blobs, self._first = blobs, first
        self._gather, self._group, self._groups = gather, 0, groups
        self._take(assembly)

    @property
    def last(self) -> bool:
        return len(self._runs) == 1 and self._group + 1 == self._groups

    async def advance(self) -> None:
        """To the next part; the rank has copied the one before. Raises CkptdError, OSError, ValueError."""
        assert not self.last, "nothing comes after the last part"
        self.part += 1
        self._runs.pop(0)
        if not self._runs:
            assert self._gather is not None, "one group is there from the beginning"
            self._group += 1
            self._assembly.release()
            self._take(await self._gather(self._group))

    def _take(self, assembly: Assembly) -> None:
        self._assembly, self._fresh = assembly, dict(assembly.bytes_by_source)
        placed = assembly.placed
        order = np.lexsort((placed.want, placed.segment, placed.want >= self._first))
        self._runs = cut(placed.take(order), LOAD_SEGMENTS_MAX - 1)  # the objects' is one more

    def frame(self) -> Frame:
        """The current part; once for each."""
        pieces = self._runs[0]
        used, place = np.unique(pieces.segment, return_inverse=True)
        fds = [self._assembly.fds[segment] for segment in used.tolist()]
        sizes = [self._assembly.segment_bytes[segment] for segment in used.tolist()]
        blobs, at = self._blobs, len(fds)
        if blobs.fd >= 0:
            fds.append(blobs.fd)
            sizes.append(blobs.size)
        plan = {
            "pieces": replace(pieces, segment=place).encode(),
            "objects": {name: [at, *where] for name, where in blobs.single.items()},
            "objects_all": {
                name: {rank: [at, *where] for rank, where in places.items()} for name, places in blobs.every.items()
            },
            "bytes": self._count(),
            "seconds": self.seconds,
            "mode": self.mode,
            "part": self.part,
            "last": self.last,
        }
        packed: bytes = msgpack.packb(plan)
        return Frame(packed, fds, sizes)

    def release(self) -> None:
        self._assembly.release()

    def _count(self) -> dict[str, int]:
        """Bytes by source that no earlier frame has told of."""
        fresh, self._fresh = self._fresh, {}
        for source, nbytes in fresh.items():
            self.bytes_by_source[source] = self.bytes_by_source.get(source, 0) + nbytes
        return fresh


def cut(pieces: Placed, segments_max: int) -> list[Placed]:
    """In this order, each run in at most ``segments_max`` segments. At least one run, which may be empty."""
    ends, used = [0], set[int]()
    changes = np.flatnonzero(np.diff(pieces.segment, prepend=-1))
    for at, segment in zip(changes.tolist(), pieces.segment[changes].tolist(), strict=True):
        if segment not in used and len(used) == segments_max:
            ends.append(at)
            used.clear()
        used.add(segment)
    return [pieces.take(np.arange(begin, end)) for begin, end in pairwise([*ends, len(pieces)])]
