"""The one snapshot whose copies are being made: it is not evicted for a newer one that is no better protected (design D9, P14).

Without it, copies that take longer than the pause between two captures are never finished: the next snapshot, whole in its own
nodes' memory only, takes the memory of the one that is on its way to the peers, and so on for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.redundancy.policies import attainable

PATIENCE_S = 10.0  # no level more within this time: peers refuse, or hang; newer snapshots may take its place
PATIENCE_MAX_S = 960.0  # doubled each time, for states that really take so long
SLACK = 2.0  # times what the last one took


class Protecting:
    """Replication sends a rank's oldest snapshot first, so it is the oldest one that lacks copies which can be made."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.now: SnapshotId | None = None
        self._level, self._since = -1, 0.0  # of ``now``: its level, reached then
        self._patience_s = PATIENCE_S
        self._given_up: set[SnapshotId] = set()

    def clear(self) -> None:
        """In office anew: how long something has been under way is not known."""
        self.now, self._patience_s = None, PATIENCE_S
        self._given_up.clear()

    def choose(self, certified: Iterable[SnapshotState], wanted: int) -> SnapshotId | None:
        """Among snapshots that are whole; None: nothing lacks a copy that this cluster could make."""
        goal = min(wanted, self._attainable())
        known = {state.snapshot: state for state in certified}
        self._given_up &= known.keys()
        before = known.get(self.now) if self.now is not None else None
        if before is not None and before.level > self._level:
            took = self._ctx.now - self._since
            self._patience_s = min(max(PATIENCE_S, SLACK * took), PATIENCE_MAX_S)
            self._level, self._since = before.level, self._ctx.now
        usable = {snapshot: state for snapshot, state in known.items() if self._ctx.is_candidate(snapshot)}
        safe = max((s for s, state in usable.items() if state.level >= goal), default=None)
        waiting = sorted(
            s for s, state in usable.items() if state.level < goal and (safe is None or s > safe) and s not in self._given_up
        )
        first = waiting[0] if waiting else None
        if first is not None and self._hangs(known[first]):
            self._given_up.add(first)
            self._patience_s = min(2 * self._patience_s, PATIENCE_MAX_S)
            return self.choose(known.values(), wanted)
        if first is None:
            self.now = None
        return first

    def _hangs(self, state: SnapshotState) -> bool:
        """Nothing has come of it for too long."""
        now = self._ctx.now
        if state.snapshot != self.now:
            self.now, self._level, self._since = state.snapshot, state.level, now
        return self.overdue()

    def overdue(self) -> bool:
        return self.now is not None and self._ctx.now - self._since > self._patience_s

    def _attainable(self) -> int:
        """The most that the nodes which live now could give, and degradation lets them."""
        record = self._ctx.record
        nodes = record.nodes if record is not None else ()
        living = (node.domain for node in nodes if self._ctx.is_up(node.node))
        return attainable(self._ctx.redundancy.tolerates, living)
