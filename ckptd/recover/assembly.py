"""Slices of one rank, in this node's memory and verified: what lies where."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from ckptd.arena.arena import Slot
from ckptd.arena.segment import Segment
from ckptd.core.state_map.columns import Ints
from ckptd.core.state_map.pieces import Form, Pieces, Placed


@dataclass
class Assembly:
    """``placed``: their segment is an index into ``fds``, which are ours."""

    bytes_by_source: dict[str, int] = field(default_factory=lambda: {"own": 0, "peer": 0, "parity": 0, "durable": 0})
    segment_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    _segment_index: dict[str, int] = field(default_factory=dict)
    _forms: dict[Form, int] = field(default_factory=dict)
    _parts: list[Ints] = field(default_factory=list)

    def put(self, source: str, pieces: Pieces, slot: Slot, at: Ints) -> None:
        """Their stored boxes begin at these bytes of the slot's payload."""
        forms, which = np.unique(pieces.form, return_inverse=True)
        numbers = [self._forms.setdefault(pieces.forms[form], len(self._forms)) for form in forms.tolist()]
        segment, offset = np.empty((2, len(at)), np.int64)
        for whose, some, further in slot.places(at):
            if some.any():
                segment[some], offset[some] = self._index(whose), at[some] + further
        self._parts.append(np.stack((pieces.want, np.array(numbers, np.int64)[which], segment, offset)))
        self.bytes_by_source[source] += int(pieces.nbytes.sum())

    def came_from(self, planned: str, source: str, nbytes: int) -> None:
        """So many of the bytes that were planned to come from there came from another source."""
        self.bytes_by_source[planned] -= nbytes
        self.bytes_by_source[source] += nbytes

    @property
    def placed(self) -> Placed:
        want, form, segment, at = np.concatenate([np.empty((4, 0), np.int64), *self._parts], 1)
        return Placed(want, form, segment, at, [*self._forms])

    def release(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def _index(self, segment: Segment) -> int:
        """The memfd in the plan; read-only, for the rank must not write into it."""
        index = self._segment_index.get(segment.name)
        if index is None:
            index = self._segment_index[segment.name] = len(self.fds)
            self.fds.append(segment.open_read())
            self.segment_bytes.append(segment.size)
        return index
