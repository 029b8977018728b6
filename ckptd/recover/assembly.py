"""One rank's restore, ready to be loaded: what lies where in which memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ckptd.arena.arena import Slot
from ckptd.core.box import Box
from ckptd.core.recovery import Piece


@dataclass
class Assembly:
    """The shape of wire.rank.LoadPlan."""

    pieces: list[list[Any]] = field(default_factory=list)
    objects: dict[str, list[int]] = field(default_factory=dict)
    objects_all: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=lambda: {"own": 0, "peer": 0, "durable": 0})
    seconds: dict[str, float] = field(default_factory=dict)
    segment_bytes: list[int] = field(default_factory=list)
    _fds: list[int] = field(default_factory=list)
    _segment_index: dict[str, int] = field(default_factory=dict)

    def put(self, piece: Piece, slot: Slot, at: int, stored: Box) -> None:
        """The piece lies inside ``stored``, whose first byte is ``at`` in the slot's payload."""
        box = piece.box
        where = [self._segment(slot), slot.offset + at, stored.offsets, stored.sizes]
        self.pieces.append([piece.want, box.offsets, box.sizes, *where])
        self.bytes_by_source[piece.source] += piece.nbytes

    def add(self, fd: int, size: int) -> int:
        """Takes the descriptor. Returns its index in the plan."""
        self._fds.append(fd)
        self.segment_bytes.append(size)
        return len(self._fds) - 1

    def open_segments(self) -> list[int]:
        """Descriptors for sending; the caller closes them."""
        return [os.dup(fd) for fd in self._fds]

    def release(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _segment(self, slot: Slot) -> int:
        """The slot's memfd in the plan; read-only, for the rank must not write into it."""
        index = self._segment_index.get(slot.segment.name)
        if index is None:
            index = self.add(slot.segment.open_read(), slot.segment.size)
            self._segment_index[slot.segment.name] = index
        return index
