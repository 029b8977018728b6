"""Frozen parameters: copied into each slot once, and again when their pointer or version changes (design D6).

Nothing fences them and versions can be evaded, so a new copy is compared with an earlier slot's, and an old one with its
source the first time it is used again: a difference means writes behind our back, and the owner becomes synchronous.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field

from torch import Tensor

from ckptd_client import libc
from ckptd_client.copying import Copy
from ckptd_client.segments import SlotView


class Known(enum.Enum):
    NO = enum.auto()
    UNPROVEN = enum.auto()  # copied once, not yet seen to stay the same
    YES = enum.auto()


Mark = tuple[int, int]  # (data pointer, version)


def mark_of(tensor: Tensor) -> Mark:
    return tensor.data_ptr(), tensor._version


@dataclass
class _Copied:
    mark: Mark
    address: int
    nbytes: int
    trusted: bool = False  # still the same bytes at a later snapshot


@dataclass
class _Held:
    layout_id: str
    copies: dict[str, _Copied] = field(default_factory=dict)


class Statics:
    """What each slot holds of the frozen parameters; the trainer's thread asks, the capture thread notes."""

    def __init__(self) -> None:
        self._slots: dict[SlotView, _Held] = {}
        self._lock = threading.RLock()

    def held(self, slot: SlotView, layout_id: str, copy: Copy, mark: Mark) -> Known:
        """Does the slot hold it already?"""
        with self._lock:
            held = self._slots.get(slot)
            known = held.copies.get(_name(copy)) if held is not None and held.layout_id == layout_id else None
            if known is None or known.mark != mark:
                return Known.NO
            return Known.YES if known.trusted else Known.UNPROVEN

    def proved(self, slot: SlotView, copy: Copy) -> bool:
        """The first time a copy is used again, look whether it is still true. False: written behind our back."""
        same = not any(copy.differs(begin, length) for begin, length in copy.chunks())
        with self._lock:
            held = self._slots.get(slot)
            if held is not None and _name(copy) in held.copies:
                held.copies[_name(copy)].trusted = same
        return same

    def copied(self, slot: SlotView, layout_id: str, copy: Copy, mark: Mark) -> bool:
        """Note a finished copy. False: another slot holds other bytes under the same pointer and version."""
        with self._lock:
            others = (
                held.copies.get(_name(copy)) for other, held in self._slots.items() if other is not slot
            )
            twin = next(
                (o for o in others if o is not None and o.mark == mark and o.nbytes == copy.nbytes), None
            )
            self._of(slot, layout_id).copies[_name(copy)] = _Copied(mark, copy.target, copy.nbytes)
            return twin is None or not libc.differ(twin.address, copy.target, copy.nbytes)

    def _of(self, slot: SlotView, layout_id: str) -> _Held:
        held = self._slots.get(slot)
        if held is None or held.layout_id != layout_id:
            self.forget(slot)
            slot.segment.pin()  # compared with later, from another thread than the one that unmaps
            held = self._slots[slot] = _Held(layout_id)
        return held

    def forget(self, slot: SlotView) -> None:
        with self._lock:
            if self._slots.pop(slot, None) is not None:
                slot.segment.unpin()

    def keep_only(self, slots: set[SlotView]) -> None:
        """Slots that are not mapped any more are not looked at again."""
        with self._lock:
            for slot in [slot for slot in self._slots if slot not in slots]:
                self.forget(slot)


def _name(copy: Copy) -> str:
    return f"{copy.key}#{copy.fragment}"
