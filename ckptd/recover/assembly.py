"""Slices of one rank, in this node's memory and verified: what lies where."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ckptd.arena.arena import Slot
from ckptd.arena.segment import Segment
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.recovery import Piece


@dataclass
class Assembly:
    """``pieces``: rows of wire.rank.LoadPlan; their segment is an index into ``fds``, which are ours."""

    pieces: list[list[Any]] = field(default_factory=list)
    bytes_by_source: dict[str, int] = field(default_factory=lambda: {"own": 0, "peer": 0, "parity": 0, "durable": 0})
    segment_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    _segment_index: dict[str, int] = field(default_factory=dict)

    def put(self, piece: Piece, slot: Slot, at: int, stored: Box) -> None:
        """The piece lies inside ``stored``, whose first byte is ``at`` in the slot's payload."""
        box = piece.box
        segment, offset = slot.place(at)
        where = [self._index(segment), offset, stored.offsets, stored.sizes]
        self.pieces.append([piece.want, box.offsets, box.sizes, *where])
        self.bytes_by_source[piece.source] += piece.nbytes

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
