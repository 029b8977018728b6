"""Local wishes for durability, told to the steward until a certificate answers them."""

from __future__ import annotations

from ckptd.core.events import FlushAsked
from ckptd.core.machine.context import Context
from ckptd.core.machine.levels import Levels
from ckptd.core.machine.uplink import Uplink
from ckptd.core.messages import FlushAsk

REPEAT_S = 1.0
ASKS_MAX = 16


class FlushAsks:
    def __init__(self, ctx: Context, uplink: Uplink, levels: Levels) -> None:
        self._ctx, self._uplink, self._levels = ctx, uplink, levels
        self._steps: set[int] = set()
        self._newest = False  # "the newest complete one", before there was any
        self._said_at = -1e9

    def on_asked(self, event: FlushAsked) -> None:
        if event.step is None:
            self._newest = True
        elif len(self._steps) < ASKS_MAX:
            self._steps.add(event.step)
        self._said_at = -1e9
        self.on_tick()

    def clear(self) -> None:
        self._steps.clear()
        self._newest = False

    def on_tick(self) -> None:
        if not self._steps and not self._newest:
            return
        self._name_newest()
        durable = self._levels.newest_durable_step()
        self._steps = {step for step in self._steps if step > durable}
        if self._steps and self._uplink.session and self._ctx.now - self._said_at >= REPEAT_S:
            self._said_at = self._ctx.now
            for step in sorted(self._steps):
                self._ctx.send(self._uplink.steward, FlushAsk(self._ctx.number, step))

    def _name_newest(self) -> None:
        """As soon as there is a complete snapshot, the wish is for that step."""
        number = self._ctx.number
        complete = [s.step for s, told in self._levels.told.items() if told.level >= 0 and s.epoch == number]
        if self._newest and complete:
            self._newest = False
            self._steps.add(max(complete))
