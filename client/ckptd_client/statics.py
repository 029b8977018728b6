"""Frozen parameters: captured once into a slot of their own, on which every snapshot leans (design D6).

They are captured anew, into another slot, when a pointer, a version or a sample of their bytes says that they changed. Nothing
fences them and a small write can evade all three, so the first snapshot that leans on the copy compares it with its sources,
and so does every audit: a difference means writes behind our back, and the owner becomes synchronous.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ckptd_client.samples import Samples
from ckptd_client.segments import SlotView

Mark = tuple[StorageWeakRef, int, int, int]  # (its storage, data pointer, its version, version of the DTensor around it)


def mark_of(tensor: Tensor, local: Tensor) -> Mark:
    """``local``: what this rank has of ``tensor``. A write to a DTensor does not count as one to its local part, nor the
    other way round. Memory that was let go comes back under the same address, so the storage counts: held weakly, it is no
    other one's as long as the mark lives."""
    storage = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, local.data_ptr(), local._version, tensor._version


@dataclass(frozen=True)
class Content:
    """What frozen parameters are at one moment."""

    layout_id: str  # of the frozen part
    marks: tuple[Mark, ...]
    samples: bytes
    of: Samples = field(compare=False)

    def changed(self, now: Content) -> list[int]:
        """Which of them are others now."""
        moved = {i for i, (then, mark) in enumerate(zip(self.marks, now.marks, strict=True)) if then != mark}
        return sorted(moved | set(self.of.differing(self.samples, now.samples)))


class Look:
    """Looks at frozen parameters. Their samples lie where they lay for as long as the marks are what they were."""

    def __init__(self) -> None:
        self._before: Content | None = None

    def at(self, layout_id: str, tensors: Sequence[tuple[Tensor, Tensor]], boxes: Callable[[], list[Tensor]]) -> Content:
        """``tensors``: each with what this rank has of it. ``boxes``: what of that it captures."""
        before, marks = self._before, tuple(mark_of(tensor, local) for tensor, local in tensors)
        if before is None or (before.layout_id, before.marks) != (layout_id, marks):
            samples = Samples(boxes())
        else:
            samples, marks = before.of, before.marks  # the very same: comparing them with what is held takes no time
        self._before = Content(layout_id, marks, samples.read(), samples)
        return self._before


@dataclass
class _Held:
    """``done``: all of it is in the slot. ``trusted``: it was the same at a later snapshot."""

    slot: SlotView
    content: Content
    done: bool = False
    trusted: bool = False
    found: bool = False  # captured by an earlier life of this rank, or before a restore: whether it is the same is to be seen
    remark: bool = False  # the parameters were written by a restore: what they are now is compared with it
    leaning: tuple[int, int] | None = None  # first and last step sealed since all of it was compared


class Statics:
    """What the frozen slot holds; the trainer's thread asks, the capture thread notes."""

    def __init__(self) -> None:
        self._held: _Held | None = None
        self._named: SlotView | None = None  # the daemon was told of it: nobody writes into it any more
        self._lock = threading.Lock()

    # --- the trainer's side -------------------------------------------------------------------------------------
    def slot_of(self, content: Content) -> SlotView | None:
        """The slot that holds these very parameters, pinned for the caller."""
        with self._lock:
            held = self._held
            if held is None or not held.done or held.content.layout_id != content.layout_id:
                return None
            if held.remark:
                held.content, held.remark = content, False
            if held.content != content:
                return None
            held.slot.segment.pin()
            return held.slot

    def changed(self, content: Content) -> list[int]:
        """Which of them changed since they were captured; none when there is nothing to compare with."""
        with self._lock:
            held = self._held
            if held is None or not held.done or held.content.layout_id != content.layout_id:
                return []
            return held.content.changed(content)

    def may_fill(self, slot: SlotView) -> bool:
        return slot is not self._named

    def begin(self, slot: SlotView, content: Content, *, found: bool = False) -> None:
        """A capture into this slot is about to begin; ``found``: into no more than what leans on it, it is full already."""
        self.forget()
        slot.segment.pin()  # compared with later, from another thread than the one that unmaps
        with self._lock:
            self._held = _Held(slot, content, done=found, found=found)
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

    def sealed(self, slot: SlotView, step: int, *, compared: bool) -> None:
        """A snapshot that leans on it; ``compared``: byte by byte."""
        with self._lock:
            held = self._held
            if held is not None and held.slot is slot:
                first = step if held.leaning is None else held.leaning[0]
                held.leaning = None if compared else (first, step)

    def doubtful(self, slot: SlotView) -> tuple[int, int] | None:
        """It is not what the parameters are, and nobody knows since when: the first and the last step that may be wrong."""
        with self._lock:
            return self._held.leaning if self._held is not None and self._held.slot is slot else None

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
