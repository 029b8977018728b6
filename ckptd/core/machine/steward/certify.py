"""Certificates: what holds now of each snapshot, and which older memory may go (design D9, P2, P3).

An older snapshot is released only by a newer one whose current level is not below its own, both bounded by what the policy
can ask of this epoch's nodes. Nothing is certified before everyone has told what it holds, or is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ckptd.core.ids import SnapshotId
from ckptd.core.instructions import Alarm
from ckptd.core.life import JOB_OVER
from ckptd.core.machine.context import Context
from ckptd.core.machine.steward.grants import Grants
from ckptd.core.machine.steward.ledger import Facts, Ledger
from ckptd.core.machine.steward.parity import Parities
from ckptd.core.machine.steward.protecting import Protecting
from ckptd.core.machine.steward.sessions import Sessions
from ckptd.core.messages import Certificate, Holders, Void
from ckptd.core.redundancy import Parity, attainable

REPEAT_S = 2.0
REPEATS_LIVELY = 10  # rounds after the last change; then every IDLE_S
IDLE_S = 30.0
KEEP_FAILURES_MAX = 3  # failed flushes, before a snapshot that was to be kept gives its memory to newer ones
RELEASES_NAMED_MAX = 32  # in one certificate


class Certify:
    def __init__(
        self, ctx: Context, sessions: Sessions, ledger: Ledger, grants: Grants, parities: Parities
    ) -> None:
        self._ctx, self._sessions, self._ledger, self._grants = ctx, sessions, ledger, grants
        self._parities = parities
        self.follows: Callable[[Facts], bool] = lambda facts: False  # see Draining
        self.pinned: set[SnapshotId] = set()  # a flush needs them
        self.protecting = Protecting(ctx)
        self._durable_told: dict[str, SnapshotId] = {}  # node -> newest that it knows to be durable
        self._serial = 0
        self._repeated_at = -1e9
        self._rounds = 0
        self._degraded = False

    def wanted(self) -> int:
        """The most that the policy asks for and this epoch's nodes could give."""
        record = self._ctx.record
        nodes = record.nodes if record is not None else ()
        return attainable(self._ctx.policy.tolerates, (node.domain for node in nodes))

    # --- after every change -------------------------------------------------------------------------------------
    def review(self) -> None:
        if not self._ledger.dirty or not self._sessions.settled():
            return
        dirty, self._ledger.dirty = sorted(self._ledger.dirty, reverse=True), set()
        for snapshot in dirty:  # newest first: whether an older one is replaced depends on what the newer ones are now
            facts = self._ledger.facts.get(snapshot)
            if facts is not None:
                self._look_at(facts)
        for facts in self._left_behind():  # whether one of them is of any use depends on the others, which are weighed by now
            self._look_at(facts)
        self._release()

    def _look_at(self, facts: Facts) -> None:
        self._ledger.weigh(facts)
        if facts.again and facts.level < 0 and self._replaced(facts):
            return  # what was released and a node brought back in part goes again; it is not void, which would be news
        if not facts.void:
            self._find_void(facts)
        level = -1 if facts.void else min(facts.level, self.wanted())
        said = facts.certificate
        if said is None and not facts.void and self._ledger.unread(facts):
            return  # a steward that has just begun: not known is not fallen (P2)
        if said is None and self._under_way(facts):
            return  # copies may be faster than the last rank's own word, which may still be that it missed it
        now = (level, self.wanted(), facts.durable)
        before = self._ledger.heard.get(facts.snapshot, -1)
        if max(level, before) >= 0 if said is None else (said.level, said.wanted, said.durable) != now:
            self._issue(facts, level)
        if facts.void:
            self._say_void(facts)
            if not facts.nodes():
                self._ledger.drop(facts)

    def _find_void(self, facts: Facts) -> None:
        """Copies that must be equal differ; or a rank is missing and no grant that stands could bring it."""
        if facts.agreement is not None and facts.agreement.errors:
            facts.void = "; ".join(facts.agreement.errors)
            self._ctx.emit(Alarm("silent_corruption", f"step {facts.snapshot.step}: {facts.void}"))
        elif (
            facts.level < 0
            and facts.snapshot.epoch == self._ctx.number
            and not facts.durable
            and not self._under_way(facts)
            and self._sessions.members_live()
            and all(name in self._ledger.layouts for name in facts.layout_ids.values())
        ):
            facts.void = "a rank's part of it is nowhere any more"
        elif self._useless(facts):
            facts.void = "of an earlier epoch, not whole any more or left behind"

    # --- certificates -------------------------------------------------------------------------------------------
    def _issue(self, facts: Facts, level: int) -> None:
        self._serial += 1
        facts.certificate = Certificate(
            self._ctx.number, self._serial, facts.snapshot, level, self.wanted(), facts.durable
        )
        self._rounds = 0
        self._broadcast(facts)
        if 0 <= level < self.wanted():
            self._parities.order(facts)
        elif level >= 0:
            self._parities.made_good(facts.snapshot)
        self._watch_degradation(facts)

    def _watch_degradation(self, facts: Facts) -> None:
        """An alarm when the newest snapshot's level falls below what the policy wants, not while it is still rising."""
        certificate, record = facts.certificate, self._ctx.record
        newest = max((f.snapshot for f in self._ledger.facts.values() if f.certificate), default=None)
        if certificate is None or record is None or facts.snapshot != newest:
            return
        # Members of earlier epochs that are gone say nothing about this one.
        gone = sorted(node.node for node in record.nodes if not self._ctx.is_up(node.node))
        if certificate.level < certificate.wanted and gone and not self._degraded:
            self._degraded = True
            level = certificate.level
            survives = f"survives the loss of {level} domains" if level >= 0 else "is not whole in memory"
            where = f"step {facts.snapshot.step} {survives}"
            self._ctx.emit(Alarm("degraded", f"{where}, {certificate.wanted} are wanted; gone: {', '.join(gone)}"))
        elif certificate.level >= certificate.wanted:
            self._degraded = False

    def _broadcast(self, facts: Facts) -> None:
        for node in self._sessions.seats:
            self.tell(node, facts)

    def tell(self, node: str, facts: Facts) -> None:
        if facts.certificate is not None and self._sessions.live(node):
            if facts.certificate.durable:
                self._durable_told[node] = max(facts.snapshot, self._durable_told.get(node, facts.snapshot))
            self._ctx.send(node, replace(facts.certificate, session=self._sessions.session(node)))

    def tell_all(self, node: str) -> None:
        """A node that has just told what it holds hears what holds."""
        for snapshot in sorted(self._ledger.facts):
            self.tell(node, self._ledger.facts[snapshot])

    def heard_durable(self, node: str, snapshots: Iterable[SnapshotId]) -> None:
        """A session begins: these are what the node knows to be durable."""
        self._durable_told.pop(node, None)
        known = max(snapshots, default=None)
        if known is not None:
            self._durable_told[node] = known

    def tell_durable(self) -> None:
        """The newest that is durable, to nodes that do not know it: when no memory holds it any more, nothing else names it."""
        newest = max(filter(self._ctx.is_candidate, self._ledger.durable), default=None)
        if newest is None or newest in self._ledger.facts:
            return
        for node in self._sessions.live_nodes():
            known = self._durable_told.get(node)
            if known is None or known < newest:
                session = self._sessions.session(node)
                said = Certificate(self._ctx.number, 0, newest, -1, self.wanted(), True, session=session)
                self._ctx.send(node, said)

    # --- releases -----------------------------------------------------------------------------------------------
    def _release(self) -> None:
        """Find what the newest certificates make unneeded, and name it in them."""
        wanted = self.wanted()
        certified = [f for f in self._ledger.facts.values() if not f.void and self._certified_now(f)]
        protecting = self.protecting.choose(certified, wanted)
        best = -1
        for snapshot in sorted(self._ledger.facts, reverse=True):
            facts = self._ledger.facts[snapshot]
            if facts.void:
                continue
            level = wanted if self._awaited(facts) else min(facts.level, wanted)
            needed = snapshot == protecting or self._needed(facts)
            if (best >= 0 and level <= best and not needed) or self._spent(facts):
                self._ledger.release(snapshot)
                self._rounds = 0
            elif self._certified_now(facts) and not self.follows(facts):
                best = max(best, level)
        self.name_releases()

    def _useless(self, facts: Facts) -> bool:
        """Of an older epoch and not whole any more, nobody being able to bring the rest; or older than another one of a lineage
        that a declared fresh start left behind. It would only keep slots from what is to come."""
        if facts.snapshot.epoch == self._ctx.number or not self._ctx.done or self._needed(facts):
            return False
        if facts.level < 0:
            known = all(name in self._ledger.layouts for name in facts.layout_ids.values())
            return known and not self._awaited(facts)
        if self._ctx.is_candidate(facts.snapshot):
            return False
        others = [f for f in self._ledger.facts.values() if f.level >= 0 and f.snapshot.epoch < self._ctx.number]
        return any((f.level, f.snapshot) > (facts.level, facts.snapshot) for f in others if not f.void)

    def _left_behind(self) -> list[Facts]:
        """Whole, and of a lineage that a declared fresh start does not continue."""
        found = [f for f in self._ledger.facts.values() if f.level >= 0 and not f.void]
        return [f for f in found if f.snapshot.epoch < self._ctx.number and not self._ctx.is_candidate(f.snapshot)]

    def _replaced(self, facts: Facts) -> bool:
        """The next release lets go of it, whole or not."""
        if facts.void or self._needed(facts):
            return False
        newer = (f for s, f in self._ledger.facts.items() if s > facts.snapshot and not f.void)
        return any(self._certified_now(f) and not self.follows(f) for f in newer)

    def _spent(self, facts: Facts) -> bool:
        """Durable, while memory lacks a part of it that nobody is going to bring: the rest only keeps slots from what is to
        come."""
        spent = facts.durable and facts.level < 0 and self._sessions.members_live()
        return spent and not self._awaited(facts) and not self._needed(facts)

    def _awaited(self, facts: Facts) -> bool:
        """Somebody who is away may bring the rest of what this epoch continued, and at any level: nobody here may know what was
        certified. When slots are needed the oldest such goes: he may never come back, and the job goes on (P14)."""
        if facts.level >= 0 or facts.again or facts.snapshot.epoch == self._ctx.number:
            return False
        if not self._ctx.is_candidate(facts.snapshot) or self._sessions.everyone_live():
            return False
        if not self._grants.full():
            return True
        held = (f for f in self._ledger.facts.values() if f.level < 0 and any(map(self._sessions.live, f.nodes())))
        return facts.snapshot != min((f.snapshot for f in held), default=None)

    def _certified_now(self, facts: Facts) -> bool:
        return facts.certificate is not None and facts.certificate.level >= 0 and facts.level >= 0

    def _needed(self, facts: Facts) -> bool:
        if facts.snapshot in self.pinned or self._kept(facts) or self._ledger.unread(facts):
            return True
        return facts.level < 0 and self._under_way(facts)

    def _under_way(self, facts: Facts) -> bool:
        """A grant that stands could still complete it."""
        step = facts.snapshot.step
        return facts.snapshot.epoch == self._ctx.number and (self._grants.serves(step) or self._grants.may_become(step))

    def _kept(self, facts: Facts) -> bool:
        """keep=True: it waits for its flush, unless storage does not work."""
        unflushed = facts.keep and not facts.durable and facts.level >= 0 and self._ctx.is_candidate(facts.snapshot)
        return unflushed and self._ctx.policy.durable and facts.failures < KEEP_FAILURES_MAX

    def name_releases(self) -> None:
        """In the newest certificate, for a node that missed it."""
        newest, gone = self._newest_certified(), self._gone()
        if newest is None or newest.certificate is None:
            return
        if gone != newest.certificate.releases:
            self._serial += 1
            newest.certificate = replace(newest.certificate, serial=self._serial, releases=gone)
            self._broadcast(newest)

    def _gone(self) -> tuple[SnapshotId, ...]:
        return tuple(sorted(list(self._ledger.released)[-RELEASES_NAMED_MAX:]))  # it is in order of release

    def tell_released(self) -> None:
        """Durable ones, when nothing is certified that could name them: what was spent may have been all there was, and whoever
        holds a part of it would keep its slots for ever (P14). Of the others a node that missed it may have the last copy."""
        gone = tuple(snapshot for snapshot in self._gone() if snapshot in self._ledger.durable)
        if not gone or self._newest_certified() is not None:
            return
        self._serial += 1
        said = Certificate(self._ctx.number, self._serial, gone[-1], -1, self.wanted(), True, gone)
        for node in self._sessions.live_nodes():
            self._ctx.send(node, replace(said, session=self._sessions.session(node)))

    def _newest_certified(self) -> Facts | None:
        certified = [f for f in self._ledger.facts.values() if not f.void and self._certified_now(f)]
        return max(certified, key=lambda facts: facts.snapshot, default=None)

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
            self._ledger.dirty.update(s for s, facts in self._ledger.facts.items() if facts.level < 0)
        if self.protecting.overdue():
            self._release()
        if self._ctx.now - self._repeated_at < pause:
            return
        self._repeated_at = self._ctx.now
        self._rounds += 1
        self.tell_durable()
        self.tell_released()
        self._parities.forget(set(self._ledger.facts))
        for snapshot in sorted(self._ledger.facts):
            facts = self._ledger.facts[snapshot]
            if facts.void:
                self._say_void(facts)
            else:
                self._broadcast(facts)
                self._ask_for_copies(facts)

    def _say_void(self, facts: Facts) -> None:
        for node in sorted(facts.nodes()):
            if self._sessions.live(node):
                self._ctx.send(
                    node, Void(self._ctx.number, 0, facts.void, facts.snapshot, self._sessions.session(node))
                )

    def _ask_for_copies(self, facts: Facts) -> None:
        """Ranks with too few copies: the fullest live holder is told which there are, and makes the others."""
        if facts.level < 0 or facts.level >= self.wanted() or not self._ctx.is_candidate(facts.snapshot):
            return
        if facts.durable and self._sessions.life() in JOB_OVER:
            return  # a node that lacked memory has let go of it, and would get it back
        self._parities.order(facts)
        # On a rung of copies no parity is made, also not where there was some: copies take its place. So they do where parity has
        # not brought what a newer snapshot needs to take an older one's slots, and none is left.
        parity = isinstance(self._ctx.redundancy, Parity) and not self._grants.full()
        by_parity = self._parities.ranks_by_parity_alone(facts) if parity else set()
        asked = False
        for rank, nodes in facts.holders.items():
            if rank in by_parity:
                continue
            live = sorted((tier, node) for node, tier in nodes.items() if self._sessions.live(node))
            if live and len({self._ctx.domain(node) for _, node in live}) <= self.wanted():
                known = tuple((node, tier) for tier, node in live)
                to = live[0][1]
                message = Holders(self._ctx.number, self._sessions.session(to), facts.snapshot, rank, known)
                self._ctx.send(to, message)
                asked = True
        if not asked:
            self._ask_for_shared(facts, by_parity)

    def _ask_for_shared(self, facts: Facts, by_parity: set[int]) -> None:
        """Every rank has its copies, but a slice that several ranks captured has lost one of these captures."""
        assert facts.classes is not None, "a complete snapshot has classes"
        for copies in facts.classes.shared:
            holders = [
                (tier, node, rank, needed)
                for rank, needed in copies
                for node, tier in facts.holders.get(rank, {}).items()
                if tier <= needed and self._sessions.live(node)
            ]
            if any(needed >= 1 and rank in by_parity for rank, needed in copies):
                continue
            if holders and len({self._ctx.domain(node) for _, node, _, _ in holders}) <= self.wanted():
                _, to, rank, needed = min(holders)
                known = tuple(sorted({(node, tier) for tier, node, _, _ in holders}))
                session = self._sessions.session(to)
                self._ctx.send(to, Holders(self._ctx.number, session, facts.snapshot, rank, known, needed))
