"""Frozen parameters: captured once into a slot of their own, on which every snapshot leans (design D6).

They are captured anew, into another slot, when a pointer or a version says that they changed. Nothing fences them and versions
can be evaded, so the first snapshot that leans on the copy compares it with its sources, and so does every audit: a
difference means writes behind our back, and the owner becomes synchronous.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ckptd_client.segments import SlotView

Mark = tuple[StorageWeakRef, int, int, int]  # (its storage, data pointer, its version, version of the DTensor around it)


def mark_of(tensor: Tensor, local: Tensor) -> Mark:
    """``local``: what this rank has of ``tensor``. A write to a DTensor does not count as one to its local part, nor the
    other way round. Memory that was let go comes back under the same address, so the storage counts: held weakly, it is no
    other one's as long as the mark lives."""
    storage = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, local.data_ptr(), local._version, tensor._version


@dataclass
class _Held:
    """``done``: all of it is in the slot. ``trusted``: it was the same at a later snapshot."""

    slot: SlotView
    layout_id: str  # of the frozen part
    marks: tuple[Mark, ...]
    done: bool = False
    trusted: bool = False
    found: bool = False  # captured by an earlier life of this rank, or before a restore: whether it is the same is to be seen
    remark: bool = False  # the parameters were written by a restore: what they are now is compared with it


class Statics:
    """What the frozen slot holds; the trainer's thread asks, the capture thread notes."""

    def __init__(self) -> None:
        self._held: _Held | None = None
        self._named: SlotView | None = None  # the daemon was told of it: nobody writes into it any more
        self._lock = threading.Lock()

    # --- the trainer's side -------------------------------------------------------------------------------------
    def slot_of(self, layout_id: str, marks: tuple[Mark, ...]) -> SlotView | None:
        """The slot that holds these very parameters, pinned for the caller."""
        with self._lock:
            held = self._held
            if held is None or not held.done or held.layout_id != layout_id:
                return None
            if held.remark:
                held.marks, held.remark = marks, False
            if held.marks != marks:
                return None
            held.slot.segment.pin()
            return held.slot

    def changed(self, layout_id: str, marks: tuple[Mark, ...]) -> list[int]:
        """Which of them changed since they were captured; none when there is nothing to compare with."""
        with self._lock:
            held = self._held
            if held is None or not held.done or held.layout_id != layout_id:
                return []
            return [i for i, (then, now) in enumerate(zip(held.marks, marks, strict=True)) if then != now]

    def may_fill(self, slot: SlotView) -> bool:
        return slot is not self._named

    def begin(self, slot: SlotView, layout_id: str, marks: tuple[Mark, ...], *, found: bool = False) -> None:
        """A capture into this slot is about to begin; ``found``: into no more than what leans on it, it is full already."""
        self.forget()
        slot.segment.pin()  # compared with later, from another thread than the one that unmaps
        with self._lock:
            self._held = _Held(slot, layout_id, marks, done=found, found=found)
            self._named = slot if found else self._named

    def trusts(self, slot: SlotView) -> bool:
        with self._lock:
            return self._held is not None and self._held.slot is slot and self._held.trusted

    def found(self, slot: SlotView) -> bool:
        with self._lock:
            return self._held is not None and self._held.slot is slot and self._held.found

    def keep_only(self, slots: set[SlotView]) -> None:
        """A slot that is not mapped any more is not looked at again."""
        held = self._held
        if held is not None and held.slot not in slots:
            self.forget(held.slot)

    def doubt(self) -> None:
        """A restore has written the parameters, most likely with what they were: that is to be seen."""
        with self._lock:
            if self._held is not None:
                self._held.found = self._held.remark = True
                self._held.trusted = False

    # --- the capture thread -------------------------------------------------------------------------------------
    def finished(self, slot: SlotView) -> None:
        with self._lock:
            if self._held is not None and self._held.slot is slot:
                self._held.done = True

    def proved(self, slot: SlotView) -> None:
        with self._lock:
            if self._held is not None and self._held.slot is slot:
                self._held.trusted = True

    def names(self, slot: SlotView | None) -> None:
        """The daemon is about to be told that a snapshot leans on it."""
        if slot is not None:
            self._named = slot

    def forget(self, slot: SlotView | None = None) -> None:
        """``slot``: only if it is this one."""
        with self._lock:
            if slot is not None and self._held is not None and self._held.slot is not slot:
                return
            held, self._held = self._held, None
        if held is not None:
            held.slot.segment.unpin()
