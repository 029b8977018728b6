"""What must be so for a snapshot to pass from one phase to another: the guards of snapshot.TRANSITIONS, under their names there.

The first sentence of each is its row's text in docs/ARCHITECTURE.md. What two of them ask is asked below, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.grants import Grants
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.snapshot import Phase, SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.redundancy.policies import attainable

KEEP_FAILURES_MAX = 3  # failed flushes, before a snapshot that was to be kept may have to give its memory to newer ones


@lru_cache(maxsize=64)
def _wanted(record: EpochRecord | None, tolerates: int) -> int:
    return attainable(tolerates, (node.domain for node in record.nodes) if record is not None else ())


class Guards:
    def __init__(self, ctx: Context, sessions: Sessions, table: SnapshotTable, grants: Grants) -> None:
        self._ctx, self._sessions, self._table, self._grants = ctx, sessions, table, grants
        self.follows: Callable[[SnapshotState], bool] = lambda state: False  # see Draining
        self.pinned: set[SnapshotId] = set()  # a flush needs them

    def wanted(self) -> int:
        """The most that the policy asks for and this epoch's nodes could give. It is asked for each node and rank."""
        return _wanted(self._ctx.record, self._ctx.policy.tolerates)

    def wanted_of(self, stays: Callable[[str], bool]) -> int:
        """The same of those nodes that stay."""
        record = self._ctx.record
        nodes = record.nodes if record is not None else ()
        return attainable(self._ctx.policy.tolerates, (node.domain for node in nodes if stays(node.node)))

    # --- certificates -------------------------------------------------------------------------------------------
    def remembered(self, state: SnapshotState) -> bool:
        """Nodes know of a level that an earlier steward certified."""
        return self._table.remembers(state.snapshot)

    def nothing_to_say(self, state: SnapshotState) -> bool:
        """Not known is not fallen (P2): its layouts are on their way to a steward that has just begun. And copies may be faster
        than the last rank's own word, which may still be that it missed the step."""
        if state.certificate is not None:
            return False
        unread = state.phase is not Phase.VOID and self._table.unread(state)
        return unread or self._under_way(state)

    # --- void ---------------------------------------------------------------------------------------------------
    def differs(self, state: SnapshotState) -> bool:
        """Copies that must be equal are not."""
        return state.agreement is not None and bool(state.agreement.errors)

    def nowhere(self, state: SnapshotState) -> bool:
        """It is of this epoch, and a rank's part is in no memory although all members are live; no grant that stands brings it,
        and it is not durable."""
        if state.level >= 0 or state.snapshot.epoch != self._ctx.number or self._may_be_durable(state) or self._under_way(state):
            return False
        return self._sessions.members_live() and not self._replaced_unread(state)

    def not_whole(self, state: SnapshotState) -> bool:
        """It is of an earlier epoch and lacks a part that nobody who is away could bring, so that it would only keep slots from
        what is to come, and it is not durable."""
        return not self._may_be_durable(state) and self._lacks_for_good(state)

    def left_behind(self, state: SnapshotState) -> bool:
        """It is whole and of a lineage that a declared fresh start does not continue, another one of it is the better, and it is
        not durable."""
        return not self._may_be_durable(state) and self._outlived(state)

    def _may_be_durable(self, state: SnapshotState) -> bool:
        """It is, or an earlier steward certified it and storage has not said yet what it has; where slots are needed that is too
        long."""
        unread = self.remembered(state) and not self._table.storage_read and not self._grants.full()
        return state.durable or unread

    def _lacks_for_good(self, state: SnapshotState) -> bool:
        lacks = state.level < 0 and self._of_no_further_use(state) and not self._awaited(state)
        return lacks and not self._replaced_unread(state)

    def _outlived(self, state: SnapshotState) -> bool:
        if state.level < 0 or self._ctx.is_candidate(state.snapshot) or not self._of_no_further_use(state):
            return False
        return any((other.level, other.snapshot) > (state.level, state.snapshot) for other in self._whole_of_earlier_epochs())

    def of_a_left_lineage(self) -> list[SnapshotState]:
        return [s for s in self._whole_of_earlier_epochs() if not self._ctx.is_candidate(s.snapshot)]

    def _whole_of_earlier_epochs(self) -> list[SnapshotState]:
        whole = (s for s in self._table.states.values() if s.level >= 0 and s.phase is not Phase.VOID)
        return [s for s in whole if s.snapshot.epoch < self._ctx.number]

    def _of_no_further_use(self, state: SnapshotState) -> bool:
        return state.snapshot.epoch < self._ctx.number and self._ctx.done and not self.needed(state)

    # --- release ------------------------------------------------------------------------------------------------
    def outdone(self, state: SnapshotState, best: int) -> bool:
        """A newer one is certified at its level or above, and nothing needs it: no flush, no copies under way, no grant. Nothing is
        granted while a member is away, so what he holds of it may as well be waited for."""
        return 0 <= best >= self.worth(state) and self._sessions.members_live() and not self.needed(state)

    def spent(self, state: SnapshotState) -> bool:
        """It is durable, and memory lacks a part that nobody is going to bring, or it is of a lineage that was left behind. It is
        not void: a later start may read it from storage."""
        if not state.durable:
            return False
        if self._lacks_for_good(state) or self._outlived(state):
            return True
        lacking = state.level < 0 and self._sessions.members_live()
        return lacking and not self._awaited(state) and not self.needed(state)

    def written_out(self, state: SnapshotState) -> bool:
        """It is durable, and the oldest such while a rank has long had no slot for a newer one, and no copies are under way."""
        return state.durable and not self.needed(state)

    def returned_in_part(self, state: SnapshotState) -> bool:
        """It was released once, perhaps by an earlier steward, a node that had missed it has brought a part back, and a newer one
        is certified. It goes again: that it is void would be news to ranks that were told a level until then."""
        if state.level >= 0 or state.phase is Phase.VOID:
            return False
        if not state.again and not (self.remembered(state) and self._sessions.members_live()):
            return False  # one who is away may have the rest
        if self.needed(state) or self._awaited(state):
            return False
        states = self._table.states.items()
        newer = (other for snapshot, other in states if snapshot > state.snapshot and self._ctx.is_candidate(snapshot))
        return any(other.certified and other.level >= 0 and not self.follows(other) for other in newer)

    def worth(self, state: SnapshotState) -> int:
        """The level that a newer one must have to take its place."""
        return self.wanted() if self._awaited(state) else min(state.level, self.wanted())

    # --- what several ask ---------------------------------------------------------------------------------------
    def needed(self, state: SnapshotState) -> bool:
        """By a flush, or a grant that could still complete it; or nobody can read yet what it is."""
        if state.snapshot in self.pinned or self._kept(state) or self._table.unread(state):
            return True
        return state.level < 0 and self._under_way(state)

    def _replaced_unread(self, state: SnapshotState) -> bool:
        """It cannot be read yet, or a newer one for which an earlier steward may have released it (P2), as long as no slot is
        needed (P14)."""
        unread, states = self._table.unread, self._table.states.items()
        newer = () if self._grants.full() else (other for snapshot, other in states if snapshot > state.snapshot)
        return unread(state) or any(map(unread, newer))

    def _under_way(self, state: SnapshotState) -> bool:
        """A grant that stands could still complete it."""
        return state.snapshot.epoch == self._ctx.number and self._grants.stands(state.snapshot.grant)

    def _kept(self, state: SnapshotState) -> bool:
        """keep=True: it waits for its flush, also while a member that holds a part of it is away for a moment. Where that has often
        failed it goes when nothing newer has long got a slot for it (P14)."""
        there = state.level >= 0 or not self._sessions.members_live()
        unflushed = state.keep and not state.durable and there and self._ctx.is_candidate(state.snapshot)
        waits = state.failures < KEEP_FAILURES_MAX or not self._grants.full()
        return unflushed and self._ctx.policy.durable and waits

    def has_nothing_yet(self) -> bool:
        """A declared fresh start keeps what it left behind until something of its own is certified."""
        record = self._ctx.record
        if record is None or record.ancestry:
            return False
        states = self._table.states.items()
        return not any(state.certified and snapshot.epoch == record.number for snapshot, state in states)

    def _awaited(self, state: SnapshotState) -> bool:
        """Somebody who is away may bring the rest of what this epoch continued, and at any level: nobody here may know what was
        certified. When slots are needed the oldest such goes: he may never come back, and the job goes on (P14)."""
        if state.level >= 0 or state.again or state.snapshot.epoch == self._ctx.number:
            return False
        if self._sessions.everyone_live() or not (self._ctx.is_candidate(state.snapshot) or self.has_nothing_yet()):
            return False
        if not self._grants.full():
            return True
        held = (s for s in self._table.states.values() if s.level < 0 and any(map(self._sessions.live, s.nodes())))
        return state.snapshot != min((s.snapshot for s in held), default=None)
