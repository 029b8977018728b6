"""The rung of the ladder that this job stands on: decided by the steward from what the nodes say of their memory (P8)."""

from __future__ import annotations

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.instructions import Alarm
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import InForce, Shortage
from ckptd.core.redundancy.ladder import Ladder, rungs
from ckptd.core.redundancy.policies import Parity, attainable

REPEAT_S = 2.0
AFTERWARDS_S = 20.0


class Rung:
    def __init__(self, ctx: Context, sessions: Sessions, table: SnapshotTable) -> None:
        self._ctx, self._sessions, self._table = ctx, sessions, table
        self._ladder: Ladder | None = None
        self._had: set[SnapshotId] = set()  # what was complete by this rung when it changed last, and so proves nothing
        self._short: dict[str, str] = {}  # node -> why
        self._told_at = self._until = -1e9

    def clear(self) -> None:
        self._ladder = None
        self._short.clear()
        self._told_at, self._until = -1e9, self._ctx.now + AFTERWARDS_S  # an earlier steward may have said something else

    def on_shortage(self, sender: str, message: Shortage) -> None:
        if message.short:
            self._short[sender] = message.reason
        else:
            self._short.pop(sender, None)

    def forget(self, node: str) -> None:
        self._short.pop(node, None)

    def shortages(self) -> list[str]:
        """Why copies or parity cannot be made for want of memory, in the words of the nodes that are live."""
        return [why for node, why in sorted(self._short.items()) if self._sessions.live(node)]

    def on_tick(self) -> bool:
        """True when the rung changed."""
        record = self._ctx.record
        assert record is not None, "a steward has an epoch"
        if self._ladder is None:
            self._ladder = Ladder(rungs(self._ctx.policy.redundancy, record.nodes), self._ctx.now)
        reasons = self.shortages()
        if self._ladder.trying and self._complete(self._ladder, record) - self._had:
            self._ladder.held()
        before = self._ladder.at
        changed = self._ladder.look(bool(reasons), self._ctx.now)
        if changed:
            self._told_at = -1e9
            self._had = self._complete(self._ladder, record)
            self._ctx.in_force = self._ladder.redundancy  # at once: orders that follow are of this rung
            self._say_change(before, reasons)
        self._tell(self._ladder)
        return changed

    def _complete(self, ladder: Ladder, record: EpochRecord) -> set[SnapshotId]:
        """What has all that the rung wants, made as the rung makes it: parity of a lower one says nothing of memory for copies."""
        wanted = attainable(ladder.redundancy.tolerates, (node.domain for node in record.nodes))
        table, parity = self._table, isinstance(ladder.redundancy, Parity)
        levels = {s: state.level if parity else table.level_of_copies(state) for s, state in table.states.items() if not state.void}
        return {snapshot for snapshot, level in levels.items() if level >= wanted}

    def _say_change(self, before: int, reasons: list[str]) -> None:
        ladder = self._ladder
        assert ladder is not None, "it changed"
        name = "local only" if ladder.redundancy.tolerates == 0 else ladder.redundancy.text
        if ladder.at > before:
            text = f"protection goes down to {name}: {'; '.join(reasons[:3])}"
        else:
            text = f"protection goes up to {name}: there has been memory for a while"
        self._ctx.emit(Alarm("ladder", text))

    def tell(self, node: str) -> None:
        """A session begins, perhaps after a long absence: whatever it believes, this is in force."""
        if self._ladder is not None:
            text = self._ladder.redundancy.text
            self._ctx.send(node, InForce(self._ctx.number, self._sessions.session(node), text))

    def _tell(self, ladder: Ladder) -> None:
        """Said again and again while it is not what the policy wants, and for a while after: any message may be lost."""
        now = self._ctx.now
        if ladder.at == 0 and now >= self._until:
            return
        if ladder.at:
            self._until = now + AFTERWARDS_S
        if now - self._told_at < REPEAT_S:
            return
        self._told_at = now
        for node in self._sessions.live_nodes():
            self.tell(node)
