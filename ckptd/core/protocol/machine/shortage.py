"""Is there memory for the copies and the parity that this node is to make? What the steward's degradation level goes by (P8)."""

from __future__ import annotations

from ckptd.core.protocol.events import NO_MEMORY
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.uplink import Uplink

CALM_S = 3.0  # without another refusal: there is memory again, or nothing that asks for it


class Shortages:
    def __init__(self, ctx: Context, uplink: Uplink) -> None:
        self._ctx, self._uplink = ctx, uplink
        self._told = ""  # the session that knows us to be short
        self._refused: dict[str, tuple[float, str]] = {}  # by whom -> when, why

    def on_result(self, ok: bool, reason: str, where: str) -> None:
        """Of a copy or a part of parity, wherever it was to be made."""
        if ok:
            self._refused.pop(where, None)
        elif reason.startswith(NO_MEMORY):
            self._refused[where] = self._ctx.now, f"{where}: {reason}"
        self.on_tick()

    def on_tick(self) -> None:
        """Said again in a new session, if it is still so."""
        session = self._uplink.session
        if not session:
            return
        now = self._ctx.now
        self._refused = {who: told for who, told in self._refused.items() if now - told[0] < CALM_S}
        short = bool(self._refused)
        if short and self._told != session:
            self._told = session
            self._uplink.tell_shortage(True, min(why for _, why in self._refused.values()))
        elif not short and self._told:
            if self._told == session:
                self._uplink.tell_shortage(False, "")
            self._told = ""
