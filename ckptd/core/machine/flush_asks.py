"""What local ranks wait for, told to the steward until a certificate, or a void, answers it."""

from __future__ import annotations

from ckptd.core.events import FlushAsked
from ckptd.core.ids import SnapshotId
from ckptd.core.instructions import TellLevel
from ckptd.core.machine.context import Context
from ckptd.core.machine.levels import Levels
from ckptd.core.machine.slots import Slots
from ckptd.core.machine.uplink import Uplink
from ckptd.core.messages import FlushAsk

REPEAT_S = 1.0
ASKS_MAX = 16


class FlushAsks:
    def __init__(self, ctx: Context, uplink: Uplink, levels: Levels, slots: Slots) -> None:
        self._ctx, self._uplink, self._levels, self._slots = ctx, uplink, levels, slots
        self._steps: set[int] = set()  # to become durable
        self._untold: set[int] = set()  # waited for, and nothing was heard of them
        self._newest = False  # "the newest complete one", before there was any
        self._said_at = -1e9

    def on_asked(self, event: FlushAsked) -> None:
        if event.step is None:
            self._newest = True
        else:
            self._tell_again(event.step)
            for wishes in (self._steps, self._untold) if event.durable else (self._untold,):
                if len(wishes) < ASKS_MAX:
                    wishes.add(event.step)
        self._said_at = -1e9
        self.on_tick()

    def _tell_again(self, step: int) -> None:
        """The rank may have been away when this was told."""
        snapshot = self._at(step)
        void, told = self._slots.void.get(snapshot), self._levels.told.get(snapshot)
        if void is not None:
            self._ctx.emit(TellLevel(snapshot, -1, 0, False, void))
        elif told is not None:
            self._ctx.emit(TellLevel(snapshot, told.level, told.wanted, told.durable))

    def clear(self) -> None:
        self._steps.clear()
        self._untold.clear()
        self._newest = False

    def on_tick(self) -> None:
        if not self._steps and not self._untold and not self._newest:
            return
        self._name_newest()
        durable = self._levels.newest_durable_step()
        self._steps = {step for step in self._steps if step > durable and not self._is_void(step)}
        self._untold = {step for step in self._untold if not self._is_void(step) and self._at(step) not in self._levels.told}
        if not self._uplink.session or self._ctx.now - self._said_at < REPEAT_S:
            return
        self._said_at = self._ctx.now
        for step in sorted(self._steps):
            self._ctx.send(self._uplink.steward, FlushAsk(self._ctx.number, step))
        for step in sorted(self._untold):
            if not any(slot.concerns(self._at(step)) for slot in self._slots.by_id.values()):
                self._ctx.send(self._uplink.steward, FlushAsk(self._ctx.number, step, durable=False))

    def _at(self, step: int) -> SnapshotId:
        return SnapshotId(self._ctx.number, step)

    def _is_void(self, step: int) -> bool:
        return self._at(step) in self._slots.void

    def _name_newest(self) -> None:
        """As soon as there is a complete snapshot, the wish is for that step."""
        number = self._ctx.number
        complete = [s.step for s, told in self._levels.told.items() if told.level >= 0 and s.epoch == number]
        if self._newest and complete:
            self._newest = False
            self._steps.add(max(complete))
