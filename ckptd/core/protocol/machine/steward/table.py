"""The steward's table of snapshots: who holds what of each, rebuilt from what the nodes say (design D9).

Only what a node said in its current session is in the table, so it can be thrown away and written anew at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.machine.context import RESEND_S, Context
from ckptd.core.protocol.machine.steward.snapshot import Phase, SnapshotState
from ckptd.core.protocol.messages import HoldingFact, LayoutRequest
from ckptd.core.redundancy.parity_sets import NOBODY, ParityShard, member_digests, tolerance
from ckptd.core.redundancy.protection import Classes, level, slice_classes
from ckptd.core.state_map.agreement import agree
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_reader import TableNotHere

STUDIED_MAX = 16  # sets of layouts, fewer than agreement and classes are remembered for; a job has one or two alive
RELEASED_KEPT_MAX = 64  # released snapshots named again in certificates, for a node that missed it
FALLEN_KEPT_MAX = 64  # the same of what fell: as many as a node that comes back says that it was told


class SnapshotTable:
    """``live``: does this node's part of the books hold now (in session and up)?"""

    def __init__(self, ctx: Context, live: Callable[[str], bool]) -> None:
        self._ctx, self._live = ctx, live
        self.states: dict[SnapshotId, SnapshotState] = {}
        self.layouts: dict[str, Layout] = {}
        self.unreadable: set[str] = set()  # of layouts, as they were sent
        self._leaves: dict[str, dict[str, bytes]] = {}  # digest of a table that is not known -> of which layouts
        self._studied: dict[frozenset[str], None] = {}  # layouts of one snapshot, by name
        self._studying: set[frozenset[str]] = set()
        self.durable: dict[tuple[int, int], SnapshotId] = {}  # (epoch, step) -> which capture of it storage has
        self.storage_read = False  # whether storage has said, in this office, what it has
        self.released: dict[SnapshotId, None] = {}
        self.fallen: dict[SnapshotId, None] = {}  # held nowhere when last looked at, and nodes were told a level
        self._again: set[SnapshotId] = set()  # not released any more, to be weighed
        self.heard: dict[SnapshotId, int] = {}  # levels an earlier steward certified, as the nodes remember
        self.dirty: set[SnapshotId] = set()
        self._asked_at = -1e9

    def clear(self) -> None:
        """What is durable stays so; layouts are named by their content."""
        self.states.clear()
        self.released.clear()
        self.fallen.clear()
        self._again.clear()
        self.heard.clear()
        self.dirty.clear()
        self._leaves.clear()
        self.unreadable.clear()

    # --- writing ------------------------------------------------------------------------------------------------
    def add(self, node: str, fact: HoldingFact) -> None:
        if fact.snapshot in self.released:
            self._keep_released(fact.snapshot)
            return
        state = self.states.get(fact.snapshot)
        if state is None:
            again = fact.snapshot in self._again
            state = SnapshotState(fact.snapshot, durable=fact.snapshot.at in self.durable, again=again)
            self.states[fact.snapshot] = state
        if fact.shard is not None:
            self._add_shard(node, state, fact, fact.shard)
            return
        if state.layout_ids.setdefault(fact.rank, fact.layout_id) != fact.layout_id:
            return  # a rank captures a snapshot once: whoever says so is no daemon of ours
        state.tolerated.clear()
        nodes = state.holders.setdefault(fact.rank, {})
        nodes[node] = min(fact.tier, nodes.get(node, fact.tier))
        if fact.tier == 0 or fact.rank not in state.digests:  # a prefix may lack some
            state.digests[fact.rank] = fact.digests
        state.keep |= fact.keep
        self.dirty.add(fact.snapshot)

    def _add_shard(self, node: str, state: SnapshotState, fact: HoldingFact, shard: ParityShard) -> None:
        """It also vouches for the layouts and digests of its parity set's members, whose own slots may be gone."""
        sums = member_digests(fact.digests)
        members = [member for member in shard.parity_set.members if member.rank != NOBODY]
        if any(state.layout_ids.get(member.rank, member.layout_id) != member.layout_id for member in members):
            return
        state.shards.setdefault(shard.parity_set, {}).setdefault(shard.position, set()).add(node)
        state.tolerated.pop(shard.parity_set, None)
        for member in members:
            state.layout_ids.setdefault(member.rank, member.layout_id)
        for rank, digests in sums.items():
            state.digests.setdefault(rank, digests)
        state.keep |= fact.keep
        self.dirty.add(fact.snapshot)

    def remove(self, node: str, fact: HoldingFact) -> None:
        state = self.states.get(fact.snapshot)
        if state is None:
            return
        if fact.shard is not None:
            state.shards.get(fact.shard.parity_set, {}).get(fact.shard.position, set()).discard(node)
        else:
            nodes = state.holders.get(fact.rank, {})
            nodes.pop(node, None)
            if not nodes:
                state.holders.pop(fact.rank, None)
        self._changed(state)

    def forget_node(self, node: str) -> None:
        self.tell_anew(node, ())

    def tell_anew(self, node: str, facts: Iterable[HoldingFact]) -> None:
        """All that it holds. What is void stays so meanwhile, also when it alone holds a part of it: it has been told (P3)."""
        had = [state for state in self.states.values() if node in state.nodes()]
        for state in had:
            for nodes in state.holders.values():
                nodes.pop(node, None)
            for held in state.shards.values():
                for holders in held.values():
                    holders.discard(node)
            state.holders = {rank: nodes for rank, nodes in state.holders.items() if nodes}
        for fact in facts:
            self.add(node, fact)
        for state in had:
            self._changed(state)

    def _changed(self, state: SnapshotState) -> None:
        state.tolerated.clear()
        held = {parity_set: {at: nodes for at, nodes in shards.items() if nodes} for parity_set, shards in state.shards.items()}
        state.shards = {parity_set: shards for parity_set, shards in held.items() if shards}
        if self.held_nowhere(state):
            self.drop(state)
        self.dirty.add(state.snapshot)

    def learn_layouts(self, layouts: dict[str, bytes]) -> None:
        for name, data in layouts.items():
            if name in self.layouts:
                continue
            try:
                layout = self._ctx.tables.read(data)
            except TableNotHere as error:
                self._leaves.setdefault(error.digest, {})[name] = data
                continue
            except ValueError:
                self.unreadable.add(name)  # not a layout that this release knows; it is asked for again
                continue
            self.layouts[name] = layout
            self.unreadable.discard(name)
            self.dirty.update(self.states)  # what becomes of one may depend on what the newer ones are
            self.learn_layouts(self._leaves.pop(layout.fragments.table.digest, {}))

    def mark_durable(self, snapshots: Iterable[SnapshotId]) -> None:
        """Whichever capture it is of: another one of that step is not needed any more either."""
        for snapshot in snapshots:
            self.durable.setdefault(snapshot.at, snapshot)
        for state in self.states.values():
            if not state.durable and state.snapshot.at in self.durable:
                state.durable = True
                self.dirty.add(state.snapshot)

    def all_dirty(self) -> None:
        for state in self.states.values():
            state.tolerated.clear()
        self.dirty.update(self.states)

    def release(self, snapshot: SnapshotId) -> None:
        self.states.pop(snapshot, None)
        self._keep_released(snapshot)

    def held_nowhere(self, state: SnapshotState) -> bool:
        """Nobody holds anything of it any more, as far as is known; that of which nodes show a level, from us or from an earlier
        steward, stays until they are told (P2)."""
        told = state.certificate is not None or self.remembers(state.snapshot)
        return not state.nodes() and (state.phase is Phase.VOID or not told)

    def drop(self, state: SnapshotState) -> None:
        state.become_gone("held_nowhere")
        del self.states[state.snapshot]
        if state.certificate is not None:
            self.keep_fallen(state.snapshot)
        if state.again:
            self._keep_released(state.snapshot)

    def keep_fallen(self, snapshot: SnapshotId) -> None:
        _remember(self.fallen, snapshot, FALLEN_KEPT_MAX)

    def weigh_anew(self, snapshot: SnapshotId) -> None:
        """A node tells what it holds, perhaps after a long absence: the snapshot was released without its copies, and may be
        better off with them than the newest is now (P3)."""
        if snapshot in self.released:
            del self.released[snapshot]
            self._again.add(snapshot)

    def _keep_released(self, snapshot: SnapshotId) -> None:
        self._again.discard(snapshot)
        _remember(self.released, snapshot, RELEASED_KEPT_MAX)

    def was_released(self, snapshot: SnapshotId) -> bool:
        """So many are remembered; what is older than all of these went before them, for newer ones, as a rule."""
        full = len(self.released) == RELEASED_KEPT_MAX
        return snapshot in self.released or (full and snapshot < min(self.released))

    def remembers(self, snapshot: SnapshotId) -> bool:
        """Nodes know of a level that was certified, by us or by an earlier steward."""
        return self.heard.get(snapshot, -1) >= 0

    # --- reading ------------------------------------------------------------------------------------------------
    def weigh(self, state: SnapshotState) -> bool:
        """Bring level, classes and agreement of this snapshot up to date. True: its sums were compared, for the first time."""
        if state.classes is None:
            state.classes = self._classes(state)
        if state.classes is None:
            state.level = -1
            return False
        state.level = self.level_with(state, self._live)
        if state.agreement is not None or state.level < 0:
            return False
        state.agreement = agree(self.layouts_of(state), state.digests)
        return True

    def level_with(self, state: SnapshotState, counts: Callable[[str], bool]) -> int:
        """Its level if only the nodes that ``counts`` says held something."""
        if state.classes is None:
            return -1
        holders = self._domains(state, counts)
        return level(state.classes, holders, self._spared(state, holders, counts))

    def level_of_copies(self, state: SnapshotState) -> int:
        """Its level if there were no parity."""
        return -1 if state.classes is None else level(state.classes, self._domains(state, self._live))

    def spared_with(self, state: SnapshotState, counts: Callable[[str], bool]) -> dict[int, int]:
        """rank -> losses after which parity still brings it, if only these nodes held something."""
        return self._spared(state, self._domains(state, counts), counts)

    def _domains(self, state: SnapshotState, counts: Callable[[str], bool]) -> dict[int, list[tuple[str, int]]]:
        """rank -> (failure domain, tier) of each holding of its slot."""
        holding = set(chain.from_iterable(state.holders.values()))
        domains = {node: self._ctx.domain(node) for node in holding if counts(node)}  # of thousands of ranks, hundreds of nodes
        return {
            rank: [(domains[node], tier) for node, tier in nodes.items() if node in domains]
            for rank, nodes in state.holders.items()
        }

    def _spared(
        self, state: SnapshotState, holders: dict[int, list[tuple[str, int]]], counts: Callable[[str], bool]
    ) -> dict[int, int]:
        """rank -> losses after which parity still brings it."""
        found: dict[int, int] = {}
        for parity_set, shards in state.shards.items():
            count = state.tolerated.get(parity_set) if counts is self._live else None
            if count is None:  # each part that arrives changes one parity set of many
                data = {at: {d for d, tier in holders.get(rank, ()) if tier <= 1} for rank, at in parity_set.ranks().items()}
                live = {at: {self._ctx.domain(n) for n in nodes if counts(n)} for at, nodes in shards.items()}
                count = tolerance(parity_set, data, live)
                if counts is self._live:
                    state.tolerated[parity_set] = count
            for rank in parity_set.ranks():
                found[rank] = max(count, found.get(rank, -1))
        return {rank: count for rank, count in found.items() if count >= 0}

    def unread(self, state: SnapshotState) -> bool:
        """A layout is on its way from a live holder, or what they say together is: until then nothing can be said about this
        snapshot."""
        missing = [rank for rank, name in state.layout_ids.items() if name not in self.layouts]
        if any(any(map(self._live, nodes)) for nodes in state.vouching(missing).values()):
            return True
        return state.classes is None and bool(self._studying) and frozenset(state.layout_ids.values()) in self._studying

    def unreadable_ranks(self, state: SnapshotState) -> list[int]:
        """What was sent as their layouts is none: a newer release may have written it."""
        return [rank for rank, name in state.layout_ids.items() if name in self.unreadable] if self.unreadable else []

    def knows_layouts(self, state: SnapshotState) -> bool:
        return all(name in self.layouts for name in state.layout_ids.values())

    def layouts_of(self, state: SnapshotState) -> dict[int, Layout]:
        return {rank: self.layouts[name] for rank, name in state.layout_ids.items()}

    def live_holdings(self, state: SnapshotState) -> dict[str, list[tuple[int, int]]]:
        """node -> (rank, tier), as core.state_map.writes wants it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for rank, nodes in state.holders.items():
            for node, tier in nodes.items():
                if self._live(node):
                    found.setdefault(node, []).append((rank, tier))
        return found

    def _classes(self, state: SnapshotState) -> Classes | None:
        """None until every rank of the snapshot's world is known with its layout, and those have been looked at together."""
        if not state.layout_ids or not self.knows_layouts(state):
            return None
        layouts = self.layouts_of(state)
        if len(layouts) < next(iter(layouts.values())).world or not self._are_studied(state, layouts):
            return None
        classes = slice_classes(layouts)
        return classes if classes.complete else None

    def _are_studied(self, state: SnapshotState, layouts: dict[int, Layout]) -> bool:
        """Of thousands of ranks that takes long, once; what comes of it is remembered by their ids."""
        names = frozenset(state.layout_ids.values())
        if names not in self._studied and names not in self._studying:
            self._studying.add(names)
            self._ctx.compute(partial(_study, layouts), partial(self._now_studied, names))
        return names in self._studied

    def _now_studied(self, names: frozenset[str], _: None) -> None:
        self._studying.discard(names)
        self._studied[names] = None
        while len(self._studied) > STUDIED_MAX:
            del self._studied[next(iter(self._studied))]
        self.dirty.update(self.states)

    # --- layouts that nobody sent -------------------------------------------------------------------------------
    def ask_layouts(self, number: int) -> None:
        """Ask a holder for each layout that a fact names and nobody has sent, and for each table that such a one needs."""
        if self._ctx.now - self._asked_at < RESEND_S:
            return
        asked: set[str] = set()
        tables = {name: digest for digest, leaves in self._leaves.items() for name in leaves}
        for state in self.states.values():
            if state.classes is not None and len(state.classes.alone) == len(state.layout_ids):  # made of all of its layouts
                continue
            missing = {rank: name for rank, name in state.layout_ids.items() if name not in self.layouts}
            vouching = state.vouching(missing)
            for rank, name in missing.items():
                what = tables.get(name, name)
                if what in asked:
                    continue
                node = next(filter(self._live, vouching[rank]), None)
                if node is not None:
                    asked.add(what)
                    self._ctx.send(node, LayoutRequest(number, name, name in tables))
        if asked:
            self._asked_at = self._ctx.now


def _study(layouts: Mapping[int, Layout]) -> None:
    slice_classes(layouts)
    agree(layouts, {})


def _remember(kept: dict[SnapshotId, None], snapshot: SnapshotId, most: int) -> None:
    """As the newest of so many."""
    kept.pop(snapshot, None)
    kept[snapshot] = None
    while len(kept) > most:
        del kept[next(iter(kept))]
