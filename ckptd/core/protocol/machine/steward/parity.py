"""Which parity of which snapshot is still missing, and who is to make it (design D8; REFT, section 4).

Encoding begins when a snapshot is complete: nothing is sent for one that a rank misses. What a loss took is made anew on the node
that takes its place: first parity where its position's data is, and data that no slot holds any more when it has been
gone for a while, or at once when a flush needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.sessions import Sessions
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from ckptd.core.protocol.messages import ParityOrder, Source
from ckptd.core.redundancy.linear import linear_bytes
from ckptd.core.redundancy.parity_sets import (
    NOBODY,
    Member,
    ParitySet,
    ParityShard,
    decodable,
    seatings,
    tolerance,
)
from ckptd.core.redundancy.policies import Parity


@dataclass(frozen=True)
class Held:
    """Who holds a parity set: position -> live nodes with its member's slot (the fullest first), with its parity. data, parts:
    without the nodes that are about to go, and data without that where another position's parity is: its own can never join it
    there."""

    parity_set: ParitySet
    data: dict[int, list[str]]
    shards: dict[int, list[str]]
    all_data: dict[int, list[str]]
    all_shards: dict[int, list[str]]


@dataclass(frozen=True)
class Move:
    """A position of which ``slots`` of so many bytes lie on these leaving nodes alone. places: somebody can take it."""

    parity_set: int
    position: int
    slots: int
    nbytes: int
    nodes: frozenset[str]
    places: bool


class Parities:
    def __init__(self, ctx: Context, sessions: Sessions, table: SnapshotTable) -> None:
        self._ctx, self._sessions, self._table = ctx, sessions, table
        self.is_short: Callable[[str], bool] = lambda node: False  # of memory; see Steward
        self._short_since: dict[
            SnapshotId, float
        ] = {}  # below what is wanted, with data that only parity can bring

    def ranks_in_sets(self, state: SnapshotState) -> set[int]:
        """They are protected by parity, and not by copies."""
        return {rank for parity_set in self._parity_sets(state) for rank in parity_set.ranks()}

    def ranks_by_parity_alone(self, state: SnapshotState) -> set[int]:
        """Without those of parity sets of which nothing can be made any more and which yet survive less than they could, as two
        positions came to live in one domain, or one in two of them, when something was lost: copies take their place."""
        spare = self._spare(state)
        parity_sets = [s for s in self._parity_sets(state) if not self._ill_placed(state, self._held(state, s), spare)]
        return {rank for parity_set in parity_sets for rank in parity_set.ranks()}

    def _ill_placed(self, state: SnapshotState, held: Held, spare: list[str]) -> bool:
        """Not while a member is away: what it holds has a place, its own."""
        parity_set = held.parity_set
        if not all(map(held.all_data.get, parity_set.ranks().values())):
            return False
        if self._survives(parity_set, held.all_data, held.all_shards) >= parity_set.parity:
            return False
        unmade = [at for at in range(len(parity_set.members)) if not held.all_shards.get(at)]
        if unmade and not self._sessions.members_live():
            return False
        return not any(self._place_of(state, held, at, spare, anywhere=False, moves=False) for at in unmade)

    def order(self, state: SnapshotState, *, at_once: bool = False, anywhere: bool = False) -> None:
        """Ask for what is missing, of the most exposed parity sets first. at_once: also for data, however recently it was lost.
        anywhere: data that has no place of its own is made beside another position's, for a flush or copies to read it there."""
        if state.level < 0 or state.void:
            return
        parity_sets = [self._held(state, parity_set) for parity_set in self._parity_sets(state)]
        long_short = self._long_short(state, any(map(_lost, parity_sets)))
        if not (at_once or self._sessions.leaving or isinstance(self._ctx.redundancy, Parity)):
            # What has parity is moved, and made whole from it for a flush, whatever level is in force now; so is lost data.
            parity_sets = list(filter(_lost, parity_sets))
        patient = not (at_once or long_short or self._sessions.leaving)  # what moves would take the place of what is waited for
        spare = self._spare(state)
        for held in sorted(parity_sets, key=lambda held: (self._tolerates(held), held.parity_set.number)):
            self._order_set(state, held, spare, mend=not patient, anywhere=anywhere or at_once)

    def moves(self, state: SnapshotState) -> list[Move]:
        """What lies on leaving nodes alone, the most exposed parity sets first."""
        found = map(partial(self._held, state), self._parity_sets(state))
        held_sets = sorted(found, key=lambda held: (self._tolerates(held), held.parity_set.number))
        spare = self._spare(state)
        return [move for held in held_sets for move in self._moves_of(state, held, spare)]

    def lost(self, state: SnapshotState) -> Iterator[Move]:
        """Data that no slot holds any more."""
        spare = self._spare(state)
        for held in map(partial(self._held, state), self._parity_sets(state)):
            for at in held.parity_set.ranks().values():
                if not held.all_data.get(at):
                    places = self._place_of(state, held, at, spare, anywhere=False, moves=False) is not None
                    yield Move(held.parity_set.number, at, 1, held.parity_set.members[at].nbytes, frozenset(), places)

    def _moves_of(self, state: SnapshotState, held: Held, spare: list[str]) -> Iterator[Move]:
        parity_set = held.parity_set
        for at, member in enumerate(parity_set.members):
            data = member.rank != NOBODY and not held.data.get(at)
            shard_bytes = parity_set.parity * parity_set.chunk
            lacks = (data, member.nbytes, held.all_data), (not held.shards.get(at), shard_bytes, held.all_shards)
            found = [(nbytes, where[at]) for lacking, nbytes, where in lacks if lacking and where.get(at)]
            if found:
                nodes = frozenset(node for _, nodes in found for node in nodes)
                places = self._place_of(state, held, at, spare, anywhere=False, moves=True) is not None
                yield Move(parity_set.number, at, len(found), sum(nbytes for nbytes, _ in found), nodes, places)

    def forget(self, kept: set[SnapshotId]) -> None:
        self._short_since = {
            snapshot: since for snapshot, since in self._short_since.items() if snapshot in kept
        }

    def made_good(self, snapshot: SnapshotId) -> None:
        """It is protected as wanted again: the next loss is waited for anew."""
        self._short_since.pop(snapshot, None)

    # --- what there is ------------------------------------------------------------------------------------------
    def _parity_sets(self, state: SnapshotState) -> list[ParitySet]:
        """Those that somebody holds parts of, and, while parity is made, those that this epoch's snapshots are to have."""
        if state.snapshot.epoch == self._ctx.number and not state.positions and self._table.knows_layouts(state):
            self._seat(state)
        positions = state.positions if isinstance(self._ctx.redundancy, Parity) else ()
        return sorted({*state.shards, *positions}, key=lambda parity_set: parity_set.number)

    def _seat(self, state: SnapshotState) -> None:
        record = self._ctx.record
        assert record is not None, "a steward has an epoch"
        layouts = self._table.layouts_of(state)
        policy = self._ctx.redundancy
        if not isinstance(policy, Parity) or len(layouts) != record.world:
            return
        for seating in seatings(record, policy):
            members = tuple(
                Member(rank, linear_bytes(layouts[rank]), layouts[rank].layout_id)
                if rank != NOBODY
                else Member(rank)
                for rank in seating.ranks
            )
            state.positions[ParitySet(record.world, seating.number, policy.parity, members)] = seating.nodes
        if not state.positions.keys() >= state.shards.keys():
            state.positions.clear()  # it was encoded under another level: a parity set's number must mean one parity set

    def _held(self, state: SnapshotState, parity_set: ParitySet) -> Held:
        data: dict[int, list[str]] = {}
        for rank, at in parity_set.ranks().items():
            found = sorted((tier, node) for node, tier in state.holders.get(rank, {}).items() if tier <= 1)
            data[at] = [node for _, node in found if self._sessions.live(node)]
        shards = {at: sorted(filter(self._sessions.live, nodes)) for at, nodes in state.shards.get(parity_set, {}).items()}
        stays = self._sessions.stays
        taken = {node: at for at, nodes in shards.items() for node in nodes}
        return Held(
            parity_set,
            {at: [node for node in nodes if stays(node) and taken.get(node, at) == at] for at, nodes in data.items()},
            {at: list(filter(stays, nodes)) for at, nodes in shards.items()},
            data,
            shards,
        )

    def _tolerates(self, held: Held) -> int:
        return self._survives(held.parity_set, held.data, held.shards)

    def _survives(self, parity_set: ParitySet, *found: dict[int, list[str]]) -> int:
        data, shards = ({at: set(map(self._ctx.domain, nodes)) for at, nodes in where.items()} for where in found)
        return tolerance(parity_set, data, shards)

    def _long_short(self, state: SnapshotState, lost: bool) -> bool:
        if not lost:
            self._short_since.pop(state.snapshot, None)
            return False
        since = self._short_since.setdefault(state.snapshot, self._ctx.now)
        return self._ctx.now - since >= self._ctx.policy.steward_timeout_s

    # --- what is to be made -------------------------------------------------------------------------------------
    def _order_set(self, state: SnapshotState, held: Held, spare: list[str], *, mend: bool, anywhere: bool) -> None:
        """What is missing comes first: what only moves would take its place."""
        parity_set, data, shards = held.parity_set, held.data, held.shards
        here = [at for at, nodes in held.all_data.items() if nodes], [at for at, nodes in held.all_shards.items() if nodes]
        crowded = False
        for at in sorted(range(len(parity_set.members)), key=lambda at: bool(held.all_shards.get(at))):
            member = parity_set.members[at]
            lacks_data, lacks_shard = member.rank != NOBODY and not data.get(at), not shards.get(at)
            lost, unmade = lacks_data and not held.all_data.get(at), not held.all_shards.get(at)
            if (lost and (not mend or not decodable(parity_set, *here))) or not (lacks_data or lacks_shard):
                continue
            leans = (lacks_data and not lost) or (lacks_shard and not unmade)
            to = self._place_of(state, held, at, spare, anywhere=lost and anywhere, moves=leans)
            sources = self._sources(state, held)
            if to is None and leans and (lost or unmade):  # nowhere to move: it protects as long as it is there
                to = self._place_of(state, held, at, spare, anywhere=False, moves=False)
                lacks_data, lacks_shard = lost, unmade
            if to is None:
                crowded |= lost or unmade
                continue
            state.moved[parity_set, at] = to
            if to in spare:  # the next one goes elsewhere, if it can
                spare.remove(to)
                spare.append(to)
            if lacks_data and (lost or any(held.all_shards.values())):  # without parity there is nothing to make it of
                self._send(state, ParityShard(parity_set, at), to, sources, True)
            if not lost and lacks_shard:
                self._send(state, ParityShard(parity_set, at), to, sources, False)
        if crowded:
            self._bring_together(state, held, spare)

    def _bring_together(self, state: SnapshotState, held: Held, spare: list[str]) -> None:
        """A position whose data lies in one domain and whose parity in another leaves none for one that was lost: a drain had begun
        to move it when a copy of its data was made elsewhere. Its data comes to its parity, and then that is its place."""
        for at, nodes in sorted(held.shards.items()):
            apart = nodes and held.data.get(at) and not {*nodes} & {*held.data[at]}
            to = self._place_of(state, held, at, spare, anywhere=False, moves=False) if apart else None
            if to in nodes and to is not None:
                self._send(state, ParityShard(held.parity_set, at), to, self._sources(state, held), True)

    def _place_of(
        self, state: SnapshotState, held: Held, at: int, spare: list[str], *, anywhere: bool, moves: bool
    ) -> str | None:
        """The node that is to hold this position: where the rest of it is, where it was meant to be, or one whose domain no
        other position lives in or is to live in; one that is about to go when there is no other, unless it moves away from such
        a one. anywhere: failing that any, of those that stay if there are."""
        domain, parity_set = self._ctx.domain, held.parity_set
        rest = [other for other in range(len(parity_set.members)) if other != at]
        others = {domain(node) for other in rest for node in self._places(state, held, other, moves)}
        taken = {node for other in rest for node in self._taken(state, held, other, moves)}
        positions = state.positions.get(parity_set)
        chosen = state.moved.get((parity_set, at))
        first: list[str] = [*held.data.get(at, ()), *held.shards.get(at, ())]
        again = [chosen] if chosen and not self.is_short(chosen) else []
        first += [node for node in again if domain(node) not in others]
        first += [positions[at]] if positions and domain(positions[at]) not in others else []
        first += [] if moves else [*held.all_data.get(at, ()), *held.all_shards.get(at, ())]
        own = {positions[at]} & {*first} if positions else {*first}
        leaving: list[str] = []
        for node in filter(self._sessions.live, (*first, *spare)):
            if node not in taken and (node in own or domain(node) not in others):
                if self._sessions.stays(node):
                    return node
                leaving.append(node)
        if moves or leaving:
            return None if moves else leaving[0]
        live = [node for node in (*first, *again, *spare) if self._sessions.live(node)] if anywhere else []
        return min(live, key=lambda node: not self._sessions.stays(node), default=None)

    def _taken(self, state: SnapshotState, held: Held, at: int, moves: bool) -> list[str]:
        """By this position: who holds its parity, or is about to make it where its data is; for one that moves also who is about
        to make its data."""
        chosen = state.moved.get((held.parity_set, at))
        soon = chosen is not None and (moves or chosen in held.all_data.get(at, ()))
        return held.all_shards.get(at) or ([chosen] if chosen is not None and soon else [])

    def _places(self, state: SnapshotState, held: Held, at: int, moves: bool) -> list[str]:
        """Where this position is and was asked for; failing both, where it was meant to be: a node that takes another one first
        cannot take this one any more. What is where it was meant to be is there alone, and what is whole, for one that does not
        move: a copy beside it, which a drain asked for, takes no missing position's place."""
        chosen, positions = state.moved.get((held.parity_set, at)), state.positions.get(held.parity_set)
        found = [*held.data.get(at, ()), *held.shards.get(at, ())]
        if positions and positions[at] in found:
            return [positions[at]]
        data, shards = (held.data, held.shards) if moves else (held.all_data, held.all_shards)
        whole = [node for node in data.get(at, ()) if node in shards.get(at, ())]
        if whole:
            return whole
        found += [chosen] if chosen and self._sessions.live(chosen) else []
        return found or ([positions[at]] if positions and self._sessions.live(positions[at]) else [])

    def _spare(self, state: SnapshotState) -> list[str]:
        """All members, those that have memory and hold the least parity of it, or are to take it, first."""
        record = self._ctx.record
        assert record is not None, "a steward has an epoch"
        held = Counter(node for parity_set in state.shards.values() for nodes in parity_set.values() for node in nodes)
        moved = state.moved.items()
        held.update(to for (parity_set, at), to in moved if to not in state.shards.get(parity_set, {}).get(at, ()))
        return sorted((node.node for node in record.nodes), key=lambda node: (self.is_short(node), held[node], node))

    def _sources(self, state: SnapshotState, held: Held) -> tuple[Source, ...]:
        """Also on leaving nodes."""
        parity_set, found = held.parity_set, []
        for at, nodes in sorted(held.all_data.items()):
            member = parity_set.members[at]
            found += [
                Source(node, member.rank, state.holders[member.rank][node], member.layout_id)
                for node in nodes
            ]
        for at, nodes in sorted(held.all_shards.items()):
            found += [Source(node, parity_set.holding_rank, 0, "", ParityShard(parity_set, at)) for node in nodes]
        return tuple(found)

    def _send(self, state: SnapshotState, shard: ParityShard, to: str, sources: tuple[Source, ...], data: bool) -> None:
        session = self._sessions.session(to)
        self._ctx.send(to, ParityOrder(self._ctx.number, session, state.snapshot, shard, sources, data))


def _lost(held: Held) -> bool:
    return any(not held.all_data.get(at) for at in held.parity_set.ranks().values())
