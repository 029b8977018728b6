"""The steward's books: who holds what of each snapshot, rebuilt from what the nodes say (design D9).

Only what a node said in its current session is in the books, so they can be thrown away and written anew at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckptd.core.agreement import Agreement, agree
from ckptd.core.ids import SnapshotId
from ckptd.core.layout import Layout
from ckptd.core.machine.context import RESEND_S, Context, decode_layout
from ckptd.core.messages import Certificate, HoldingFact, LayoutRequest
from ckptd.core.protection import Classes, level, slice_classes

RELEASED_KEPT_MAX = 64  # released snapshots named again in certificates, for a node that missed it


@dataclass
class Facts:
    """All that is known of one snapshot."""

    snapshot: SnapshotId
    holders: dict[int, dict[str, int]] = field(default_factory=dict)  # rank -> node -> tier
    layout_ids: dict[int, str] = field(default_factory=dict)
    digests: dict[int, tuple[tuple[str, bytes], ...]] = field(default_factory=dict)
    keep: bool = False
    durable: bool = False
    failures: int = 0  # of flushes
    void: str = ""
    agreement: Agreement | None = None
    classes: Classes | None = None
    level: int = -1  # now; not bounded by what the policy wants
    certificate: Certificate | None = None
    again: bool = False  # released once: somebody who missed that may still hold copies nobody told of


class Ledger:
    """``live``: does this node's part of the books hold now (in session and up)?"""

    def __init__(self, ctx: Context, live: Callable[[str], bool]) -> None:
        self._ctx, self._live = ctx, live
        self.facts: dict[SnapshotId, Facts] = {}
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
            facts = Facts(fact.snapshot, durable=fact.snapshot in self.durable, again=again)
            self.facts[fact.snapshot] = facts
        if facts.layout_ids.setdefault(fact.rank, fact.layout_id) != fact.layout_id:
            return  # two captures of one rank: the first one counts, the other never completes anything
        nodes = facts.holders.setdefault(fact.rank, {})
        nodes[node] = min(fact.tier, nodes.get(node, fact.tier))
        if fact.tier == 0 or fact.rank not in facts.digests:  # a prefix may lack some
            facts.digests[fact.rank] = fact.digests
        facts.keep |= fact.keep
        self.dirty.add(fact.snapshot)

    def remove(self, node: str, snapshot: SnapshotId, rank: int) -> None:
        facts = self.facts.get(snapshot)
        if facts is None:
            return
        nodes = facts.holders.get(rank, {})
        nodes.pop(node, None)
        if not nodes:
            facts.holders.pop(rank, None)
        if not facts.holders and (facts.void or facts.certificate is None):
            self.drop(facts)
        self.dirty.add(snapshot)

    def forget_node(self, node: str) -> None:
        for facts in list(self.facts.values()):
            for rank in [rank for rank, nodes in facts.holders.items() if node in nodes]:
                self.remove(node, facts.snapshot, rank)

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
        self.dirty.update(self.facts)

    def release(self, snapshot: SnapshotId) -> None:
        self.facts.pop(snapshot, None)
        self._keep_released(snapshot)

    def drop(self, facts: Facts) -> None:
        """Nobody holds it any more, as far as is known."""
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
    def weigh(self, facts: Facts) -> None:
        """Bring level, classes and agreement of this snapshot up to date."""
        if facts.classes is None:
            facts.classes = self._classes(facts)
        if facts.classes is None:
            facts.level = -1
            return
        domain = self._ctx.domain
        holders = {
            rank: [(domain(node), tier) for node, tier in nodes.items() if self._live(node)]
            for rank, nodes in facts.holders.items()
        }
        facts.level = level(facts.classes, holders)
        if facts.agreement is None and facts.level >= 0:
            facts.agreement = agree(self.layouts_of(facts), facts.digests)

    def unread(self, facts: Facts) -> bool:
        """A layout is on its way from a live holder: until then nothing can be said about this snapshot."""
        return any(
            name not in self.layouts and any(self._live(node) for node in facts.holders.get(rank, ()))
            for rank, name in facts.layout_ids.items()
        )

    def layouts_of(self, facts: Facts) -> dict[int, Layout]:
        return {rank: self.layouts[name] for rank, name in facts.layout_ids.items()}

    def live_holdings(self, facts: Facts) -> dict[str, list[tuple[int, int]]]:
        """node -> (rank, tier), as core.writes wants it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for rank, nodes in facts.holders.items():
            for node, tier in nodes.items():
                if self._live(node):
                    found.setdefault(node, []).append((rank, tier))
        return found

    def newest_complete(self) -> Facts | None:
        usable = [f for f in self.facts.values() if f.level >= 0 and not f.void and self._ctx.is_candidate(f.snapshot)]
        return max(usable, key=lambda facts: facts.snapshot, default=None)

    def _classes(self, facts: Facts) -> Classes | None:
        """None until every rank of the snapshot's world is known with its layout."""
        if not facts.layout_ids or any(name not in self.layouts for name in facts.layout_ids.values()):
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
                node = next((n for n in facts.holders.get(rank, ()) if self._live(n)), None)
                if node is not None:
                    asked.add(name)
                    self._ctx.send(node, LayoutRequest(number, name))
        if asked:
            self._asked_at = self._ctx.now
