"""A node that is about to go, sick but reachable: it says so to the steward and hears what still holds only through it.

What it holds counts as long as it is there (P2); the steward has copies made elsewhere as if it were gone (steward/draining.py).
"""

from __future__ import annotations

from typing import Any

from ckptd.core.protocol.events import DrainAsked
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.uplink import Uplink
from ckptd.core.protocol.messages import Departures, Remainder

KNOWN_S = 5.0  # the steward says it twice a second; it is silent while it does not know


class Leaving:
    """Forgotten with the process: a daemon that restarts stays until it is asked again."""

    def __init__(self, ctx: Context, uplink: Uplink) -> None:
        self._ctx, self._uplink = ctx, uplink
        self.going = False
        self.remainder: Remainder | None = None  # as the steward said last, in this session
        self._heard_at = -1e9
        self._heard_in = ""  # the session in which it was said who leaves
        self._told = ""  # the session that knows us to be leaving

    def on_asked(self, event: DrainAsked) -> None:
        self.going = event.on
        self.remainder = None
        self.on_tick()

    def on_tick(self) -> None:
        """Said again in a new session, if it is still so."""
        session = self._uplink.session
        if self._heard_in != session:
            self._heard_in, self._ctx.leaving = session, frozenset()
        if self.remainder is not None and self.remainder.session != session:
            self.remainder = None
        if not session:
            return
        if self.going and self._told != session:
            self._told = session
            self._uplink.tell_leaving(True)
        elif not self.going and self._told:
            if self._told == session:
                self._uplink.tell_leaving(False)
            self._told = ""

    def on_departures(self, message: Departures) -> None:
        self._heard_in, self._ctx.leaving = message.session, frozenset(message.nodes)

    def on_remainder(self, message: Remainder) -> None:
        if self.going:
            self.remainder, self._heard_at = message, self._ctx.now

    def clear(self) -> None:
        """Another epoch: its steward has not looked yet."""
        self.remainder = None
        self._ctx.leaving = frozenset()

    def view(self) -> dict[str, Any]:
        """known: the steward has just looked at what this node holds; the rest means nothing else."""
        left = self.remainder if self._ctx.now - self._heard_at <= KNOWN_S else None
        return {
            "leaving": self.going,
            "known": left is not None,
            "slots": left.slots if left is not None else 0,
            "bytes": left.nbytes if left is not None else 0,
            "stuck": left.stuck if left is not None else 0,
            "reasons": list(left.reasons) if left is not None else [],
            "falls": [
                {"epoch": s.epoch, "step": s.step, "level": level, "without": without}
                for s, level, without in (left.falls if left is not None else ())
            ],
        }
