"""Which steps are captured is one decision per job (design D9): granted ahead of every rank's progress, when all have room.

Skipping locally would livelock: 64 ranks that each skip when they are busy completed 2 steps of 500 in a toy model, granting
for the whole job completed half.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.events import REFUSED_AT_ONCE
from ckptd.core.protocol.machine.capture import LATE
from ckptd.core.protocol.machine.context import Context, ranks_by_node
from ckptd.core.protocol.machine.steward.margin import Margin
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import Grant, Missed, RankState, Sealed, Void
from ckptd.core.protocol.written import Written, merged
from ckptd.core.state_map.balance import plans_in

REPEAT_S = 1.0  # an unanswered grant or void is said again after this
REFUSED_PAUSE_S = 0.25  # after a grant that a rank could not even take: at once again would only spin
FULL_S = 60.0  # without a free slot on some rank, while every rank trains: what nobody is sure to need must go
RETURN_S = 5.0  # the same, and no slot is on its way back: what was released is known to be free before that
FIRST_STEP = 1  # that a training from scratch calls, if not 0
BEHIND = "granted behind one that is void"
STUCK_S = 60.0  # a rank that neither seals nor misses, long after the step went by


@dataclass
class Granted:
    number: int
    from_step: int
    said_at: float
    progress: int | None = None  # of the foremost rank when it was granted; None: for a rank that waits
    earliest: int = 0  # what from_step would have been, had there never been a margin
    need: int = 0  # the margin by which it would have been in time on all ranks
    late: bool = False
    step: int | None = None  # what it became
    plans: dict[str, str] = field(default_factory=dict)  # who -> plan, of the ranks that sealed
    sealed: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    void: str = ""
    written: Written = field(default_factory=dict)  # past some ranks' fences, for which it is void
    passed_at: float | None = None


class Grants:
    def __init__(self, ctx: Context, sessions: Sessions, table: SnapshotTable) -> None:
        self._ctx, self._sessions, self._table = ctx, sessions, table
        self.open: dict[int, Granted] = {}
        self.ranks: dict[int, RankState] = {}
        self.margin = Margin(ctx.policy.grant_margin_max_steps)
        self.newest = 0  # grant
        self._newest_step = -1  # that a grant of this stewardship became
        self._refused_at = -1e9
        self.refused: Missed | None = None  # the newest grant that a rank could not even take; None once all took one
        self._exact, self._exact_at = -1, 0.0  # newest grant for a rank that waits, and when
        self._full_since: float | None = None  # every rank trains, and one of them has no slot for a grant
        self._by_node: tuple[EpochRecord | None, dict[str, tuple[int, ...]]] = None, {}

    def clear(self) -> None:
        self.open.clear()
        self.ranks.clear()
        self.margin.clear()
        self._newest_step = -1
        self._full_since = None
        self.refused = None

    # --- what the nodes say -------------------------------------------------------------------------------------
    def on_state(self, state: RankState) -> None:
        self.ranks[state.rank] = state
        self.newest = max(self.newest, state.grant)
        for grant in self.open.values():
            if grant.progress == -1 and state.step > FIRST_STEP:
                grant.progress = state.step - 1  # No rank had told how far it is, and it was not at the beginning.

    def on_sealed(self, sender: str, message: Sealed) -> None:
        self._table.learn_layouts(message.layouts)
        self._table.add(sender, message.fact)
        snapshot, rank = message.fact.snapshot, message.fact.rank
        grant, step = self.open.get(snapshot.grant), snapshot.step
        if grant is None:
            return
        self._newest_step = max(step, self._newest_step)
        grant.sealed.add(rank)
        self._took(grant, message.came_at)
        if grant.step is None:
            grant.step = step
        if grant.void:
            self._void_capture(snapshot, grant.void)
            self._drop_settled(grant)
        elif grant.step != step:
            self.void(grant, f"captured at step {grant.step} and, on rank {rank}, at {step}")
            self._void_capture(snapshot, grant.void)
        elif any(grant.plans.setdefault(who, plan) != plan for who, plan in plans_in(message.plan_id)):
            self.void(grant, f"rank {rank} captured by another plan")
        elif len(grant.sealed) == self._world():
            self._completed(grant)

    def on_missed(self, message: Missed) -> None:
        grant = self.open.get(message.grant)
        if grant is None:
            return
        grant.missed.add(message.rank)
        written = merged(grant.written, message.written)
        news, grant.written = written != grant.written, written
        if message.reason in REFUSED_AT_ONCE:
            self._refused_at, self.refused = self._ctx.now, message
        if message.reason.startswith(LATE) and (grant.late or not grant.void) and message.rank in self.ranks:
            grant.late = True
            self._took(grant, max(self.ranks[message.rank].step, grant.from_step))
        if not grant.void:
            self.void(grant, f"rank {message.rank} missed it: {message.reason}")
        elif news:
            self._say_void(grant)
        self._drop_settled(grant)

    def on_reset(self, node: str) -> None:
        """A node's session begins anew: it has doomed every slot it was filling."""
        ranks = self._ranks_of(node)
        for rank in ranks:
            self.ranks.pop(rank, None)
        for grant in list(self.open.values()):
            lacking = ranks - grant.sealed - grant.missed
            if lacking:
                grant.missed |= lacking
                self.void(grant, f"the daemon {node} began anew")
                self._drop_settled(grant)

    # --- voids --------------------------------------------------------------------------------------------------
    def void(self, grant: Granted, reason: str) -> None:
        """The grants after it go too: a rank that left this one out would take the next where the others take this one, and
        so on, one step apart for ever."""
        for number in sorted(self.open):
            if number >= grant.number and not self.open[number].void:
                self._void_one(self.open[number], reason if number == grant.number else f"{BEHIND}: {reason}")

    def _void_one(self, grant: Granted, reason: str) -> None:
        grant.void = reason
        self._say_void(grant)
        if grant.step is not None:
            self._void_capture(SnapshotId(self._ctx.number, grant.step, grant.number), reason)
        self._drop_settled(grant)

    def _void_capture(self, snapshot: SnapshotId, reason: str) -> None:
        state = self._table.states.get(snapshot)
        if state is None or state.void:
            return
        if self.grant_void(state):
            state.become_void("grant_void", reason)
        self._table.dirty.add(state.snapshot)

    def grant_void(self, state: SnapshotState) -> bool:
        """The grant that it was captured under is void, and it was certified by nobody. Another steward may have done so while
        we were cut off: before everyone has told, nobody can say that it was not (P3). What is then not whole is void for
        that."""
        told = state.certified or self._table.remembers(state.snapshot)
        return not told and self._sessions.members_live()

    def _say_void(self, grant: Granted) -> None:
        grant.said_at = self._ctx.now
        for node in self._member_nodes():
            unsettled = self._ranks_of(node) - grant.missed - grant.sealed
            if (unsettled or grant.written) and self._sessions.live(node):
                session = self._sessions.session(node)
                self._ctx.send(
                    node, Void(self._ctx.number, grant.number, grant.void, None, session, grant.written)
                )

    def _drop_settled(self, grant: Granted) -> None:
        if grant.void and len(grant.missed | grant.sealed) >= self._world():
            self.open.pop(grant.number, None)
            if grant.late and grant.progress is not None:
                self.margin.saw(grant.need)

    def _completed(self, grant: Granted) -> None:
        self.open.pop(grant.number, None)
        self.refused = None
        if grant.progress is not None:
            self.margin.saw(grant.need)

    @staticmethod
    def _took(grant: Granted, came_at: int | None) -> None:
        """``came_at``: the newest step that a rank had called when this grant came to it."""
        if grant.progress is not None and came_at is not None and came_at >= grant.earliest:
            grant.need = max(grant.need, came_at - grant.progress)

    # --- granting -----------------------------------------------------------------------------------------------
    def act(self) -> None:
        """Grant as many steps as every rank has room for.

        Not while a void grant is still with some ranks: they would take it where the others take the next one, and so on,
        one step apart for ever.
        """
        if self._ctx.now - self._refused_at < REFUSED_PAUSE_S:
            return
        if not self._everyone_is_here() or any(grant.void for grant in self.open.values()):
            self._full_since = None
            return
        asked = self._asked()
        if asked is not None:
            self._grant_exactly(asked)
        progress = max(state.step for state in self.ranks.values())
        while self._room() > 0:
            self._grant_ahead(progress)
        if self.open:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = self._ctx.now

    def full(self) -> bool:
        """No rank has been able to capture for so long, for want of slots alone."""
        return self._full_for() > FULL_S

    def held_up(self) -> bool:
        """The same for a shorter time: no slot is on its way back."""
        return self._full_for() > RETURN_S

    def presses(self) -> bool:
        """A slot is wanted: for long enough, or a rank waits for a step of its own."""
        return self.full() or (self.held_up() and self._asked() is not None)

    def gets_room(self) -> None:
        """A slot is on its way back."""
        self._full_since = None

    def _full_for(self) -> float:
        return -1.0 if self._full_since is None else self._ctx.now - self._full_since

    def _grant_ahead(self, progress: int) -> None:
        earliest = max([progress, *(grant.earliest for grant in self.open.values())]) + 1
        grant = self._grant(max(progress + 1 + self.margin.steps, self._untaken()))
        grant.progress, grant.earliest = progress, earliest

    def _untaken(self) -> int:
        """The first step beyond what was captured and what the grants that stand are for. Those that were given back do not count:
        while the ranks stand still and give each one back, the next would be for a step ever further away."""
        return max([self._newest_step, *(grant.from_step for grant in self.open.values())]) + 1

    def on_tick(self) -> None:
        for grant in list(self.open.values()):
            if self._ctx.now - grant.said_at >= REPEAT_S:
                if grant.void:
                    self._say_void(grant)
                else:
                    self._say(grant)
            self._look_for_stuck(grant)

    def stands(self, number: int) -> bool:
        """May ranks still complete what they capture under this grant?"""
        grant = self.open.get(number)
        return grant is not None and not grant.void

    def _look_for_stuck(self, grant: Granted) -> None:
        lacking = set(range(self._world())) - grant.sealed - grant.missed
        states = [self.ranks[rank] for rank in lacking if rank in self.ranks]
        if any(state.step > grant.from_step for state in states):
            grant.passed_at = grant.passed_at or self._ctx.now
            if not grant.void and self._ctx.now - grant.passed_at > STUCK_S:
                self.void(grant, "a rank neither sealed nor gave it up")
        else:
            grant.passed_at = None

    def _grant_exactly(self, step: int) -> None:
        """must=True: ranks wait for this very step, so nothing granted beyond it may keep their slots."""
        if any(grant.from_step == step and not grant.void for grant in self.open.values()):
            return
        if self._exact == step and self._ctx.now - self._exact_at < REPEAT_S:
            return  # somebody could not take it: at once again would only spin
        if self._room() > 0:
            self._exact, self._exact_at = step, self._ctx.now
            self._grant(step)
            return
        for grant in list(self.open.values()):
            if grant.from_step > step and not grant.sealed and not grant.void:
                self.void(grant, f"its slots are needed for step {step}")

    def _asked(self) -> int | None:
        """A step that some rank waits for and that all can still deliver."""
        asks = [state.asks for state in self.ranks.values() if state.asks is not None]
        if not asks:
            return None
        step = max(asks)
        fits = all(state.step < step or state.asks == step for state in self.ranks.values())
        return step if fits else None

    def _grant(self, from_step: int) -> Granted:
        self.newest += 1
        grant = self.open[self.newest] = Granted(self.newest, from_step, self._ctx.now)
        self._say(grant)
        return grant

    def _say(self, grant: Granted) -> None:
        grant.said_at = self._ctx.now
        for node in self._member_nodes():
            if self._ranks_of(node) - grant.sealed - grant.missed and self._sessions.live(node):
                session = self._sessions.session(node)
                self._ctx.send(node, Grant(self._ctx.number, grant.number, grant.from_step, session))

    def _everyone_is_here(self) -> bool:
        return (
            len(self.ranks) == self._world() > 0
            and all(not state.left for state in self.ranks.values())
            and self._sessions.members_live()
        )

    def _room(self) -> int:
        """Grants that every rank could take now."""
        return min(self.rooms().values())

    def rooms(self) -> dict[int, int]:
        """Per rank the grants that it could take now. What it was already granted and has not settled is spoken for."""
        waiting = dict.fromkeys(self.ranks, 0)
        for grant in self.open.values():
            for rank in waiting:
                if rank not in grant.sealed and rank not in grant.missed:
                    waiting[rank] += 1
        return {rank: state.free_slots - waiting[rank] for rank, state in self.ranks.items()}

    def _world(self) -> int:
        return self._ctx.record.world if self._ctx.record is not None else 0

    def _member_nodes(self) -> list[str]:
        return [node.node for node in self._ctx.record.nodes] if self._ctx.record is not None else []

    def _ranks_of(self, node: str) -> set[int]:
        record = self._ctx.record
        if record is not None and record is not self._by_node[0]:  # to tell that it is equal takes as long as to look
            self._by_node = record, ranks_by_node(record)
        return set(self._by_node[1].get(node, ())) if record is not None else set()
