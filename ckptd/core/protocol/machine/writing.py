"""This node's share of a flush: its pieces of held slots go to durable storage (design D12, D13)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from ckptd.core.protocol.events import FilesWritten
from ckptd.core.protocol.instructions import CancelWrite, WriteFiles
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.slots import Slot, Slots
from ckptd.core.protocol.messages import WriteCancel, WriteOrder, WritePiece, Wrote

WRITES_KEPT_MAX = 8  # answers remembered, for a steward that did not hear them


@dataclass
class Write:
    order: WriteOrder
    sender: str
    answer: Wrote | None = None
    cancelled: bool = False


class Writing:
    def __init__(self, ctx: Context, slots: Slots) -> None:
        self._ctx, self._slots = ctx, slots
        self._writes: dict[str, Write] = {}

    def on_order(self, sender: str, order: WriteOrder) -> None:
        known = self._writes.get(order.attempt)
        if known is not None:
            if known.answer is not None:
                self._ctx.send(sender, known.answer)
            return
        write = self._writes[order.attempt] = Write(order, sender)
        pieces = self._pieces(order)
        if pieces is None or self._ctx.record is None:
            self._answer(write, False, "a holding that should be written is not here")
        else:
            self._slots.pin(_why(order.attempt), order.snapshot)
            self._ctx.emit(
                WriteFiles(order.snapshot, order.attempt, self._ctx.record, pieces, order.per_rank)
            )
        self._trim()

    def on_written(self, event: FilesWritten) -> None:
        write = self._writes.get(event.attempt)
        if write is not None and write.answer is None:
            self._slots.unpin(_why(event.attempt))
            self._answer(write, event.ok and not write.cancelled, event.reason, event.report)

    def on_cancel(self, message: WriteCancel) -> None:
        write = self._writes.get(message.attempt)
        if write is None:  # the order may still be on its way
            order = WriteOrder(message.epoch, message.snapshot, message.attempt, ())
            refused = Wrote(message.epoch, message.snapshot, message.attempt, False, "cancelled")
            self._writes[message.attempt] = Write(order, "", refused, True)
            self._trim()
        elif write.answer is None and not write.cancelled:
            write.cancelled = True
            self._ctx.emit(CancelWrite(write.order.snapshot, message.attempt))

    def cancel_all(self) -> None:
        """A newer epoch opened. The slots stay pinned until the shell has let go of them."""
        for write in self._writes.values():
            if write.answer is None and not write.cancelled:
                write.cancelled = True
                self._ctx.emit(CancelWrite(write.order.snapshot, write.order.attempt))

    def _pieces(self, order: WriteOrder) -> tuple[tuple[int, WritePiece], ...] | None:
        found: list[tuple[int, WritePiece]] = []
        for piece in order.pieces:
            slot = self._slots.best(order.snapshot, piece.rank)
            if slot is None or not _covers(slot, piece):
                return None
            found.append((slot.id, piece))
        return tuple(found)

    def _answer(self, write: Write, ok: bool, reason: str = "", report: bytes = b"") -> None:
        order = write.order
        write.answer = Wrote(order.epoch, order.snapshot, order.attempt, ok, reason, report)
        self._ctx.send(write.sender, write.answer)

    def _trim(self) -> None:
        settled = [attempt for attempt, write in self._writes.items() if write.answer is not None]
        for attempt in settled[:-WRITES_KEPT_MAX]:
            del self._writes[attempt]


def _why(attempt: str) -> str:
    return f"write {attempt}"


def _covers(slot: Slot, piece: WritePiece) -> bool:
    if slot.layout is None or slot.fact is None or slot.layout.layout_id != piece.layout_id:
        return False
    held = slot.layout.fragments.tier >= slot.fact.tier
    runs = ((0, len(held)),) if piece.runs is None else piece.runs
    bounds = [0, *chain.from_iterable(runs), len(held)]
    return bounds == sorted(bounds) and all(bool(held[first:end].all()) for first, end in runs)
