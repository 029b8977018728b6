"""Nodes that are about to go: what only they hold is copied elsewhere as if they were gone, the most exposed first.

Levels stay facts (P2): what a leaving node holds counts while it is there. Beside them stands the level that a snapshot would
have without these nodes; where it is lower, copies are asked for, with the leaving node as their best source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.certify import Certify
from ckptd.core.protocol.machine.steward.parity import Move, Parities
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import Departures, Holders, Leaving, Remainder

LOOK_S = 0.5
AGAIN_S = 2.0  # what is still missing is asked for again after this; who leaves is said as often
AFTERWARDS_S = 20.0  # what was said before may arrive late; a new session begins with nobody leaving
ASKED_AT_ONCE_MAX = 16  # copies: the most exposed ones are to have the network first
FOLLOWS_S = 10.0  # so long a new snapshot may lean on leaving nodes before it counts, and before an older one goes for it
NAMED_MAX = 8  # reasons and snapshots in one message
NO_DOMAIN = "no failure domain is left that could take it"
LEFT_BEHIND = "this start has left it behind, and nobody copies it"
UNREADABLE = "its layout cannot be read here; another release may have written it"


@dataclass(frozen=True)
class Need:
    """``slots`` of so many bytes lie on these leaving nodes alone, among the nodes that are enough for the level. left: how many
    domains hold it without them. ask: to whom and what; None: parity, or it cannot be (stuck: why)."""

    key: tuple[SnapshotId, int, int]
    left: int
    slots: int
    nbytes: int
    nodes: frozenset[str]
    ask: tuple[str, Holders] | None = None
    stuck: str = ""


class Draining:
    def __init__(
        self, ctx: Context, sessions: Sessions, table: SnapshotTable, parities: Parities, certify: Certify
    ) -> None:
        self._ctx, self._sessions, self._table = ctx, sessions, table
        self._parities, self._certify = parities, certify
        certify.guards.follows = self.follows
        self._asked: dict[tuple[SnapshotId, int, int], float] = {}
        self._staying: frozenset[str] = frozenset()  # domains of members that stay
        self._may_go: frozenset[str] = frozenset()  # nodes that were told last that nothing is left
        self._said: frozenset[str] = frozenset()
        self._said_at = self._until = self._looked_at = -1e9

    def clear(self) -> None:
        self._asked.clear()
        self._said, self._said_at, self._until = frozenset(), -1e9, -1e9
        self._may_go = frozenset()

    def on_leaving(self, sender: str, message: Leaving) -> None:
        if message.leaving:
            self._sessions.leaving.add(sender)
        else:
            self._sessions.leaving.discard(sender)
            self._table.all_dirty()  # what was held back for it may go, also when nobody was told that it leaves
        self._looked_at = -1e9

    def act(self) -> None:
        """All that is in the books was looked at just now; else something may be missed that a leaving node is told not to hold."""
        if not self._sessions.leaving or not self._certify.knows_all() or self._ctx.now - self._looked_at < LOOK_S:
            return
        self._looked_at = self._ctx.now
        self._staying = frozenset(map(self._ctx.domain, filter(self._sessions.stays, self._members())))
        needs = [need for state in self._table.states.values() for need in self._unreadable(state)]
        falls: list[tuple[SnapshotId, int, int]] = []
        coming: list[Need] = []  # of snapshots that are so new that an older one still stands in for them
        for state, level, without, counts in self._short():
            found = [*self._copies(state, level, self._parities.ranks_in_sets(state)), *self._parity(state)]
            found += self._rest(state, level, found)
            if not self._ctx.is_candidate(state.snapshot):
                found = [replace(need, ask=None, stuck=LEFT_BEHIND) for need in found]
            (needs if counts else coming).extend(found)
            if counts:
                falls.append((state.snapshot, level, without))
                self._table.dirty.add(state.snapshot)  # it may have held back the release of an older one until now
        self._ask([*needs, *coming])
        hidden = self._hides()
        for node in sorted(filter(self._sessions.live, self._sessions.leaving)):
            if not hidden or any(node in need.nodes for need in needs):
                self._tell_remainder(node, needs, falls)

    def _hides(self) -> bool:
        """Something may come to light that only a leaving node holds: of what is not read yet, or when somebody speaks who is away
        or silent."""
        coming = (state for state in self._table.states.values() if not self._table.unreadable_ranks(state))
        back = (node for node in self._sessions.waited_for() if node not in self._may_go & self._sessions.leaving)
        return any(map(self._table.unread, coming)) or any(back)

    def _members(self) -> list[str]:
        record = self._ctx.record
        assert record is not None, "a steward has an epoch"
        return [node.node for node in record.nodes]

    # --- who leaves ---------------------------------------------------------------------------------------------
    def on_tick(self) -> None:
        """Said again and again while somebody leaves, and for a while after: any message may be lost."""
        now, leaving = self._ctx.now, frozenset(self._sessions.leaving)
        changed = leaving != self._said
        if leaving or changed:
            self._until = now + AFTERWARDS_S
        if now >= self._until or (not changed and now - self._said_at < AGAIN_S):
            return
        self._said, self._said_at = leaving, now
        if changed:
            self._table.all_dirty()  # what was held back for them may go
        for node in self._sessions.live_nodes():
            session = self._sessions.session(node)
            self._ctx.send(node, Departures(self._ctx.number, session, tuple(sorted(leaving))))

    def _tell_remainder(self, node: str, needs: list[Need], falls: list[tuple[SnapshotId, int, int]]) -> None:
        own = [need for need in needs if node in need.nodes]
        self._may_go = self._may_go - {node} if own else self._may_go | {node}
        stuck = [need for need in own if need.stuck]
        reasons = sorted({f"{_named(need)}: {need.stuck}" for need in stuck})
        self._ctx.send(
            node,
            Remainder(
                self._ctx.number,
                self._sessions.session(node),
                sum(need.slots for need in own),
                sum(need.nbytes for need in own),
                sum(need.slots for need in stuck),
                tuple(reasons[:NAMED_MAX]),
                tuple(falls[:NAMED_MAX]) if own else (),
            ),
        )

    # --- what is needed -----------------------------------------------------------------------------------------
    def follows(self, state: SnapshotState) -> bool:
        """It leans on leaving nodes, but not for long: copies elsewhere are on their way. Until then no older one is released for
        it, so that while ranks train there is always one that does without those nodes. Where the nodes that stay cannot give more,
        nothing is waited for."""
        if not self._sessions.leaving:
            return False
        stays = self._sessions.stays
        most = self._certify.guards.wanted_of(stays)
        if self._without(state) >= min(self._level(state), most) or not any(map(stays, self._sessions.by_node)):
            state.leans_since = None
            return False
        if state.leans_since is None:
            state.leans_since = self._ctx.now
        return self._ctx.now - state.leans_since < FOLLOWS_S

    def _level(self, state: SnapshotState) -> int:
        return min(state.level, self._certify.guards.wanted())

    def _without(self, state: SnapshotState) -> int:
        return min(self._level(state), self._table.level_with(state, self._sessions.stays))

    def _short(self) -> Iterator[tuple[SnapshotState, int, int, bool]]:
        """(snapshot, its level, its level without the leaving nodes, does it count) where they are needed, the newest first. What a
        newer one that does not need them is as good as needs nothing; for what may be restored after this epoch, only such a one
        can stand in."""
        found = [state for _, state in sorted(self._table.states.items(), reverse=True) if self._matters(state)]
        without = {state.snapshot: self._without(state) for state in found}
        wanted, is_candidate = self._certify.guards.wanted(), self._ctx.is_candidate
        safe = max((snapshot for snapshot, level in without.items() if level >= wanted and is_candidate(snapshot)), default=None)
        best = {True: -1, False: -1}  # of candidates; of all
        for state in found:
            snapshot, level = state.snapshot, self._level(state)
            candidate = is_candidate(snapshot)
            if without[snapshot] >= level:
                best = {kind: max(of, level) if candidate or not kind else of for kind, of in best.items()}
            elif level > best[candidate]:
                counts = not candidate or safe is None or snapshot < safe or not self.follows(state)
                yield state, level, without[snapshot], counts

    def _matters(self, state: SnapshotState) -> bool:
        """What was left behind does, too, until all have restored: the next start may take it if this one ends. After a declared
        fresh start, until that has something of its own."""
        whole = not state.void and state.level >= 0 and state.classes is not None
        left_behind = not self._ctx.done or self._certify.guards.has_nothing_yet()
        return whole and (left_behind or self._ctx.is_candidate(state.snapshot))

    def _rest(self, state: SnapshotState, level: int, found: list[Need]) -> Iterator[Need]:
        """For leaving nodes of which nothing is asked, and without all of which the level falls: data and parity came to live in
        one domain, or are copies as long as there is no parity. Copies help, of what they hold, or of the data of these parity
        sets."""
        leaving = {node for node in state.nodes() if self._sessions.live(node) and not self._sessions.stays(node)}
        rest = leaving.difference(*(need.nodes for need in found))
        while rest and self._table.level_with(state, stays := partial(self._is_another, rest)) < level:
            spared = self._table.spared_with(state, stays)
            copies = [*self._copies(state, level, {rank for rank, losses in spared.items() if losses >= level})]
            theirs = [need for need in copies if need.nodes & rest]
            others = copies or [*self._made_anew(state)]  # no slot has that data any more: parity makes it
            yield from theirs or (replace(need, nodes=frozenset(rest)) for need in others)
            rest = rest.difference(*(need.nodes for need in theirs)) if theirs else set()

    def _is_another(self, nodes: set[str], other: str) -> bool:
        return other not in nodes and self._sessions.live(other)

    def _copies(self, state: SnapshotState, level: int, by_parity: set[int]) -> Iterator[Need]:
        """Slices that fewer staying domains hold than the level takes, but for ranks that parity protects."""
        assert state.classes is not None, "looked at before"
        for copies in (*(((rank, tier),) for rank, tier in state.classes.alone), *state.classes.shared):
            if any(tier >= 1 and rank in by_parity for rank, tier in copies):
                continue
            holders = [
                (self._sessions.stays(node), tier, node, rank, needed)
                for rank, needed in copies
                for node, tier in state.holders.get(rank, {}).items()
                if tier <= needed and self._sessions.live(node)
            ]
            staying = {self._ctx.domain(node) for stays, _, node, _, _ in holders if stays}
            if len(staying) <= level and holders:
                yield self._need(state, sorted(holders), staying)

    def _need(self, state: SnapshotState, holders: list[tuple[bool, int, str, int, int]], staying: set[str]) -> Need:
        """Leaving nodes come first among the holders."""
        domain, free = self._ctx.domain, self._staying - staying
        leaving = frozenset(node for stays, _, node, _, _ in holders if not stays)
        _, _, first, rank, needed = next((h for h in holders if free - {domain(h[2])}), holders[0])
        tier = min(needed, max(1, self._ctx.policy.tolerates))
        layout = self._table.layouts[state.layout_ids[rank]]
        known = tuple(sorted((node, t) for stays, t, node, _, _ in holders if stays))
        ask = Holders(self._ctx.number, self._sessions.session(first), state.snapshot, rank, known, tier)
        stuck = "" if free - {domain(first)} else NO_DOMAIN
        key = (state.snapshot, rank, tier)
        return Need(key, len(staying), 1, layout.live_bytes(tier), leaving, None if stuck else (first, ask), stuck)

    def _parity(self, state: SnapshotState) -> Iterator[Need]:
        return map(partial(self._move, state), self._parities.moves(state))

    def _made_anew(self, state: SnapshotState) -> Iterator[Need]:
        return map(partial(self._move, state), self._parities.lost(state))

    def _move(self, state: SnapshotState, move: Move) -> Need:
        key = (state.snapshot, -1 - move.parity_set, move.position)
        return Need(key, 0, move.slots, move.nbytes, move.nodes, None, "" if move.places else NO_DOMAIN)

    def _unreadable(self, state: SnapshotState) -> Iterator[Need]:
        """Nobody here knows what it needs, of any rank."""
        for rank in self._table.unreadable_ranks(state)[:1]:
            nodes = frozenset(self._sessions.leaving & state.nodes())
            yield Need((state.snapshot, rank, 0), 0, 1, 0, nodes, None, UNREADABLE)

    # --- asking -------------------------------------------------------------------------------------------------
    def _ask(self, needs: list[Need]) -> None:
        """The most exposed first, the newest of those: what fewest domains would be left with."""
        now = self._ctx.now
        keys = {need.key for need in needs}
        self._asked = {key: at for key, at in self._asked.items() if (key in keys or key[2] < 0) and now - at < AGAIN_S}
        needs = sorted(needs, key=lambda need: (need.left, -need.key[0].epoch, -need.key[0].step, need.key[1:]))
        for need in needs:
            if need.ask is None or need.key in self._asked or len(self._asked) >= ASKED_AT_ONCE_MAX:
                continue
            self._asked[need.key] = now
            self._ctx.send(*need.ask)
        self._order_parity([need for need in needs if need.ask is None and not need.stuck])

    def _order_parity(self, needs: list[Need]) -> None:
        for snapshot in dict.fromkeys(need.key[0] for need in needs):
            key = (snapshot, 0, -1)
            if key not in self._asked:
                self._asked[key] = self._ctx.now
                self._parities.order(self._table.states[snapshot])


def _named(need: Need) -> str:
    snapshot, rank, position = need.key
    what = f"rank {rank}" if rank >= 0 else f"position {position} of parity group {-1 - rank}"
    return f"step {snapshot.step}, {what}"
