"""What is computed of the map of the state, without a message: by the steward of a snapshot, by one node of a restore (P16)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from bench.scale.state import State
from ckptd.core.redundancy.protection import slice_classes
from ckptd.core.state_map.agreement import agree
from ckptd.core.state_map.catalogue import Catalogue
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.recovery import plan_recovery
from ckptd.core.state_map.source_index import Held, SourceIndex
from ckptd.core.state_map.writes import assign_writes

T = TypeVar("T")
LOST = 1  # which node is gone at a flush, and at the restore


class Maps:
    """``took``: seconds of processor time, by what was done."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.took: dict[str, float] = {}
        self.pieces = 0
        made = {rank: state.layout(rank) for rank in range(state.world)}
        tables = {layout.fragments.table.digest: layout.fragments.table for layout in made.values()}
        leaves = [layout.leaf for layout in made.values()]
        self.nbytes = sum(map(len, leaves)) + sum(len(table.encoded) for table in tables.values())
        self._layouts = self._timed("read", lambda: [Layout.decode(leaf, tables.get) for leaf in leaves])
        self._by_rank = {layout.rank: layout for layout in self._layouts}
        self._timed("names", lambda: [layout.layout_id for layout in self._layouts])

    def _timed(self, what: str, call: Callable[[], T]) -> T:
        began = time.thread_time()
        found = call()
        self.took[what] = self.took.get(what, 0.0) + time.thread_time() - began
        return found

    def _nodes(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Who holds its slot, and of which tier."""
        at = rank // self.state.each
        return (f"n{at}", 0), (f"n{(at + 1) % self.state.nodes}", 1)

    def snapshot(self) -> dict[str, float]:
        """The first one and a steady one are agreed upon and weighed; one is written, with all nodes and after a loss."""
        self.took = {}
        for step in (1, 2):
            digests = {rank: self.state.digests(layout, step) for rank, layout in self._by_rank.items()}
            agreed = self._timed(f"agree {step}", lambda digests=digests: agree(self._by_rank, digests))  # type: ignore[misc]
            self._timed(f"classes {step}", lambda: slice_classes(self._by_rank))
        holdings: dict[str, list[tuple[int, int]]] = {}
        for rank in self._by_rank:
            for node, tier in self._nodes(rank):
                holdings.setdefault(node, []).append((rank, tier))
        self._timed("writes", lambda: assign_writes(self._by_rank, holdings, agreed.per_rank))
        del holdings[f"n{LOST}"]
        self._timed("writes after a loss", lambda: assign_writes(self._by_rank, holdings, agreed.per_rank))
        return self.took

    def restore(self, nodes: int) -> dict[str, float]:
        """Into a world of so many nodes: what its first one does for its ranks."""
        self.took, self.pieces = {}, 0
        state = self.state.into(nodes)
        held = [
            Held(node, rank, tier, layout)
            for rank, layout in self._by_rank.items()
            for node, tier in self._nodes(rank)
            if node != f"n{LOST}"
        ]
        self._timed("catalogue", lambda: Catalogue.from_layouts(self._by_rank, {}).to_bytes())
        wants = {rank: state.wants(rank) for rank in range(state.each)}
        keys = {want.key for asked in wants.values() for want in asked}
        index = self._timed("index", lambda: SourceIndex(held, keys))
        for rank, asked in wants.items():
            plan = self._timed("plan", lambda rank=rank, asked=asked: plan_recovery(asked, index, "n0", rank))  # type: ignore[misc]
            assert not plan.uncovered, plan.uncovered[:3]
            self.pieces += len(plan.pieces)
        return self.took
