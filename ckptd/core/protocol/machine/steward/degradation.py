"""How far this job is degraded: decided by the steward from what the nodes say of their memory (P8)."""

from __future__ import annotations

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.instructions import Alarm
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import DegradationChanged, Shortage
from ckptd.core.redundancy.degradation import Degradation, levels
from ckptd.core.redundancy.policies import Parity, attainable

REPEAT_S = 2.0
AFTERWARDS_S = 20.0


class DegradationLevel:
    def __init__(self, ctx: Context, sessions: Sessions, table: SnapshotTable) -> None:
        self._ctx, self._sessions, self._table = ctx, sessions, table
        self._degradation: Degradation | None = None
        self._had: set[SnapshotId] = set()  # what was complete by this level when it changed last, and so proves nothing
        self._short: dict[str, str] = {}  # node -> why
        self._told_at = self._until = -1e9

    def clear(self) -> None:
        self._degradation = None
        self._short.clear()
        self._told_at, self._until = -1e9, self._ctx.now + AFTERWARDS_S  # an earlier steward may have said something else

    def on_shortage(self, sender: str, message: Shortage) -> None:
        if message.short:
            self._short[sender] = message.reason
        else:
            self._short.pop(sender, None)

    def forget(self, node: str) -> None:
        self._short.pop(node, None)

    def is_short(self, node: str) -> bool:
        return node in self._short

    def shortages(self) -> list[str]:
        """Why copies or parity cannot be made for want of memory, in the words of the nodes that are live."""
        return [why for node, why in sorted(self._short.items()) if self._sessions.live(node)]

    def on_tick(self) -> bool:
        """True when the level changed."""
        record = self._ctx.record
        assert record is not None, "a steward has an epoch"
        if self._degradation is None:
            self._degradation = Degradation(levels(self._ctx.policy.redundancy, record.nodes), self._ctx.now)
        reasons = self.shortages()
        if self._degradation.trying and self._complete(self._degradation, record) - self._had:
            self._degradation.held()
        before = self._degradation.at
        changed = self._degradation.look(bool(reasons), self._ctx.now)
        if changed:
            self._told_at = -1e9
            self._had = self._complete(self._degradation, record)
            self._ctx.in_force = self._degradation.redundancy  # at once: orders that follow are of this level
            self._say_change(before, reasons)
        self._tell(self._degradation)
        return changed

    def _complete(self, degradation: Degradation, record: EpochRecord) -> set[SnapshotId]:
        """What has all that the level wants, made as the level makes it: parity of a lower one says
        nothing of memory for copies."""
        wanted = attainable(degradation.redundancy.tolerates, (node.domain for node in record.nodes))
        table, parity = self._table, isinstance(degradation.redundancy, Parity)
        levels = {s: state.level if parity else table.level_of_copies(state) for s, state in table.states.items() if not state.void}
        return {snapshot for snapshot, level in levels.items() if level >= wanted}

    def _say_change(self, before: int, reasons: list[str]) -> None:
        degradation = self._degradation
        assert degradation is not None, "it changed"
        name = "local only" if degradation.redundancy.tolerates == 0 else degradation.redundancy.text
        if degradation.at > before:
            text = f"protection goes down to {name}: {'; '.join(reasons[:3])}"
        else:
            text = f"protection goes up to {name}: there has been memory for a while"
        self._ctx.emit(Alarm("degradation", text))

    def tell(self, node: str) -> None:
        """A session begins, perhaps after a long absence: whatever it believes, this is in force."""
        if self._degradation is not None:
            text = self._degradation.redundancy.text
            self._ctx.send(node, DegradationChanged(self._ctx.number, self._sessions.session(node), text))

    def _tell(self, degradation: Degradation) -> None:
        """Said again and again while it is not what the policy wants, and for a while after: any message may be lost."""
        now = self._ctx.now
        if degradation.at == 0 and now >= self._until:
            return
        if degradation.at:
            self._until = now + AFTERWARDS_S
        if now - self._told_at < REPEAT_S:
            return
        self._told_at = now
        for node in self._sessions.live_nodes():
            self.tell(node)
