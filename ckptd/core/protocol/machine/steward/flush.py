"""What becomes durable and when: orders to the nodes that hold it, their reports, one commit (design D11-D13).

One flush at a time. It pins its snapshot; whatever goes wrong, the next try has another attempt id and begins anew, so
files of two tries never mix. First commit wins, so a second steward doing the same is mere waste.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.events import CommitDone
from ckptd.core.protocol.instructions import Alarm, Commit
from ckptd.core.protocol.machine.context import RESEND_S, Context
from ckptd.core.protocol.machine.ranks import SAID_GOODBYE
from ckptd.core.protocol.machine.steward.certify import Certify
from ckptd.core.protocol.machine.steward.grants import Grants
from ckptd.core.protocol.machine.steward.guards import KEEP_FAILURES_MAX
from ckptd.core.protocol.machine.steward.parity import Parities
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import FlushAsk, WriteCancel, WriteOrder, WritePiece, Wrote
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.writes import assign_writes

BACKOFF_FIRST_S = 1.0  # after a failed flush, doubled up to
BACKOFF_MAX_S = 60.0
BACKOFF_ASKED_MAX_S = 5.0  # while somebody waits for it
ASKS_KEPT_MAX = 64
MEND_S = 1.0  # what only parity can bring is asked for again after this
ATTEMPT_BYTES = 12

_Held = dict[str, list[tuple[int, int]]]  # node -> (rank, tier)
_Orders = dict[str, tuple[WritePiece, ...]]


@dataclass
class Flush:
    state: SnapshotState
    attempt: str
    since: float  # began to write, then to commit
    said_at: float
    orders: _Orders
    per_rank: tuple[str, ...]
    reports: dict[str, bytes] = field(default_factory=dict)
    committing: bool = False

    @property
    def snapshot(self) -> SnapshotId:
        return self.state.snapshot


class Flushing:
    def __init__(
        self,
        ctx: Context,
        sessions: Sessions,
        table: SnapshotTable,
        grants: Grants,
        certify: Certify,
        parities: Parities,
    ) -> None:
        self._ctx, self._sessions, self._table = ctx, sessions, table
        self._grants, self._certify, self._parities = grants, certify, parities
        self.flush: Flush | None = None
        self._planning: SnapshotState | None = None  # which is to be flushed next
        self.asked: set[int] = set()  # steps of this epoch
        self._count = 0
        self._failures = 0
        self.trouble = ""  # why the last try failed; "": it did not
        self._not_before = 0.0
        self._alone_since: float | None = None
        self._breakpoint_told = False
        # Of a durable one, else of the first office here: a job that starts anew each minute has its turn, too.
        self._last_at: float | None = None

    def stop(self) -> None:
        """Out of office: whoever follows decides anew."""
        self.flush = self._planning = None
        self._certify.guards.pinned = set()

    def clear(self) -> None:
        self.stop()
        self.asked.clear()
        self._failures, self.trouble, self._not_before, self._alone_since = 0, "", 0.0, None
        self._breakpoint_told = False
        self._last_at = self._ctx.now if self._last_at is None else self._last_at

    # --- what to flush ------------------------------------------------------------------------------------------
    def on_ask(self, message: FlushAsk) -> None:
        """A new wish is tried at once, whatever failed before: storage may be back."""
        step = message.step
        if step in self.asked or step <= self.durable_step() or len(self.asked) >= ASKS_KEPT_MAX:
            return
        self.asked.add(step)
        self._not_before = self._ctx.now

    def on_tick(self) -> None:
        self._watch_ranks()
        if self.flush is not None:
            self._look_after(self.flush)
        elif self._ctx.policy.durable and self._planning is None and self._may_begin():
            self._plan(self._targets())

    def _may_begin(self) -> bool:
        return self._ctx.now >= self._not_before and self._certify.knows_all()

    def _targets(self) -> list[SnapshotState]:
        """The most wanted first: what waits for parity, perhaps for ever, holds up no other, and what failed often goes last."""
        whole = [
            state
            for state in self._table.states.values()
            if state.level >= 0 and not state.void and not state.durable and state.agreement is not None
        ]  # fmt: skip
        whole.sort(key=lambda state: state.snapshot)
        usable = [state for state in whole if self._ctx.is_candidate(state.snapshot)]
        kept, others = [f for f in usable if f.keep], [f for f in usable if not f.keep]
        wanted = self._asked_for(others)
        if not wanted and self._certify.blocked():
            # Its slots will be wanted, and only storage can take it over; of a lineage that was left behind, too.
            wanted = others[:1] or [state for state in whole if not self._ctx.is_candidate(state.snapshot)][:1]
        chosen = kept + (wanted or [newest for newest in others[-1:] if self._due(newest)])
        return sorted(chosen, key=lambda state: state.failures >= KEEP_FAILURES_MAX)

    def _asked_for(self, usable: list[SnapshotState]) -> list[SnapshotState]:
        """Complete snapshots that are not before the step somebody waits for, the oldest first."""
        done = self.durable_step()
        self.asked = {step for step in self.asked if step > done}
        step = min(self.asked, default=None)
        epoch = self._ctx.number
        return [f for f in usable if step is not None and f.snapshot.epoch == epoch and f.snapshot.step >= step]

    def durable_step(self) -> int:
        """The newest of this epoch, -1: none."""
        return max((step for epoch, step in self._table.durable if epoch == self._ctx.number), default=-1)

    def _due(self, newest: SnapshotState) -> bool:
        known = [snapshot for snapshot in self._table.durable.values() if self._ctx.is_candidate(snapshot)]
        if newest.snapshot < max(known, default=newest.snapshot):
            return False
        if self._nobody_trains():
            return True
        policy = self._ctx.policy
        own = [s.step for s in known if s.epoch == newest.snapshot.epoch]  # a start may count its steps anew
        durable = max(own or [s.step for s in known if s.step <= newest.snapshot.step], default=0)
        by_steps = policy.flush_every_steps and newest.snapshot.step - durable >= policy.flush_every_steps
        assert self._last_at is not None, "only who is in office flushes"
        by_time = policy.flush_every_s and self._ctx.now - self._last_at >= policy.flush_every_s
        return bool(by_steps or by_time)

    # --- when ranks die and nobody comes back -------------------------------------------------------------------
    def _watch_ranks(self) -> None:
        if self._everyone_trains():
            self._alone_since = None
            self._breakpoint_told = False
        elif self._alone_since is None:
            self._alone_since = self._ctx.now

    def _everyone_trains(self) -> bool:
        record, ranks = self._ctx.record, self._grants.ranks
        if record is None or not self._ctx.done or len(ranks) < record.world:
            return False
        return not any(state.left for state in ranks.values()) and all(map(self._ctx.is_up, record.ranks))

    def _nobody_trains(self) -> bool:
        """All said goodbye; or some are dead and no new start of the job came within the grace time."""
        ranks, record = self._grants.ranks, self._ctx.record
        if record is not None and len(ranks) == record.world and all(s.left in SAID_GOODBYE for s in ranks.values()):
            return True
        grace = self._ctx.policy.breakpoint_grace_s
        return self._alone_since is not None and self._ctx.now - self._alone_since >= grace

    # --- one flush ----------------------------------------------------------------------------------------------
    def _plan(self, targets: list[SnapshotState]) -> None:
        """Who writes what of the first of them. It is pinned meanwhile."""
        if not targets:
            return
        state = self._planning = targets[0]
        assert state.agreement is not None, "a complete snapshot has been agreed upon"
        self._certify.guards.pinned = {state.snapshot}
        held = self._table.live_holdings(state)
        call = partial(_orders, self._table.layouts_of(state), held, state.agreement.per_rank)
        self._ctx.compute(call, partial(self._planned, targets, held))

    def _planned(self, targets: list[SnapshotState], held: _Held, orders: _Orders | None) -> None:
        state = targets[0]
        if self._planning is not state:
            return  # out of office meanwhile
        self._drop()
        if self._is_gone(state) or state.durable or self._table.live_holdings(state) != held:
            return  # the next tick looks at what there is then
        if orders is not None:
            self._begin(state, orders)
            return
        self._parities.order(state, at_once=True)  # only parity is left of a slot
        self._not_before = self._ctx.now + MEND_S
        self._count_wait(state)
        self._plan(targets[1:])

    def _begin(self, state: SnapshotState, orders: _Orders) -> None:
        assert state.agreement is not None, "a complete snapshot has been agreed upon"
        per_rank = state.agreement.per_rank
        state.lacks_since = None
        self._count += 1
        me, now = self._ctx.me, self._ctx.now
        # A machine that is made anew in the same process counts from zero, later.
        text = f"{self._ctx.number}|{state.snapshot.step}|{me.node}|{me.incarnation}|{self._count}|{now}"
        attempt = hashlib.blake2b(text.encode(), digest_size=ATTEMPT_BYTES).hexdigest()  # it becomes part of file names
        self.flush = Flush(state, attempt, now, now, orders, per_rank)
        self._certify.guards.pinned = {state.snapshot}
        if self._nobody_trains() and not self._breakpoint_told and not self._all_clean():
            self._breakpoint_told = True
            gone = "ranks, or their daemons, are gone"
            self._ctx.emit(Alarm("breakpoint", f"{gone}: step {state.snapshot.step} is written from memory"))
        self._order(self.flush)

    def _count_wait(self, state: SnapshotState) -> None:
        """Parity that nobody makes is a failure as well: what was to be kept would keep its slots for ever (P14)."""
        state.lacks_since = self._ctx.now if state.lacks_since is None else state.lacks_since
        if self._ctx.now - state.lacks_since > self._ctx.policy.write_timeout_s:
            state.failures, state.lacks_since = state.failures + 1, self._ctx.now
            self._ctx.emit(Alarm("flush", f"step {state.snapshot.step}: making data of parity took longer than write_timeout_s"))

    def _all_clean(self) -> bool:
        return all(state.left in SAID_GOODBYE for state in self._grants.ranks.values()) and bool(self._grants.ranks)

    def _order(self, flush: Flush) -> None:
        flush.said_at = self._ctx.now
        for node, pieces in flush.orders.items():
            if node not in flush.reports:
                order = WriteOrder(self._ctx.number, flush.snapshot, flush.attempt, pieces, flush.per_rank)
                self._ctx.send(node, order)

    def _look_after(self, flush: Flush) -> None:
        gone = [node for node in flush.orders if node not in flush.reports and not self._ctx.is_up(node)]
        if self._is_gone(flush.state) and not flush.committing:
            self._fail("the snapshot is gone")
        elif gone and not flush.committing:
            self._fail(f"{', '.join(gone)} went while writing", count=False)
        elif self._ctx.now - flush.since > self._ctx.policy.write_timeout_s:
            what = "the commit" if flush.committing else "writing"
            self._fail(f"{what} took longer than write_timeout_s")
        elif self._ctx.now - flush.said_at >= 2 * RESEND_S and not flush.committing:
            self._order(flush)

    def on_wrote(self, sender: str, message: Wrote) -> None:
        flush = self.flush
        if flush is None or message.attempt != flush.attempt or sender not in flush.orders or flush.committing:
            return
        if not message.ok:
            self._fail(f"{sender}: {message.reason}")
            return
        flush.reports[sender] = message.report
        if len(flush.reports) == len(flush.orders):
            self._commit(flush)

    def _commit(self, flush: Flush) -> None:
        state = flush.state
        assert self._ctx.record is not None, "a steward has an epoch"
        if self._is_gone(flush.state):
            self._fail("the snapshot is gone")
            return
        flush.committing, flush.since = True, self._ctx.now
        layouts = self._table.layouts_of(state)
        reports = tuple(flush.reports[node] for node in sorted(flush.reports))
        self._ctx.emit(
            Commit(flush.snapshot, flush.attempt, self._ctx.record, reports, layouts, flush.per_rank, state.keep)
        )

    def _is_gone(self, state: SnapshotState) -> bool:
        """Void or let go."""
        return self._table.states.get(state.snapshot) is not state or bool(state.void)

    def on_committed(self, event: CommitDone) -> None:
        """A commit that was given up may still come to an end: the first one counts, so the try after it is over."""
        flush = self.flush
        if event.ok:
            self._table.mark_durable([event.snapshot])
        if flush is None or event.snapshot != flush.snapshot:
            return
        if event.ok:
            if event.attempt != flush.attempt:
                self._cancel(flush)
            self._failures, self.trouble, self._last_at = 0, "", self._ctx.now
            self._drop()
        elif event.attempt == flush.attempt:
            self._fail(event.reason)

    def _fail(self, reason: str, *, count: bool = True) -> None:
        """The next try begins anew, from what is held then."""
        flush = self.flush
        assert flush is not None, "only a flush can fail"
        self._cancel(flush)
        if count:
            self._failures, self.trouble = self._failures + 1, reason
            state = self._table.states.get(flush.snapshot)
            if state is not None:
                state.failures += 1
            self._not_before = self._ctx.now + self._pause()
            self._ctx.emit(Alarm("flush", f"step {flush.snapshot.step}: {reason}"))
        self._drop()

    def _pause(self) -> float:
        longest = BACKOFF_ASKED_MAX_S if self.asked else BACKOFF_MAX_S
        return min(BACKOFF_FIRST_S * 2.0 ** min(self._failures - 1, 16), longest)

    def _cancel(self, flush: Flush) -> None:
        for node in flush.orders:
            self._ctx.send(node, WriteCancel(self._ctx.number, flush.snapshot, flush.attempt))

    def _drop(self) -> None:
        self._table.dirty |= self._certify.guards.pinned
        self.flush = self._planning = None
        self._certify.guards.pinned = set()


def _orders(layouts: Mapping[int, Layout], held: _Held, per_rank: tuple[str, ...]) -> _Orders | None:
    """None: something is held nowhere."""
    try:
        return assign_writes(layouts, held, per_rank)
    except ValueError:
        return None
