"""The steward's books: who holds what of each snapshot, rebuilt from what the nodes say (design D9).

Only what a node said in its current session is in the books, so they can be thrown away and written anew at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptd.core.agreement import agree
from ckptd.core.ids import SnapshotId
from ckptd.core.lanes import NOBODY, Part, member_digests, tolerance
from ckptd.core.layout import Layout
from ckptd.core.machine.context import RESEND_S, Context, decode_layout
from ckptd.core.machine.steward.snapshot import Phase, SnapshotState
from ckptd.core.messages import HoldingFact, LayoutRequest
from ckptd.core.protection import Classes, level, slice_classes

RELEASED_KEPT_MAX = 64  # released snapshots named again in certificates, for a node that missed it


class Ledger:
    """``live``: does this node's part of the books hold now (in session and up)?"""

    def __init__(self, ctx: Context, live: Callable[[str], bool]) -> None:
        self._ctx, self._live = ctx, live
        self.facts: dict[SnapshotId, SnapshotState] = {}
        self.layouts: dict[str, Layout] = {}
        self.durable: set[SnapshotId] = set()
        self.released: dict[SnapshotId, None] = {}
        self._again: set[SnapshotId] = set()  # not released any more, to be weighed
        self.heard: dict[SnapshotId, int] = {}  # levels an earlier steward certified, as the nodes remember
        self.dirty: set[SnapshotId] = set()
        self._asked_at = -1e9

    def clear(self) -> None:
        """What is durable stays so; layouts are named by their content."""
        self.facts.clear()
        self.released.clear()
        self._again.clear()
        self.heard.clear()
        self.dirty.clear()

    # --- writing ------------------------------------------------------------------------------------------------
    def add(self, node: str, fact: HoldingFact) -> None:
        if fact.snapshot in self.released:
            self._keep_released(fact.snapshot)
            return
        facts = self.facts.get(fact.snapshot)
        if facts is None:
            again = fact.snapshot in self._again
            facts = SnapshotState(fact.snapshot, durable=fact.snapshot in self.durable, again=again)
            self.facts[fact.snapshot] = facts
        if fact.part is not None:
            self._add_part(node, facts, fact, fact.part)
            return
        if facts.layout_ids.setdefault(fact.rank, fact.layout_id) != fact.layout_id:
            return  # two captures of one rank: the first one counts, the other never completes anything
        facts.tolerated.clear()
        nodes = facts.holders.setdefault(fact.rank, {})
        nodes[node] = min(fact.tier, nodes.get(node, fact.tier))
        if fact.tier == 0 or fact.rank not in facts.digests:  # a prefix may lack some
            facts.digests[fact.rank] = fact.digests
        facts.keep |= fact.keep
        self.dirty.add(fact.snapshot)

    def _add_part(self, node: str, facts: SnapshotState, fact: HoldingFact, part: Part) -> None:
        """It also vouches for the layouts and digests of its lane's members, whose own slots may be gone."""
        facts.parts.setdefault(part.lane, {}).setdefault(part.position, set()).add(node)
        facts.tolerated.pop(part.lane, None)
        for member in part.lane.members:
            if member.rank != NOBODY:
                facts.layout_ids.setdefault(member.rank, member.layout_id)
        for rank, digests in member_digests(fact.digests).items():
            facts.digests.setdefault(rank, digests)
        facts.keep |= fact.keep
        self.dirty.add(fact.snapshot)

    def remove(self, node: str, fact: HoldingFact) -> None:
        facts = self.facts.get(fact.snapshot)
        if facts is None:
            return
        if fact.part is not None:
            facts.parts.get(fact.part.lane, {}).get(fact.part.position, set()).discard(node)
        else:
            nodes = facts.holders.get(fact.rank, {})
            nodes.pop(node, None)
            if not nodes:
                facts.holders.pop(fact.rank, None)
        self._changed(facts)

    def forget_node(self, node: str) -> None:
        for facts in list(self.facts.values()):
            if node not in facts.nodes():
                continue
            for nodes in facts.holders.values():
                nodes.pop(node, None)
            for held in facts.parts.values():
                for holders in held.values():
                    holders.discard(node)
            facts.holders = {rank: nodes for rank, nodes in facts.holders.items() if nodes}
            self._changed(facts)

    def _changed(self, facts: SnapshotState) -> None:
        facts.tolerated.clear()
        held = {lane: {at: nodes for at, nodes in parts.items() if nodes} for lane, parts in facts.parts.items()}
        facts.parts = {lane: parts for lane, parts in held.items() if parts}
        if self.held_nowhere(facts):
            self.drop(facts)
        self.dirty.add(facts.snapshot)

    def learn_layouts(self, layouts: dict[str, bytes]) -> None:
        for name, data in layouts.items():
            if name not in self.layouts:
                try:
                    self.layouts[name] = decode_layout(data)
                except ValueError:
                    continue  # not a layout: whoever sent it holds something nobody can use
                self.dirty.update(s for s, facts in self.facts.items() if name in facts.layout_ids.values())

    def mark_durable(self, snapshots: Iterable[SnapshotId]) -> None:
        for snapshot in snapshots:
            self.durable.add(snapshot)
            facts = self.facts.get(snapshot)
            if facts is not None and not facts.durable:
                facts.durable = True
                self.dirty.add(snapshot)

    def all_dirty(self) -> None:
        for facts in self.facts.values():
            facts.tolerated.clear()
        self.dirty.update(self.facts)

    def release(self, snapshot: SnapshotId) -> None:
        self.facts.pop(snapshot, None)
        self._keep_released(snapshot)

    def held_nowhere(self, facts: SnapshotState) -> bool:
        """Nobody holds anything of it any more, as far as is known; what was certified stays as fallen."""
        return not facts.nodes() and (facts.phase is Phase.VOID or facts.certificate is None)

    def drop(self, facts: SnapshotState) -> None:
        facts.become_gone("held_nowhere")
        del self.facts[facts.snapshot]
        if facts.again:
            self._keep_released(facts.snapshot)

    def weigh_anew(self, snapshot: SnapshotId) -> None:
        """A node tells what it holds, perhaps after a long absence: the snapshot was released without its copies, and may be
        better off with them than the newest is now (P3)."""
        if snapshot in self.released:
            del self.released[snapshot]
            self._again.add(snapshot)

    def _keep_released(self, snapshot: SnapshotId) -> None:
        self.released.pop(snapshot, None)
        self._again.discard(snapshot)
        self.released[snapshot] = None
        while len(self.released) > RELEASED_KEPT_MAX:
            del self.released[next(iter(self.released))]

    # --- reading ------------------------------------------------------------------------------------------------
    def weigh(self, facts: SnapshotState) -> None:
        """Bring level, classes and agreement of this snapshot up to date."""
        if facts.classes is None:
            facts.classes = self._classes(facts)
        if facts.classes is None:
            facts.level = -1
            return
        facts.level = self.level_with(facts, self._live)
        if facts.agreement is None and facts.level >= 0:
            facts.agreement = agree(self.layouts_of(facts), facts.digests)

    def level_with(self, facts: SnapshotState, counts: Callable[[str], bool]) -> int:
        """Its level if only the nodes that ``counts`` says held something."""
        if facts.classes is None:
            return -1
        domain = self._ctx.domain
        holders = {
            rank: [(domain(node), tier) for node, tier in nodes.items() if counts(node)]
            for rank, nodes in facts.holders.items()
        }
        return level(facts.classes, holders, self._spared(facts, holders, counts))

    def _spared(
        self, facts: SnapshotState, holders: dict[int, list[tuple[str, int]]], counts: Callable[[str], bool]
    ) -> dict[int, int]:
        """rank -> losses after which parity still brings it."""
        found: dict[int, int] = {}
        for lane, parts in facts.parts.items():
            count = facts.tolerated.get(lane) if counts is self._live else None
            if count is None:  # each part that arrives changes one lane of many
                data = {at: {d for d, tier in holders.get(rank, ()) if tier <= 1} for rank, at in lane.ranks().items()}
                live = {at: {self._ctx.domain(n) for n in nodes if counts(n)} for at, nodes in parts.items()}
                count = tolerance(lane, data, live)
                if counts is self._live:
                    facts.tolerated[lane] = count
            for rank in lane.ranks():
                found[rank] = max(count, found.get(rank, -1))
        return {rank: count for rank, count in found.items() if count >= 0}

    def unread(self, facts: SnapshotState) -> bool:
        """A layout is on its way from a live holder: until then nothing can be said about this snapshot."""
        return any(
            name not in self.layouts and any(map(self._live, facts.vouching(rank)))
            for rank, name in facts.layout_ids.items()
        )

    def knows_layouts(self, facts: SnapshotState) -> bool:
        return all(name in self.layouts for name in facts.layout_ids.values())

    def layouts_of(self, facts: SnapshotState) -> dict[int, Layout]:
        return {rank: self.layouts[name] for rank, name in facts.layout_ids.items()}

    def live_holdings(self, facts: SnapshotState) -> dict[str, list[tuple[int, int]]]:
        """node -> (rank, tier), as core.writes wants it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for rank, nodes in facts.holders.items():
            for node, tier in nodes.items():
                if self._live(node):
                    found.setdefault(node, []).append((rank, tier))
        return found

    def _classes(self, facts: SnapshotState) -> Classes | None:
        """None until every rank of the snapshot's world is known with its layout."""
        if not facts.layout_ids or not self.knows_layouts(facts):
            return None
        layouts = self.layouts_of(facts)
        classes = slice_classes(layouts)
        return classes if classes.complete else None

    # --- layouts that nobody sent -------------------------------------------------------------------------------
    def ask_layouts(self, number: int) -> None:
        """Ask a holder for each layout that a fact names and nobody has sent."""
        if self._ctx.now - self._asked_at < RESEND_S:
            return
        asked: set[str] = set()
        for facts in self.facts.values():
            for rank, name in facts.layout_ids.items():
                if name in self.layouts or name in asked:
                    continue
                node = next(filter(self._live, facts.vouching(rank)), None)
                if node is not None:
                    asked.add(name)
                    self._ctx.send(node, LayoutRequest(number, name))
        if asked:
            self._asked_at = self._ctx.now
