"""What local ranks wait for, told to the steward until a certificate, or a void, answers it."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.events import FlushAsked, LevelAsked, RankMissed
from ckptd.core.protocol.instructions import TellLevel
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.levels import Levels
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.machine.uplink import Uplink
from ckptd.core.protocol.messages import FlushAsk, LevelAsk

REPEAT_S = 1.0
WAITED_FOR_S = 10.0  # after the last time that a rank said that it waits, which it does every two seconds
ASKS_MAX = 16  # steps, and snapshots; the oldest go first
OUTDONE = "released: a newer snapshot took its place"


class Asks:
    def __init__(self, ctx: Context, uplink: Uplink, levels: Levels, slots: Slots) -> None:
        self._ctx, self._uplink, self._levels, self._slots = ctx, uplink, levels, slots
        self._steps: set[int] = set()  # to become durable
        self._waited: dict[SnapshotId, float] = {}  # -> when a rank said so last
        self._said_at = -1e9

    def on_flush(self, event: FlushAsked) -> None:
        if event.step not in self._steps:
            self._steps = set(sorted({*self._steps, event.step})[-ASKS_MAX:])
            self._say_now()

    def on_level(self, event: LevelAsked) -> None:
        snapshot = SnapshotId(self._ctx.number, event.step, event.grant)
        self._tell_again(snapshot)
        news = snapshot not in self._waited
        self._waited[snapshot] = self._ctx.now
        while len(self._waited) > ASKS_MAX:
            del self._waited[min(self._waited)]
        if news:
            self._say_now()

    def on_missed(self, event: RankMissed) -> None:
        """The rank knows why it is void; the steward knows only that nobody holds it."""
        for snapshot in [s for s in self._waited if (s.step, s.grant) == (event.step, event.grant)]:
            del self._waited[snapshot]

    def _tell_again(self, snapshot: SnapshotId) -> None:
        """The rank may have been away when this was told."""
        void, told = self._slots.void.get(snapshot), self._levels.told.get(snapshot)
        if void is None and snapshot in self._levels.released and not (told is not None and told.durable):
            void = OUTDONE
        if void is not None:
            self._ctx.emit(TellLevel(snapshot, -1, 0, False, void))
        elif told is not None:
            self._ctx.emit(TellLevel(snapshot, told.level, told.wanted, told.durable))

    def clear(self) -> None:
        self._steps.clear()
        self._waited.clear()

    def _say_now(self) -> None:
        self._said_at = -1e9
        self.on_tick()

    def on_tick(self) -> None:
        if not self._steps and not self._waited:
            return
        now, durable = self._ctx.now, self._levels.newest_durable_step()
        self._steps = {step for step in self._steps if step > durable}
        self._waited = {snapshot: at for snapshot, at in self._waited.items() if now - at < WAITED_FOR_S}
        if not self._uplink.session or now - self._said_at < REPEAT_S:
            return
        self._said_at = now
        for step in sorted(self._steps):
            self._ctx.send(self._uplink.steward, FlushAsk(self._ctx.number, step))
        for snapshot in sorted(self._waited):
            held = any(slot.concerns(snapshot) for slot in self._slots.by_id.values())
            if not held and not self._is_answered(snapshot):
                self._ctx.send(self._uplink.steward, LevelAsk(self._ctx.number, snapshot))

    def _is_answered(self, snapshot: SnapshotId) -> bool:
        """For now: a level may fall, and what had one may be void."""
        told = self._levels.told.get(snapshot)
        known = snapshot in self._slots.void or snapshot in self._levels.released
        return known or (told is not None and (told.level >= 0 or told.durable))
