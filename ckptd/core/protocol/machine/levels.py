"""What the steward certified, told to the local ranks, and what memory may go because of it (design D9, P2, P3)."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import TypeVar

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.instructions import TellLevel
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.messages import Certificate

CERTIFICATES_KEPT_MAX = 64  # the newest, and the newest durable one
RELEASED_KEPT_MAX = 512  # beyond what a list shows; the oldest go first
T = TypeVar("T", Certificate, TellLevel)


class Levels:
    def __init__(self, ctx: Context, slots: Slots, released: Callable[[SnapshotId], None]) -> None:
        """released: it was, in the session."""
        self._ctx, self._slots, self._released = ctx, slots, released
        self.told: dict[SnapshotId, Certificate] = {}
        self.released: dict[SnapshotId, tuple[str, int]] = {}  # their memory went for a newer one; session and serial that said so

    def on_certificate(self, message: Certificate) -> None:
        """A later serial about the same snapshot replaces an earlier one; a new session begins to count anew."""
        before = self.told.get(message.snapshot)
        if message.snapshot in self._slots.void and message.level >= 0:
            return  # it was on its way when the snapshot became void
        if before is not None and before.session == message.session and message.serial < before.serial:
            return
        session, serial = self.released.get(message.snapshot, (message.session, message.serial))
        if session != message.session or serial < message.serial:
            self.released.pop(message.snapshot, None)  # somebody brought copies back, and it is held after all
        self.told[message.snapshot] = message
        if before is None or _said(before) != _said(message):
            self._ctx.emit(TellLevel(message.snapshot, message.level, message.wanted, message.durable))
        for snapshot in message.releases:
            self.released[snapshot] = message.session, message.serial
            self._slots.release(snapshot)
            self._released(snapshot)
        while len(self.released) > RELEASED_KEPT_MAX:
            del self.released[min(self.released)]
        forget_oldest(self.told, CERTIFICATES_KEPT_MAX, self._ctx.is_candidate)

    def on_void(self, snapshot: SnapshotId) -> None:
        """The certificate that says so may be lost, and is not said again once nobody holds anything of it."""
        said = self.told.get(snapshot)
        if said is not None:
            self.told[snapshot] = replace(said, level=-1)

    def certified(self) -> tuple[tuple[SnapshotId, int, bool], ...]:
        return tuple((snapshot, told.level, told.durable) for snapshot, told in sorted(self.told.items()))

    def newest_durable_step(self) -> int:
        number = self._ctx.number
        return max((s.step for s, told in self.told.items() if told.durable and s.epoch == number), default=-1)


def forget_oldest(
    told: dict[SnapshotId, T], most: int, is_candidate: Callable[[SnapshotId], bool], held: Container[SnapshotId] = ()
) -> None:
    """The newest durable one stays, however many come after it: a loss of all memory leads back to it. So does what is held."""
    while len(told) > most:
        durable = max((s for s, said in told.items() if said.durable and is_candidate(s)), default=None)
        others = [snapshot for snapshot in told if snapshot != durable and snapshot not in held]
        if not others:
            return
        del told[min(others)]


def _said(certificate: Certificate) -> tuple[int, int, bool]:
    return certificate.level, certificate.wanted, certificate.durable
