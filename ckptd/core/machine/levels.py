"""What the steward certified, told to the local ranks, and what memory may go because of it (design D9, P2, P3)."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.instructions import TellLevel
from ckptd.core.machine.context import Context
from ckptd.core.machine.slots import Slots
from ckptd.core.messages import Certificate

CERTIFICATES_KEPT_MAX = 64
RELEASED_KEPT_MAX = 512  # beyond what a list shows; the oldest go first


class Levels:
    def __init__(self, ctx: Context, slots: Slots) -> None:
        self._ctx, self._slots = ctx, slots
        self.told: dict[SnapshotId, Certificate] = {}
        self.released: dict[SnapshotId, None] = {}  # their memory went for a newer one

    def on_certificate(self, message: Certificate) -> None:
        """A later serial about the same snapshot replaces an earlier one; a new session begins to count anew."""
        before = self.told.get(message.snapshot)
        if message.snapshot in self._slots.void and message.level >= 0:
            return  # it was on its way when the snapshot became void
        if before is not None and before.session == message.session and message.serial < before.serial:
            return
        if before is None or before.session != message.session:
            self.released.pop(message.snapshot, None)  # a new steward found it held after all
        self.told[message.snapshot] = message
        if before is None or _said(before) != _said(message):
            self._ctx.emit(TellLevel(message.snapshot, message.level, message.wanted, message.durable))
        for snapshot in message.releases:
            self.released[snapshot] = None
            self._slots.release(snapshot)
        while len(self.released) > RELEASED_KEPT_MAX:
            del self.released[min(self.released)]
        while len(self.told) > CERTIFICATES_KEPT_MAX:
            del self.told[min(self.told)]

    def certified(self) -> tuple[tuple[SnapshotId, int, bool], ...]:
        return tuple((snapshot, told.level, told.durable) for snapshot, told in sorted(self.told.items()))

    def newest_durable_step(self) -> int:
        number = self._ctx.number
        return max((s.step for s, told in self.told.items() if told.durable and s.epoch == number), default=-1)


def _said(certificate: Certificate) -> tuple[int, int, bool]:
    return certificate.level, certificate.wanted, certificate.durable
