"""Certificates: what holds now of each snapshot, and which older memory may go (design D9, P2, P3).

An older snapshot is released only by a newer one whose current level is not below its own, both bounded by what the policy
can ask of this epoch's nodes. Nothing is certified before everyone has told what it holds, or is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckptd.core.grouped import grouped
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.instructions import Alarm
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.grants import Grants
from ckptd.core.protocol.machine.steward.guards import Guards
from ckptd.core.protocol.machine.steward.parity import Parities
from ckptd.core.protocol.machine.steward.protecting import Protecting
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.snapshot import Phase, SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import Certificate, Holders, Void
from ckptd.core.redundancy.policies import Parity

REPEAT_S = 2.0
REPEATS_LIVELY = 10  # rounds after the last change; then every IDLE_S
IDLE_S = 30.0
RELEASES_NAMED_MAX = 32  # in one certificate
ASKED_AT_ONCE_MAX = 1024  # ranks whose copies are asked for, before the other snapshots wait for the next tick


class Certify:
    def __init__(
        self, ctx: Context, sessions: Sessions, table: SnapshotTable, grants: Grants, parities: Parities
    ) -> None:
        self._ctx, self._sessions, self._table, self._grants = ctx, sessions, table, grants
        self._parities = parities
        self.guards = Guards(ctx, sessions, table, grants)
        self.protecting = Protecting(ctx)
        self._durable_told: dict[str, SnapshotId] = {}  # node -> newest that it knows to be durable
        self._owed: dict[str, list[SnapshotId]] = {}  # nodes that hear everything as soon as it is weighed -> what they list
        self._serial = 0
        self._repeated_at = -1e9
        self._rounds = 0
        self._to_repeat: list[SnapshotId] = []  # the newest first
        self._degraded = False
        self._looked = False  # at all that was told, since everyone told

    # --- after every change -------------------------------------------------------------------------------------
    def begin(self) -> None:
        """An office begins."""
        self.protecting.clear()
        self._looked = False

    def knows_all(self) -> bool:
        """Else there may be something that nobody has looked at yet, and that comes before all that is known."""
        return self._looked and self._sessions.settled()

    def review(self) -> None:
        """Look at what has changed."""
        settled, todo = self._sessions.settled(), bool(self._table.dirty or self._owed)
        self._looked = settled and (not todo or self._look_through())

    def _look_through(self) -> bool:
        """False: it goes on with the next look. The sums of thousands of ranks take as long as a handler may, and a steward that
        has just begun has those of several snapshots to compare."""
        dirty, self._table.dirty = sorted(self._table.dirty), set()
        while dirty:  # newest first: whether an older one is replaced depends on what the newer ones are now
            state = self._table.states.get(dirty.pop())
            compared = state is not None and self._look_at(state)
            if compared and dirty:
                self._table.dirty.update(dirty)
                return False
        for state in self.guards.of_a_left_lineage():  # of which of them is the better one, now that all are weighed
            self._look_at(state)
        self._release()
        for node, listed in sorted(self._owed.items()):
            for snapshot in sorted(self._table.states):
                self.tell(node, self._table.states[snapshot])
            self._say_gone(node, sorted(set(listed) - self._table.states.keys()))
        self._owed.clear()
        return True

    def _look_at(self, state: SnapshotState) -> bool:
        """Were its sums compared, which is done once?"""
        compared = self._table.weigh(state)
        self._judge(state)
        return compared

    def _judge(self, state: SnapshotState) -> None:
        guards = self.guards
        if guards.returned_in_part(state):
            self._let_go(state, "returned_in_part")
            return
        if state.phase is not Phase.VOID:
            self._look_for_void(state)
        if guards.nothing_to_say(state):
            return
        void, said = state.phase is Phase.VOID, state.certificate
        wanted = guards.wanted()
        level = -1 if void else min(state.level, wanted)
        now = (level, wanted, state.durable)
        news = level >= 0 or guards.remembered(state)
        if news if said is None else (said.level, said.wanted, said.durable) != now:
            self._issue(state, level)
        if void:
            self._say_void(state)
            if not state.nodes():
                self._table.drop(state)

    def _look_for_void(self, state: SnapshotState) -> None:
        guards = self.guards
        if guards.differs(state):
            assert state.agreement is not None, "it was looked at"
            state.become_void("differs", grouped(state.agreement.errors))
            self._ctx.emit(Alarm("silent_corruption", f"step {state.snapshot.step}: {state.void}"))
        elif guards.nowhere(state):
            state.become_void("nowhere", "a rank's part of it is nowhere any more")
        elif guards.not_whole(state):
            state.become_void("not_whole", "of an earlier epoch, and not whole any more")
        elif guards.left_behind(state):
            state.become_void("left_behind", "of an earlier epoch that was left behind")

    # --- certificates -------------------------------------------------------------------------------------------
    def _issue(self, state: SnapshotState, level: int) -> None:
        self._serial += 1
        wanted = self.guards.wanted()
        state.certify(Certificate(self._ctx.number, self._serial, state.snapshot, level, wanted, state.durable))
        self._rounds = 0
        self._broadcast(state)
        if 0 <= level < wanted:
            self._parities.order(state)
        elif level >= 0:
            self._parities.made_good(state.snapshot)
        self._watch_degradation(state)

    def _watch_degradation(self, state: SnapshotState) -> None:
        """An alarm when the newest snapshot's level falls below what the policy wants, not while it is still rising."""
        certificate, record = state.certificate, self._ctx.record
        newest = max((f.snapshot for f in self._table.states.values() if f.certificate), default=None)
        if certificate is None or record is None or state.snapshot != newest:
            return
        # Members of earlier epochs that are gone say nothing about this one.
        gone = sorted(node.node for node in record.nodes if not self._ctx.is_up(node.node))
        if certificate.level < certificate.wanted and gone and not self._degraded:
            self._degraded = True
            level = certificate.level
            survives = f"survives the loss of {level} domains" if level >= 0 else "is not whole in memory"
            where = f"step {state.snapshot.step} {survives}"
            self._ctx.emit(Alarm("degraded", f"{where}, {certificate.wanted} are wanted; gone: {', '.join(gone)}"))
        elif certificate.level >= certificate.wanted:
            self._degraded = False

    def _broadcast(self, state: SnapshotState) -> None:
        for node in self._sessions.by_node:
            self.tell(node, state)

    def tell(self, node: str, state: SnapshotState) -> None:
        """What was said before something changed may not hold any more: it waits until that is weighed (P2)."""
        if state.certificate is not None and state.snapshot not in self._table.dirty and self._sessions.live(node):
            if state.certificate.durable:
                self._durable_told[node] = max(state.snapshot, self._durable_told.get(node, state.snapshot))
            self._ctx.send(node, replace(state.certificate, session=self._sessions.session(node)))

    def say_fallen(self, node: str, snapshot: SnapshotId, releases: tuple[SnapshotId, ...] = ()) -> None:
        """No memory holds it any more, as far as is known: who was to tell that to the node may have gone as well (P2)."""
        self._serial += 1
        durable, session = snapshot.at in self._table.durable, self._sessions.session(node)
        wanted = self.guards.wanted()
        said = Certificate(self._ctx.number, self._serial, snapshot, -1, wanted, durable, releases, session=session)
        self._ctx.send(node, said)

    def _say_gone(self, node: str, listed: list[SnapshotId]) -> None:
        """Nobody holds anything of these. Those before a newer one went for it as a rule, and may be many: they are named in the
        newest certificate from now on, as this word may be lost."""
        certified = self._newest_certified()
        older = [snapshot for snapshot in listed if certified is not None and snapshot < certified.snapshot]
        for snapshot in listed[len(older) :]:
            self.say_fallen(node, snapshot)
            self._table.keep_fallen(snapshot)
        for first in range(0, len(older), RELEASES_NAMED_MAX):
            some = tuple(older[first : first + RELEASES_NAMED_MAX])
            self.say_fallen(node, some[-1], some)
        for snapshot in older:
            self._table.keep_fallen(snapshot)

    def tell_all(self, node: str, listed: list[SnapshotId]) -> None:
        """A node that has just told what it holds hears what holds. listed: of these it was told a level."""
        self._owed[node] = listed

    def heard_durable(self, node: str, snapshots: Iterable[SnapshotId]) -> None:
        """A session begins: these are what the node knows to be durable."""
        self._durable_told.pop(node, None)
        known = max(snapshots, default=None)
        if known is not None:
            self._durable_told[node] = known

    def tell_durable(self) -> None:
        """The newest that is durable, to nodes that do not know it: when no memory holds it any more, nothing else names it."""
        newest = self._newest_durable()
        if newest is None or newest in self._table.states:
            return
        for node in self._sessions.live_nodes():
            known = self._durable_told.get(node)
            if known is None or known < newest:
                self.say_fallen(node, newest)

    # --- releases -----------------------------------------------------------------------------------------------
    def _release(self) -> None:
        """Find what the newest certificates make unneeded, and name it in them."""
        guards = self.guards
        certified = [state for state in self._table.states.values() if state.certified]
        protecting = self.protecting.choose(certified, guards.wanted())
        best, known = -1, len(self._table.states)
        for snapshot in sorted(self._table.states, reverse=True):
            state = self._table.states[snapshot]
            if state.phase is Phase.VOID:
                continue
            if snapshot != protecting and guards.outdone(state, best):
                self._let_go(state, "outdone")
            elif guards.spent(state):
                self._let_go(state, "spent")
            elif state.certified and self._ctx.is_candidate(snapshot) and not guards.follows(state):
                best = max(best, guards.worth(state))
        if len(self._table.states) < known:
            self._grants.gets_room()
        elif self.blocked() and self._grants.presses():
            written = (state for state in certified if state.certified and guards.written_out(state))
            oldest = min(written, key=lambda state: state.snapshot, default=None)
            if oldest is not None:
                self._give_up(oldest)
        self.name_releases()

    def blocked(self) -> bool:
        """No newer snapshot is going to outdo any: there is no slot for one, and no copies are under way that would free one."""
        return self._grants.held_up() and self.protecting.now is None

    def _give_up(self, state: SnapshotState) -> None:
        """Storage alone has it from now on, which is said before any of its memory goes (P2)."""
        for node in self._sessions.live_nodes():
            self.say_fallen(node, state.snapshot, (state.snapshot,))
        self._let_go(state, "written_out")
        self._grants.gets_room()

    def _let_go(self, state: SnapshotState, by: str) -> None:
        if by == "outdone" and state.failures and state.keep and not state.durable:
            text = f"step {state.snapshot.step} was to be kept: {state.failures} tries to store it failed, and its memory is needed"
            self._ctx.emit(Alarm("kept", f"{text}: it is gone"))
            self._grants.gets_room()  # the others that are to be kept stay, until nothing has got a slot for as long again
        state.become_released(by)
        self._table.release(state.snapshot)
        self._rounds = 0

    def name_releases(self, *, tell: bool = True) -> None:
        """In the newest certificate, for a node that missed it; in no other, which would name what is released no more."""
        newest, gone = self._newest_certified(), self._gone()
        for state in self._table.states.values():
            if state is not newest and state.certificate is not None and state.certificate.releases:
                state.certificate = replace(state.certificate, releases=())
        if newest is None or newest.certificate is None:
            return
        if gone != newest.certificate.releases:
            self._serial += 1
            newest.certificate = replace(newest.certificate, serial=self._serial, releases=gone)
            if tell:
                self._broadcast(newest)

    def _gone(self) -> tuple[SnapshotId, ...]:
        released = list(self._table.released)[-RELEASES_NAMED_MAX:]  # it is in order of release
        return tuple(sorted({*released, *self._fallen(outdone=True)}))

    def _fallen(self, *, outdone: bool) -> list[SnapshotId]:
        """What nobody holds: who missed that word would show a level of it for ever (P2). outdone: those before a newer one that is
        certified."""
        newest, table = self._newest_certified(), self._table
        gone = (snapshot for snapshot in table.fallen if snapshot not in table.states)
        return sorted(s for s in gone if outdone is (newest is not None and s < newest.snapshot))

    def tell_released(self) -> None:
        """Durable ones and what is older, when nothing is certified that could name them: what was spent or given up may have been
        all there was, and whoever holds a part of it would keep its slots for ever (P14). Of the others a node that missed it may
        have the last copy."""
        if self._newest_certified() is not None:
            return
        newest, durable = self._newest_durable(), self._table.durable
        gone = tuple(snapshot for snapshot in self._gone() if snapshot.at in durable or self._goes_for(newest, snapshot))
        if not gone:
            return
        for node in self._sessions.live_nodes():
            self.say_fallen(node, gone[-1], gone)

    def _newest_durable(self) -> SnapshotId | None:
        return max(filter(self._ctx.is_candidate, self._table.durable.values()), default=None)

    def _goes_for(self, newest: SnapshotId | None, snapshot: SnapshotId) -> bool:
        return newest is not None and snapshot < newest and self._ctx.is_candidate(snapshot)

    def _tell_fallen(self) -> None:
        for snapshot in self._fallen(outdone=False):
            for node in self._sessions.live_nodes():
                self.say_fallen(node, snapshot)

    def _newest_certified(self) -> SnapshotState | None:
        certified = (state for state in self._table.states.values() if state.certified)
        return max(certified, key=lambda state: state.snapshot, default=None)

    def repeat_now(self) -> None:
        """What is to be done about what is held has changed."""
        self._rounds, self._repeated_at = 0, -1e9

    def repeat_soon(self) -> None:
        """Somebody asks for what may have been certified already."""
        self._rounds = 0

    # --- again and again ----------------------------------------------------------------------------------------
    def on_tick(self) -> None:
        pause = REPEAT_S if self._rounds < REPEATS_LIVELY else IDLE_S
        if not self._sessions.settled():
            return
        if self._grants.full():  # what was kept for somebody who is away may have to go
            self._table.dirty.update(s for s, state in self._table.states.items() if state.level < 0)
        if not self._table.dirty and (self.protecting.overdue() or self._grants.held_up()):
            self._release()  # else by what is to be weighed first
        if self._to_repeat or self._ctx.now - self._repeated_at < pause:
            self._repeat()
            return
        self._repeated_at = self._ctx.now
        self._rounds += 1
        self.tell_durable()
        self.tell_released()
        self._tell_fallen()
        self.name_releases(tell=False)  # what came to be known as gone since; each certificate is said now anyway
        self._parities.forget(set(self._table.states))
        self._to_repeat = sorted(self._table.states, reverse=True)
        self._repeat()

    def _repeat(self) -> None:
        """The oldest first. Each of thousands of ranks may lack a copy of each snapshot: then there is one in a tick."""
        asked = 0
        while self._to_repeat and asked <= ASKED_AT_ONCE_MAX:
            state = self._table.states.get(self._to_repeat.pop())
            if state is None:
                continue
            if state.void:
                self._say_void(state)
            else:
                self._broadcast(state)
                asked += self._ask_for_copies(state)

    def _say_void(self, state: SnapshotState) -> None:
        for node in sorted(state.nodes()):
            if self._sessions.live(node):
                self.say_void(node, state.snapshot, state.void)

    def say_void(self, node: str, snapshot: SnapshotId, why: str) -> None:
        self._ctx.send(node, Void(self._ctx.number, 0, why, snapshot, self._sessions.session(node)))

    def _ask_for_copies(self, state: SnapshotState) -> int:
        """Ranks with too few copies: the fullest live holder is told which there are, and makes the others. How many were."""
        wanted = self.guards.wanted()
        if state.level < 0 or state.level >= wanted or not self._ctx.is_candidate(state.snapshot):
            return 0
        # On a level of copies no parity is made, also not where there was some: copies take its place. So they do where parity has
        # not brought what a newer snapshot needs to take an older one's slots, and none is left. Data that no slot holds any more
        # is made of parity then, wherever it can be: a copy is made of a slot.
        parity = isinstance(self._ctx.redundancy, Parity) and not self._grants.full()
        self._parities.order(state, anywhere=not parity)
        by_parity = self._parities.ranks_by_parity_alone(state) if parity else set()
        asked = 0
        for rank, nodes in state.holders.items():
            if rank in by_parity:
                continue
            live = sorted((tier, node) for node, tier in nodes.items() if self._sessions.live(node))
            if live and len({self._ctx.domain(node) for _, node in live}) <= wanted:
                known = tuple((node, tier) for tier, node in live)
                to = live[0][1]
                message = Holders(self._ctx.number, self._sessions.session(to), state.snapshot, rank, known)
                self._ctx.send(to, message)
                asked += 1
        if not asked:
            self._ask_for_shared(state, by_parity, wanted)
        return asked

    def _ask_for_shared(self, state: SnapshotState, by_parity: set[int], wanted: int) -> None:
        """Every rank has its copies, but a slice that several ranks captured has lost one of these captures."""
        assert state.classes is not None, "a complete snapshot has classes"
        for copies in state.classes.shared:
            holders = [
                (tier, node, rank, needed)
                for rank, needed in copies
                for node, tier in state.holders.get(rank, {}).items()
                if tier <= needed and self._sessions.live(node)
            ]
            if any(needed >= 1 and rank in by_parity for rank, needed in copies):
                continue
            if holders and len({self._ctx.domain(node) for _, node, _, _ in holders}) <= wanted:
                _, to, rank, needed = min(holders)
                known = tuple(sorted({(node, tier) for tier, node, _, _ in holders}))
                session = self._sessions.session(to)
                self._ctx.send(to, Holders(self._ctx.number, session, state.snapshot, rank, known, needed))
